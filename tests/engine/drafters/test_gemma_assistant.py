"""Drafting with a Gemma 4 assistant: its inputs, and the unchanged text."""

from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_speculation import (
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    demo_models,
)
from mlx_speculation.demo import demo_prompts
from mlx_speculation.engine import AssistantDraft, CascadeDraft, Proposal
from mlx_speculation.engine.drafters.base import Choose
from mlx_speculation.engine.drafters.draft import HeadDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import (
    DrafterFaultWarning,
    InvalidRequestError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from mlx_speculation.models import Lane
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.gemma_assistant import (
    Assistant,
    probe,
    probe_anchor,
    starts_for,
)
from mlx_speculation.models.gemma_assistant.config import read_assistant_settings
from support.covering import covering
from support.identity import GREEDY, SAMPLED, plain_text, prompt_of
from support.models.assistant_checkpoints import HEADS, TARGETS, WINDOW, config_of, make
from support.models.tiny_tokenizer import byte_tokenizer
from support.references.assistant_oracles import OracleStep

PROMPT, TOKENS = 40, 16  # the prompt is longer than a window of 16
ANCHORS = ("state", "token")
SLIDING = ("slack", "native")


def _mostly(usual: float, *others: float) -> list[Any]:
    """Return parameters of tests; tests with one of `others` are slow."""
    return [usual, *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


@cache
def text_of(name: str, temperature: float = 0.0) -> list[int]:
    tokens = prompt_of(PROMPT)
    result = SpeculativeGenerator(make(name).target, byte_tokenizer()).generate(
        tokens, max_tokens=TOKENS + 12, sampling=_sampling(temperature)
    )
    return tokens + result.tokens


def _sampling(temperature: float) -> Sampling:
    return SAMPLED if temperature else GREEDY


def draft_of(name: str, head: str = "dense", **options: Any) -> AssistantDraft:
    made = make(name, head)
    return AssistantDraft(made.target, made.assistant, **options)


def oracle(
    name: str, text: list[int], *, anchor: Any = "state", **options: Any
) -> tuple[AssistantDraft, OracleStep]:
    draft = draft_of(name, anchor=anchor)
    knowing = OracleStep(draft, text, **options)
    draft.step = knowing
    return draft, knowing


def generator(name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
    options.setdefault("draft_length", 3)
    return SpeculativeGenerator(
        make(name).target, byte_tokenizer(), draft=draft, **options
    )


@pytest.mark.parametrize(
    ("name", "head", "temperature"),
    covering(TARGETS, HEADS, (0.0, 0.8), pairs=[(1, 2)]),
)
def test_an_assistant_leaves_the_text_as_plain_decoding_has_it(
    name: str, head: str, temperature: float
) -> None:
    text = text_of(name, temperature)
    result = generator(name, draft_of(name, head)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=_sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.drafted >= TOKENS // 2
    assert not result.stats.drafter_faults
    if not temperature:
        assert plain_text(make(name).target, text[:PROMPT], TOKENS) == result.tokens


@pytest.mark.parametrize("temperature", _mostly(0.8, 0.0))
def test_a_text_model_inside_of_another_has_an_assistant(temperature: float) -> None:
    """Gemma 4 is published in this form."""
    sampling = _sampling(temperature)
    plain, drafted = (
        generator("wrapped", draft).generate(
            prompt_of(PROMPT), max_tokens=TOKENS, sampling=sampling
        )
        for draft in (None, draft_of("wrapped"))
    )
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize(
    ("name", "length", "ways"),
    covering(TARGETS, (3, 1, 6), [*zip(SLIDING, ANCHORS, strict=True)]),
)
def test_an_oracle_is_always_right(
    name: str, length: int, ways: tuple[Any, str]
) -> None:
    sliding, anchor = ways
    text = text_of(name)
    draft, knowing = oracle(name, text, anchor=anchor)
    result = generator(name, draft, draft_length=length, sliding=sliding).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.rounds == -(-TOKENS // (length + 1))
    # A round begins at the newest token, and its steps have consecutive numbers.
    assert knowing.calls[: length + 1] == [
        *((PROMPT - 1, step) for step in range(length)),
        (PROMPT + length, 0),
    ]


@pytest.mark.parametrize("sparse", [False, True])
def test_an_oracle_is_right_where_tokens_are_sampled(sparse: bool) -> None:
    text = text_of("shared", 0.8)
    draft, _ = oracle("shared", text, sparse=sparse)
    result = generator("shared", draft).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=SAMPLED
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(("rule", "head"), covering(["rejection", "block"], HEADS))
def test_under_other_rules_every_draft_has_its_distribution(
    rule: Any, head: str
) -> None:
    """A draft without the probabilities of its draws would be refused."""
    draft = draft_of("shared", head)
    result = generator("shared", draft, acceptance=rule).generate(
        prompt_of(PROMPT), max_tokens=TOKENS, sampling=SAMPLED
    )
    assert len(result.tokens) == TOKENS
    assert result.stats.drafted > 0


@pytest.mark.parametrize(
    ("name", "sliding", "every"), covering(TARGETS, SLIDING, (3, 2, 5))
)
def test_after_a_wrong_draft_only_committed_rows_are_read(
    name: str, sliding: Any, every: int
) -> None:
    """The oracle checks every row, so a row of a rejected draft would be noticed."""
    text = text_of(name)
    draft, _ = oracle(name, text, wrong=lambda position: position % every == 0)
    result = generator(name, draft, draft_length=4, sliding=sliding).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert 0 < result.stats.acceptance_rate < 1


def test_long_prompts_are_fed_in_chunks_and_one_state_is_kept() -> None:
    text = text_of("shared")
    draft, knowing = oracle("shared", text)
    prefixes = PrefixCache(max_bytes=1 << 26, every=16)
    stream = generator("shared", draft, prefix_cache=prefixes).stream(
        text[:PROMPT], max_tokens=TOKENS
    )
    chunks = []
    for chunk in stream:
        chunks.append(chunk.token)
        follower: Any = stream.request.target.follower
        assert follower.stop - follower.start <= 2 * 4  # of the last two rounds
    assert chunks == text[PROMPT : PROMPT + TOKENS]
    assert stream.result.stats.acceptance_rate == 1.0
    assert knowing.calls[0] == (PROMPT - 1, 0)


def test_a_prompt_out_of_a_prefix_cache_is_read_as_it_lies() -> None:
    """An assistant reads the rows in the cache, and needs only one state."""
    text = text_of("shared")
    prefixes = PrefixCache(max_bytes=1 << 26, every=16)
    generator("shared", None, prefix_cache=prefixes).generate(text[:24], max_tokens=1)
    draft, _ = oracle("shared", text)
    result = generator("shared", draft, prefix_cache=prefixes).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert result.stats.reused > 0
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0


CACHES: dict[str, Any] = {
    "native": lambda model: make_prompt_cache(model),
    "whole": lambda model: [KVCache() for _ in make_prompt_cache(model)],
    "quantized": lambda model: [
        cache.to_quantized(group_size=32, bits=8) if type(cache) is KVCache else cache
        for cache in make_prompt_cache(model)
    ],
}


@pytest.mark.parametrize("kind", ["native", "whole"])
@pytest.mark.parametrize("named", [False, True])
def test_a_passed_cache_is_read(kind: str, named: bool) -> None:
    """If `named`, the token ids of the passed cache are passed too."""
    name = "unshared"
    text = text_of(name)
    target = make(name).target
    # Without windows, texts longer than the model's window differ, so texts are short.
    size = 10 if kind == "whole" else 24
    caches = CACHES[kind](target)
    target(mx.array([text[:size]]), cache=caches)
    draft, knowing = oracle(name, text)
    result = generator(name, draft).generate(
        text[size : size + 4] if kind == "whole" else text[size:PROMPT],
        max_tokens=2 if kind == "whole" else TOKENS,
        prompt_cache=caches,
        cached_tokens=text[:size] if named else None,
    )
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    assert knowing.calls[0][0] == (13 if kind == "whole" else PROMPT - 1)
    if kind == "native":
        assert result.tokens == text[PROMPT : PROMPT + TOKENS]
        assert result.stats.acceptance_rate == 1.0


def test_quantized_keys_are_read() -> None:
    name = "quantizable"
    target = make(name).target
    tokens = prompt_of(PROMPT)
    results = [
        generator(name, draft).generate(
            tokens, max_tokens=TOKENS, prompt_cache=CACHES["quantized"](target)
        )
        for draft in (None, draft_of(name))
    ]
    plain, drafted = results
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0
    assert not drafted.stats.drafter_faults


@pytest.mark.parametrize(
    ("caches", "said"),
    [
        (lambda: ChunkedKVCache(512), "layer 1.*its cache, a ChunkedKVCache. Use"),
        (lambda: RotatingKVCache(WINDOW, keep=4), "layer 1.*with keep=4"),
    ],
)
def test_a_passed_cache_that_cannot_be_read_is_refused(caches: Any, said: str) -> None:
    target = make("shared").target
    passed = make_prompt_cache(target)
    passed[1] = caches()
    with pytest.raises(UnsupportedCacheError, match=said):
        generator("shared", draft_of("shared")).stream([1, 2], prompt_cache=passed)
    assert all(cache.offset == 0 for cache in passed)


def test_a_state_that_was_never_seen_is_waited_for() -> None:
    """A passed cache has only rows, so the first round is plain."""
    text = text_of("shared")
    caches = make_prompt_cache(make("shared").target)
    make("shared").target(mx.array([text[: PROMPT - 1]]), cache=caches)
    draft, knowing = oracle("shared", text, gone=1)
    result = generator("shared", draft).generate(
        text[PROMPT - 1 : PROMPT],
        max_tokens=TOKENS,
        prompt_cache=caches,
        cached_tokens=text[: PROMPT - 1],
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert knowing.calls[0][0] > PROMPT - 1


@pytest.mark.parametrize(
    ("name", "ways"), covering(TARGETS, [("slack", 0), ("native", 1)])
)
def test_a_step_that_is_on_its_way_is_not_read(
    name: str, ways: tuple[Any, int]
) -> None:
    """After a round without a draft the caches hold the newest token's row already."""

    class Seldom(HeadDraft):
        def __init__(self, draft: AssistantDraft) -> None:
            self.model = draft.model
            self._draft, self.rounds = draft, 0

        def open(
            self, lane: Lane, sequence: Sequence, draft_cache: Any = None
        ) -> "Seldom":
            self._drafter = self._draft.open(lane, sequence)
            return self

        def begin(self, sequence: Sequence) -> None:
            self._drafter.begin(sequence)

        def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
            self.rounds += 1
            if self.rounds % 3:
                return Proposal(mx.array([], mx.uint32))
            return self._drafter.propose(sequence, limit, choose)

        def settle(self, accepted: int) -> None:
            self._drafter.settle(accepted)

        def discard(self) -> None:
            self._drafter.discard()

    sliding, gone = ways
    text = text_of(name)
    draft, knowing = oracle(name, text, gone=gone)
    result = generator(name, Seldom(draft), sliding=sliding).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert len(knowing.calls) >= 8


def test_a_failing_step_leaves_the_caches_and_the_text() -> None:
    """A step of a chain raises an error, the first or a later one."""
    text = text_of("shared")
    for anywhere in (0, 1, 2, 5):
        draft, knowing = oracle("shared", text)

        def failing(*given: Any, knowing: Any = knowing, at: int = anywhere) -> Any:
            if len(knowing.calls) == at:
                raise RuntimeError("broken")
            return knowing(*given)

        draft.step = failing  # type: ignore[assignment]
        caches = make_prompt_cache(make("shared").target)
        with pytest.warns(DrafterFaultWarning, match="RuntimeError: broken"):
            result = generator("shared", draft).generate(
                text[:PROMPT], max_tokens=TOKENS, prompt_cache=caches
            )
        assert result.tokens == text[PROMPT : PROMPT + TOKENS]
        assert len(result.stats.drafter_faults) == 1
        assert {cache.offset for cache in caches} == {PROMPT + TOKENS}


def address(cache: Any) -> int:
    mx.eval(cache.keys)
    where: int = np.asarray(cache.keys).ctypes.data
    return where


@pytest.mark.parametrize(
    ("name", "hold"), covering(TARGETS, (False, True), quick=(0, ["shared", "gemma3"]))
)
def test_the_target_goes_on_writing_in_place(name: str, hold: bool) -> None:
    """If a row that was read is still held, the next write copies the buffer."""
    draft, kept_reads = draft_of(name), []
    inner = draft.step

    def step(embedded: Any, state: Any, read: Any, position: int) -> Any:
        kept_reads.append(read) if hold else None
        return inner(embedded, state, read, position)

    draft.step = step
    stream = generator(name, draft).stream(prompt_of(PROMPT), max_tokens=TOKENS)
    places: dict[int, set[int]] = {
        place: set() for place in draft.shared.places.values()
    }
    for number, _ in enumerate(stream):
        for place, addresses in places.items():
            if number > 4:  # buffers can grow in the first writes
                addresses.add(address(stream.request.target.caches[place]))
    assert all((len(addresses) > 1) == hold for addresses in places.values())


@pytest.mark.parametrize("anchor", ANCHORS)
def test_all_steps_of_a_round_stand_at_one_position(anchor: Any) -> None:
    draft = draft_of("shared", anchor=anchor)
    inner, places = draft.step, []

    def noting(embedded: Any, state: Any, read: Any, position: int) -> Any:
        places.append((position, read["full_attention"][0].shape[2]))
        return inner(embedded, state, read, position)

    draft.step = noting
    generator("shared", draft).generate(prompt_of(PROMPT), max_tokens=4)
    first = PROMPT - 1
    assert places[:3] == [(first - (anchor == "state"), first)] * 3


def test_an_anchor_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="anchor is 'middle'"):
        draft_of("shared", anchor="middle")


def test_an_assistant_of_another_width_is_refused() -> None:
    config = {**config_of("shared"), "backbone_hidden_size": 96}
    assistant = Assistant(read_assistant_settings(config))
    with pytest.raises(UnsupportedModelError, match=r"hidden size 96.* has 64"):
        AssistantDraft(make("shared").target, assistant)


def test_an_assistant_with_fewer_tokens_is_refused() -> None:
    config = config_of("shared", vocab_size=200)
    assistant = Assistant(read_assistant_settings(config))
    draft = AssistantDraft(make("shared").target, assistant)
    with pytest.raises(InvalidRequestError, match=r"200 token ids.*up to 255"):
        generator("shared", draft)


def test_an_assistant_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="with another model"):
        generator("gemma3", draft_of("shared"))
    with pytest.raises(InvalidRequestError, match="2 heads"):
        generator("shared", CascadeDraft(draft_of("shared"), draft_of("shared")))


@cache
def demo() -> SpeculativeGenerator:
    folders = demo_models()
    # Half as much text as usual is enough for a probe to score above chance.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnText, "of", partial(OwnText.of, steps=8))
        return SpeculativeGenerator.from_pretrained(
            folders["sliding"], draft=folders["assistant"]
        )


def code(tokens: int) -> list[int]:
    """Return the beginning of a bundled prompt that was not in the training data."""
    text = next(prompt.text for prompt in demo_prompts() if prompt.group == "code")
    ids: list[int] = demo().tokenizer.encode(text)[:tokens]
    return ids


@pytest.mark.slow  # the next test loads it too, which fails for an untrained one
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_trained_assistant_is_often_right(temperature: float) -> None:
    """The prompt is longer than the window, 96; of random drafts 2 % are accepted."""
    sampling = Sampling(temperature=temperature, seed=3)
    plain, drafted = (
        demo().generate(
            code(100), max_tokens=24, sampling=sampling, draft_length=length
        )
        for length in (0, 4)
    )
    assert drafted.tokens == plain.tokens
    assert set(drafted.stats.sources) == {"assistant"}
    assert drafted.stats.acceptance_rate > 0.3


@pytest.mark.openblas
def test_the_probe_leaves_the_trained_assistant_where_it_was_trained() -> None:
    assert demo()._setup.draft.anchor == "state"  # type: ignore[union-attr]


@pytest.mark.openblas
def test_the_probe_finds_another_anchor_where_it_is_surely_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The usual anchor is shifted by hundreds of positions."""

    def moved(anchor: Any, known: int) -> int:
        return known - 1 + (700 if anchor == "state" else 0)

    draft: Any = demo()._setup.draft
    starts = starts_for(demo().tokenizer)
    monkeypatch.setattr(probe, "position_of", moved)
    scores = probe_anchor(draft.assistant, draft.model, starts)
    assert list(scores) == ["token", "state"]
