"""Drafting with an MTP head: its inputs, its rollback, and the unchanged text."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import PrefixCache, Sampling, SpeculativeGenerator
from mlx_speculation.engine import CascadeDraft, MtpDraft, Proposal
from mlx_speculation.engine.drafters import mtp as mtp_module
from mlx_speculation.engine.drafters.base import Choose
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import MtpConvention
from mlx_speculation.models.mtp import MtpHead
from support.covering import covering, others_slow
from support.drafters.scripted_draft_lengths import Planned
from support.identity import GREEDY, SAMPLED, plain_text, prompt_of
from support.models.mtp_checkpoints import LAYOUTS, family, make, write
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.references.mtp_oracles import OracleMtp, held_tokens

PROMPT, TOKENS = 40, 16  # the prompt is longer than a window of 16
# Hybrid, sliding with and without full layers, latent, two caches, plain.
TARGETS = ("qwen3_5", "step3p5", "exaone_moe", "deepseek_v3", "deepseek_v32", "mimo")


EVERY = [3, *(pytest.param(every, marks=pytest.mark.slow) for every in (2, 5, 7))]


@cache
def built(name: str) -> tuple[nn.Module, MtpHead]:
    _, target, head = make(name)
    its_family = family(LAYOUTS[name])
    chained = its_family.layers == "chained"
    return target, MtpHead(
        head.layers, its_family.convention, chained=chained, depth=its_family.depth
    )


@cache
def text_of(name: str, temperature: float, prompt: int = PROMPT) -> list[int]:
    tokens = prompt_of(prompt)
    result = SpeculativeGenerator(built(name)[0], byte_tokenizer()).generate(
        tokens, max_tokens=TOKENS + 12, sampling=_sampling(temperature)
    )
    return tokens + result.tokens


def _sampling(temperature: float) -> Sampling:
    return SAMPLED if temperature else GREEDY


def oracle(name: str, text: list[int], **options: Any) -> tuple[MtpDraft, OracleMtp]:
    target, head = built(name)
    draft = MtpDraft(target, head)
    before = head.convention.hidden == "before_norm"
    knowing = OracleMtp(
        target,
        text,
        before_norm=before,
        layers=len(head.layers) if head.chained else 1,
        depth=head.depth,
        **options,
    )
    draft.mtp = knowing  # type: ignore[assignment]
    return draft, knowing


def generator(name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
    options.setdefault("draft_length", 3)
    return SpeculativeGenerator(
        built(name)[0], byte_tokenizer(), draft=draft, **options
    )


@pytest.mark.parametrize(
    ("name", "temperature"), covering(LAYOUTS, (0.0, 0.8), quick=(0, TARGETS))
)
def test_a_head_leaves_the_text_as_plain_decoding_has_it(
    name: str, temperature: float
) -> None:
    target, head = built(name)
    text = text_of(name, temperature)
    result = generator(name, MtpDraft(target, head)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=_sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.drafted >= TOKENS // 2
    assert result.stats.reruns == 0
    if not temperature:
        assert plain_text(target, text[:PROMPT], TOKENS) == result.tokens


@pytest.mark.parametrize(
    ("name", "length", "temperature"), covering(TARGETS, (3, 1, 5), (0.0, 0.8))
)
def test_an_oracle_is_always_right(name: str, length: int, temperature: float) -> None:
    text = text_of(name, temperature)
    draft, knowing = oracle(name, text)
    result = generator(name, draft, draft_length=length).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=_sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    depth = min(length, knowing.head.depth or length)
    assert result.stats.rounds == -(-TOKENS // (depth + 1))
    assert knowing.head.chained or (knowing.chained_steps > 0) == (depth > 1)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", TARGETS)
def test_after_a_wrong_draft_an_oracle_is_right_again(name: str, every: int) -> None:
    text = text_of(name, 0.0)
    draft, _ = oracle(name, text, wrong=lambda position: position % every == 0)
    stream = generator(name, draft, draft_length=4).stream(
        text[:PROMPT], max_tokens=TOKENS
    )
    tokens = [chunk.token for chunk in stream]
    assert tokens == text[PROMPT : PROMPT + TOKENS]
    contained: Any = stream.request.drafter
    drafter = contained.inner
    for layer, caches in enumerate(drafter._cache.layers):
        cached = held_tokens(caches)
        assert cached == text[1 + layer : 1 + layer + len(cached)]
        assert len(cached) == drafter._cache.state.ends[layer]
    # Row i reads token i + 1. The head reads committed tokens when it drafts, so it can
    # lack those of the last round with a draft, and that of a plain step after it.
    assert drafter.history.stop >= PROMPT + TOKENS - (4 + 1) - 2


@pytest.mark.parametrize("name", ["qwen3_5", "step3p5"])
def test_long_prompts_are_fed_in_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_module, "LONGEST_LAG", 4)
    text = text_of(name, 0.0)
    draft, knowing = oracle(name, text)
    prefixes = PrefixCache(max_bytes=1 << 26, every=16)
    result = generator(name, draft, prefix_cache=prefixes).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert result.stats.acceptance_rate == 1.0
    fed = [(start, count) for how, layer, start, count in knowing.calls if not layer]
    assert fed[:3] == [(0, 16), (16, 16), (32, 6)]
    assert all(count <= 5 for _, count in fed[3:])


@pytest.mark.parametrize(("step", "read"), [(2048, 0), (90, 180)])
def test_the_first_token_does_not_wait_for_the_newest_chunk(
    step: int, read: int
) -> None:
    """The head reads the last chunk of the prompt after the first token."""
    text = text_of("qwen3_5", 0.0, prompt=260)
    draft, _ = oracle("qwen3_5", text)
    stream = generator("qwen3_5", draft).stream(
        text[:260],
        max_tokens=TOKENS,
        draft_length=Planned([0, 0, 3]),
        prefill_step_size=step,
    )
    contained: Any = stream.request.drafter
    assert next(stream).token == text[260]
    assert contained.inner.history == range(read)
    rest = [chunk.token for chunk in stream]
    assert rest == text[261 : 260 + TOKENS]
    assert contained.inner.history.start == 0
    assert contained.inner.history.stop > 260
    assert stream.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("name", ["qwen3_5", "step3p5"])
def test_what_is_out_of_a_prefix_cache_is_not_in_the_history(name: str) -> None:
    """The head's history begins where the target began to read."""
    text = text_of(name, 0.0)
    prefixes = PrefixCache(max_bytes=1 << 26, every=16)
    plain = generator(name, None, prefix_cache=prefixes)
    plain.generate(text[:24], max_tokens=1)
    draft, _ = oracle(name, text, first=23)
    result = generator(name, draft, prefix_cache=prefixes).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert result.stats.reused == 23
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0


def test_history_rows_are_never_whole_rows() -> None:
    text = text_of("qwen3_5", 0.0)
    draft, knowing = oracle("qwen3_5", text)
    generator("qwen3_5", draft).generate(text[:PROMPT], max_tokens=TOKENS)
    assert {how for how, *_ in knowing.calls} == {"step"}
    first, *others = knowing.calls
    assert first == ("step", 0, 0, PROMPT - 1)
    # A step reads the tokens of a round and drafts one; each further token is a step.
    counts = [count for _, _, _, count in others]
    assert set(counts) == {1, 4}


@pytest.mark.parametrize("name", ["qwen3_5", "step3p5", "mimo"])
def test_rounds_of_others_are_caught_up_with(name: str) -> None:
    """A scripted drafter drafts in two of three rounds, the head in the third."""

    class Sometimes:
        def __init__(self) -> None:
            self.rounds = 0

        def begin(self, sequence: Sequence) -> None:
            self.rounds = 0

        def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
            self.rounds += 1
            start = len(sequence.tokens)
            count = min(limit, (0, 2, 3)[self.rounds % 3])
            return Proposal(mx.array(text[start : start + count], mx.uint32))

        def settle(self, accepted: int) -> None: ...

        def discard(self) -> None: ...

    text = text_of(name, 0.8)
    draft, knowing = oracle(name, text)
    result = generator(name, CascadeDraft(Sometimes(), draft)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=SAMPLED
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.sources["mtp"].drafted > 0
    assert knowing.calls


@pytest.mark.parametrize("named", [True, False])
def test_a_passed_cache_costs_the_first_draft_alone(named: bool) -> None:
    name = "qwen3_5"
    text = text_of(name, 0.0)
    plain = SpeculativeGenerator(built(name)[0], byte_tokenizer())
    caches = built(name)[0].make_cache()
    prefilled = plain.generate(text[:PROMPT], max_tokens=0, prompt_cache=caches)
    assert prefilled.cached_tokens == text[:PROMPT]
    draft, _ = oracle(name, text, first=PROMPT)
    if not named:
        draft.mtp._text = text[PROMPT:]  # type: ignore[attr-defined]
        draft.mtp._states = draft.mtp._states[:, PROMPT:]  # type: ignore[attr-defined]
        draft.mtp._first = 0  # type: ignore[attr-defined]
    result = generator(name, draft).generate(
        text[PROMPT : PROMPT + 1],
        max_tokens=TOKENS,
        prompt_cache=caches,
        cached_tokens=text[:PROMPT] if named else None,
    )
    assert result.tokens == text[PROMPT + 1 : PROMPT + 1 + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.drafted >= TOKENS // 2


def test_an_interrupt_in_the_head_leaves_caches_that_can_be_used_again() -> None:
    name = "qwen3_5"
    text = text_of(name, 0.0)
    draft, knowing = oracle(name, text)
    step, count = knowing.step, 0

    def failing(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return step(*args)

    knowing.step = failing  # type: ignore[method-assign,assignment]
    caches = built(name)[0].make_cache()
    made = generator(name, draft)
    stream = made.stream(text[:PROMPT], max_tokens=TOKENS, prompt_cache=caches)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    known = stream.cached_tokens
    assert known == text[: len(known)]
    rest = text[len(known) : len(known) + 1]
    result = SpeculativeGenerator(built(name)[0], byte_tokenizer()).generate(
        rest, max_tokens=8, prompt_cache=caches, cached_tokens=known
    )
    assert result.tokens == text[len(known) + 1 : len(known) + 9]


def test_streams_of_one_head_are_independent() -> None:
    name = "mimo_v2_flash"
    target, head = built(name)
    both = generator(name, MtpDraft(target, head))
    texts = [text_of(name, 0.0), text_of(name, 0.0, 21)]
    starts = [PROMPT, 21]
    streams = [
        both.stream(text[:start], max_tokens=20)
        for text, start in zip(texts, starts, strict=True)
    ]
    tokens: list[list[int]] = [[], []]
    for _ in range(20):
        for written, stream in zip(tokens, streams, strict=True):
            written.append(next(stream).token)
    for written, text, start in zip(tokens, texts, starts, strict=True):
        assert written == text[start : start + 20]


def test_a_prompt_of_one_token_is_decoded() -> None:
    name = "step3p5"
    target, head = built(name)
    expected = plain_text(target, [7], 12)
    result = generator(name, MtpDraft(target, head)).generate([7], max_tokens=12)
    assert result.tokens == expected
    assert result.stats.drafted > 0


@pytest.mark.parametrize(
    "name", others_slow(["qwen3_5_moe", "deepseek_v3", "step3p5"], ["step3p5"])
)
def test_a_folder_with_a_head_drafts_with_it(name: str, tmp_path: Path) -> None:
    written = write(tmp_path, name)
    convention = family(LAYOUTS[name]).convention
    made = SpeculativeGenerator.from_pretrained(
        tmp_path, draft="mtp", draft_length=2, convention=convention
    )
    expected = plain_text(made.model, prompt_of(PROMPT), 12)
    result = made.generate(prompt_of(PROMPT), max_tokens=12)
    assert result.tokens == expected
    assert result.stats.sources["mtp"].drafted >= 12
    assert type(made.model) is type(written.target)


def test_a_convention_that_is_named_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_5")
    convention = MtpConvention("before_norm", "before_norm", "hidden_first", "stored")
    made = SpeculativeGenerator.from_pretrained(
        tmp_path, draft="mtp", convention=convention
    )
    draft: Any = made._setup.draft
    assert draft.mtp.head.convention == convention
    expected = plain_text(made.model, prompt_of(PROMPT), 12)
    assert made.generate(prompt_of(PROMPT), max_tokens=12).tokens == expected


def test_a_head_of_another_model_is_refused() -> None:
    target, head = built("mimo")
    draft = MtpDraft(target, head)
    with pytest.raises(InvalidRequestError, match="with another model"):
        SpeculativeGenerator(build("llama"), byte_tokenizer(), draft=draft)
    with pytest.raises(InvalidRequestError, match="2 heads"):
        generator("mimo", CascadeDraft(draft, MtpDraft(target, head)))
