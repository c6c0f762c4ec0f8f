"""Quantized drafts and drafts from few ids change neither text nor target."""

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import (
    CascadeDraft,
    InvalidRequestError,
    LookupDraft,
    SpeculativeGenerator,
    reduced_vocabulary,
)
from mlx_speculation.engine import EagleDraft, MtpDraft
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.models import (
    LaneRound,
    MtpConvention,
    quantize_weights,
    wrapped,
)
from mlx_speculation.models.quantize import weight_bytes
from support.covering import covering, others_slow
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import (
    LAYOUTS,
    family,
    flat,
    make,
    write,
    write_tiny,
)
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT, TOKENS = prompt_of(24), 14


def same_text(folder: Path, **options: Any) -> SpeculativeGenerator:
    """Assert that a draft changes neither text nor target; return its generator."""
    plain = SpeculativeGenerator.from_pretrained(folder)
    generator = SpeculativeGenerator.from_pretrained(folder, **options)
    for sampling in (GREEDY, SAMPLED):
        request: dict[str, Any] = {
            "max_tokens": TOKENS,
            "sampling": sampling,
            "stop_tokens": (),
        }
        expected = plain.generate(PROMPT, **request)
        result = generator.generate(PROMPT, **request)
        assert result.tokens == expected.tokens
        assert result.stats.drafted > TOKENS // 2
    for name, weight in flat(plain.model).items():
        assert mx.array_equal(weight, flat(generator.model)[name])
    return generator


@pytest.mark.parametrize("bits", [2, 4])
def test_a_quantized_draft_model_leaves_the_text(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "llama"
    write_tiny(folder)
    generator = same_text(folder, draft=folder, quantize_draft=bits)
    draft: Any = generator.draft_models[0]
    assert isinstance(draft.lm_head, nn.QuantizedLinear)
    assert draft.lm_head.bits == bits
    assert weight_bytes(draft) < weight_bytes(generator.model) / 32 * (bits + 1.5)


@pytest.mark.parametrize("name", others_slow(["qwen3_5", "mimo", "step3p5"], ["mimo"]))
def test_a_quantized_head_leaves_the_text(tmp_path: Path, name: str) -> None:
    written = write(tmp_path / "model", name)
    convention = family(LAYOUTS[name]).convention
    generator = same_text(
        written.folder, draft="mtp", quantize_draft=4, convention=convention
    )
    draft: Any = generator._setup.draft
    quantized = [m for _, m in draft.mtp.head.named_modules() if hasattr(m, "bits")]
    assert quantized
    assert not any(hasattr(m, "bits") for _, m in generator.model.named_modules())
    assert isinstance(convention, MtpConvention)


def test_a_quantized_eagle_head_leaves_the_text(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    folder = write_eagle(tmp_path / "eagle", "vllm")
    draft = EagleDraft.from_folder(folder, model, layer_ids="tuple")
    whole = weight_bytes(model)
    quantize_weights(draft.head, 4)
    head: Any = draft.own_weights
    assert isinstance(head.fc, nn.QuantizedLinear)
    assert weight_bytes(model) == whole
    options: dict[str, Any] = {"max_tokens": TOKENS, "sampling": SAMPLED}
    plain = SpeculativeGenerator(model, byte_tokenizer())
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
    result = generator.generate(PROMPT, **options)
    assert result.tokens == plain.generate(PROMPT, **options).tokens
    assert result.stats.drafted > TOKENS // 2


IDS = list(range(0, 256, 3))


def drafted_ids(generator: SpeculativeGenerator, **options: Any) -> set[int]:
    drafted: list[int] = []
    inner = CheckedChoose.checked

    def noting(self: CheckedChoose, draft: Proposal, limit: int) -> Proposal:
        proposal = inner(self, draft, limit)
        drafted.extend(int(token) for token in proposal.tokens)
        if proposal.probs is not None:
            outside = [i for i in range(256) if i not in IDS]
            assert proposal.probs[:, mx.array(outside)].max() == 0
            assert mx.abs(proposal.probs.sum(axis=-1) - 1).max() < 1e-5
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedChoose, "checked", noting)
        result = generator.generate(PROMPT, max_tokens=TOKENS, **options)
    assert result.stats.drafted == len(drafted) > TOKENS // 2
    if "sampling" not in options or generator._setup.options.acceptance == "keyed":
        plain = SpeculativeGenerator(generator.model, generator.tokenizer)
        expected = plain.generate(PROMPT, max_tokens=TOKENS, **options).tokens
        assert result.tokens == expected
    return set(drafted)


@pytest.mark.parametrize(
    ("name", "acceptance"),
    covering(
        ("llama", "gemma3_text", "qwen3_5", "lfm2"),
        ("keyed", "rejection", "block"),
        quick=(0, ("llama", "gemma3_text", "qwen3_5")),
    ),
)
def test_a_model_drafts_from_the_reduced_vocabulary_alone(
    name: str, acceptance: Any
) -> None:
    model = build(name)
    generator = SpeculativeGenerator(
        model,
        byte_tokenizer(),
        draft=build(name),
        draft_vocabulary=reversed(IDS),
        acceptance=acceptance,
    )
    for options in ({}, {"sampling": SAMPLED}):
        drafted = drafted_ids(generator, **options)
        assert drafted <= set(IDS)
        assert max(drafted) > len(IDS)  # these are ids, not places in `IDS`


@pytest.mark.parametrize(
    "name",
    others_slow(
        ["qwen3_5", "step3p5", "longcat_flash", "mimo"], ["qwen3_5", "step3p5"]
    ),
)
def test_a_head_drafts_from_the_reduced_vocabulary_alone(name: str) -> None:
    """step3p5's layers have output layers of their own."""
    _, target, head = make(name)
    draft = MtpDraft(target, head)
    generator = SpeculativeGenerator(
        target, byte_tokenizer(), draft=draft, draft_vocabulary=IDS
    )
    drafted = drafted_ids(generator) | drafted_ids(generator, sampling=SAMPLED)
    assert drafted <= set(IDS)
    assert max(drafted) > len(IDS)
    assert draft.mtp is not generator._setup.draft.mtp  # type: ignore[union-attr]


def test_with_every_id_nothing_changes() -> None:
    model = build("llama")
    results = [
        SpeculativeGenerator(
            model, byte_tokenizer(), draft=build("llama", seed=1), draft_vocabulary=ids
        ).generate(PROMPT, max_tokens=TOKENS, sampling=SAMPLED)
        for ids in (None, range(256))
    ]
    assert results[0].stats.drafted == results[1].stats.drafted
    assert results[0].stats.accepted == results[1].stats.accepted


def test_a_cascade_is_reduced_where_it_can_be() -> None:
    model = build("llama")
    cascade = CascadeDraft(LookupDraft(), build("llama", seed=1))
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=cascade, draft_vocabulary=IDS
    )
    result = generator.generate(PROMPT, max_tokens=TOKENS)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    assert result.tokens == plain.generate(PROMPT, max_tokens=TOKENS).tokens


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "has 0 ids, but needs at least 1; each id must be from 0 to 255"),
        ([-1, 3], "has ids from -1 to 3"),
        ([3, 256], "has ids from 3 to 256"),
        ([3, 4, 3], "the id 3 twice"),
        ([3.5], "hold 3.5"),
        (["a"], "hold 'a'"),
    ],
)
def test_vocabularies_that_are_none_are_refused(ids: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        SpeculativeGenerator(
            build("llama"), byte_tokenizer(), draft=build("llama"), draft_vocabulary=ids
        )


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_draft_without_logits_has_no_vocabulary(draft: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a draft model or an MTP head"):
        SpeculativeGenerator(
            build("llama"), byte_tokenizer(), draft=draft, draft_vocabulary=IDS
        )


@given(
    tokens=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    size=st.integers(1, 25),
)
def test_the_most_frequent_ids_are_kept(tokens: list[int], size: int) -> None:
    kept = reduced_vocabulary(tokens, size)
    counts = Counter(tokens)
    assert kept == sorted(set(kept))
    assert len(kept) == min(size, len(counts))
    left = counts.keys() - set(kept)
    for out in left:
        assert all((counts[out], -out) < (counts[one], -one) for one in kept)


def test_texts_are_counted_with_the_tokenizers_end() -> None:
    tokenizer = wrapped(byte_tokenizer())
    tokenizer.add_eos_token("~")
    ids = reduced_vocabulary(["aab", "abc"], 3, tokenizer=tokenizer)
    ends = set(tokenizer.eos_token_ids)
    assert ends
    assert ends <= set(ids)
    common = tokenizer.encode("aab", add_special_tokens=False)
    assert set(ids) - ends <= set(common)
    assert len(ids) == 3
    assert reduced_vocabulary("aab", 9, tokenizer=tokenizer) == sorted({*common, *ends})


def test_what_cannot_be_counted_is_refused() -> None:
    for texts, size, said in (
        ("text", 5, "tokenizer is None"),
        ([], 5, "0 tokens"),
        ([1.5], 5, "hold 1.5"),
        ([1], 0, "size is 0"),
        ([1], True, "size is True"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            reduced_vocabulary(texts, size)  # type: ignore[arg-type]


def test_what_cannot_be_quantized_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    for draft, said in (
        ("lookup", "'lookup'"),
        (None, "None"),
        (build("llama"), "a Model"),
    ):
        with pytest.raises(InvalidRequestError, match=f"draft is {said}, and only"):
            SpeculativeGenerator.from_pretrained(
                tmp_path / "missing", draft=draft, quantize_draft=4
            )
    with pytest.raises(InvalidRequestError, match="is 7, but has to be one of 2, 3, 4"):
        SpeculativeGenerator.from_pretrained(
            tmp_path / "missing", draft="mtp", quantize_draft=7
        )


@pytest.mark.parametrize("together", [False, True])
def test_only_a_draft_model_reads_its_prompt_in_the_ways_of_a_round(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_draft` is set in the draft model's lane, and not in the target's."""
    guessed: list[tuple[nn.Module, bool]] = []
    forward = LaneRound.forward

    def noted(self: LaneRound, tokens: mx.array) -> mx.array:
        if len(tokens) > 9:
            guessed.append((self._lane.model, self._lane.is_draft))
        return forward(self, tokens)

    monkeypatch.setattr(LaneRound, "forward", noted)
    model, draft = build("llama"), build("llama", seed=7)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
    options: dict[str, Any] = {"max_tokens": 6, "draft_length": 3, "stop_tokens": ()}
    if together:
        generator.generate_batch([PROMPT, PROMPT], **options)
    else:
        generator.generate(PROMPT, **options)
    assert {id(model) for model, _ in guessed} == {id(model), id(draft)}
    assert all(is_draft == (each is draft) for each, is_draft in guessed)
