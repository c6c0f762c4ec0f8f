"""Draft models with another tokenizer do not change the target's text."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mlx_speculation import (
    CascadeDraft,
    InvalidRequestError,
    LookupDraft,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    TokenizerMismatchError,
    allowed_tokens,
)
from mlx_speculation.engine.drafters.foreign_model import (
    CommonTokens,
    ForeignModelDraft,
    TokenTexts,
)
from support.identity import prompt_of
from support.models.mtp_checkpoints import write_tiny
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer, merging_tokenizer

TARGET = byte_tokenizer(("<end>",))
PROMPT = prompt_of(21)
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=4)]
EXAMPLES = settings().max_examples


@cache
def model(name: str, seed: int = 0, vocab: int = 600) -> nn.Module:
    return build(name, seed=seed, vocab=vocab)


def permuted(source: nn.Module, ids: list[int]) -> nn.Module:
    """Return a model for which id `i` stands for id `ids[i]` of the source."""
    made = build("llama", vocab=600)
    made.update(source.parameters())
    order = mx.array(ids)
    made.model.embed_tokens.weight = made.model.embed_tokens.weight[order]
    if "lm_head" in made:
        made.lm_head.weight = made.lm_head.weight[order]
    return made


@given(
    name=st.sampled_from(["llama", "gemma3_text", "qwen3_5"]),
    target_merges=st.integers(0, 80),
    draft_merges=st.integers(0, 80),
    letters=st.sampled_from([256, 150]),
    seed=st.integers(0, 1000),
    sampling=st.sampled_from(SAMPLINGS),
    length=st.integers(1, 5),
    constrained=st.booleans(),
)
@settings(max_examples=EXAMPLES // 8)
def test_the_text_is_that_of_plain_decoding_for_any_two_vocabularies(
    name: str,
    target_merges: int,
    draft_merges: int,
    letters: int,
    seed: int,
    sampling: Sampling,
    length: int,
    constrained: bool,
) -> None:
    tokenizer = merging_tokenizer(seed, target_merges)
    draft_tokenizer = merging_tokenizer(seed + 1, draft_merges, letters)
    common = CommonTokens(tokenizer, draft_tokenizer)
    options: dict[str, Any] = {
        "max_tokens": 16,
        "sampling": sampling,
        "stop_tokens": (),
        "constraint": allowed_tokens(range(0, 250, 3)) if constrained else None,
    }
    plain = SpeculativeGenerator(model(name), tokenizer, draft=None)
    expected = plain.generate(PROMPT, **options).tokens
    generator = SpeculativeGenerator(
        model(name),
        tokenizer,
        draft=ForeignModelDraft(model("llama", 1), common),
        draft_length=length,
    )
    for _ in range(2):
        result = generator.generate(PROMPT, **options)
        assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
        assert result.tokens == expected
        assert result.stats.sources["foreign model"].drafted > 0


@pytest.mark.parametrize("acceptance", ["keyed", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_under_other_ids_is_always_right(
    temperature: float, acceptance: Any
) -> None:
    """The draft is the target with other ids: inputs and proposals are translated."""
    draft_tokenizer = merging_tokenizer(3, 0)
    theirs, ours = TARGET.get_vocab(), draft_tokenizer.get_vocab()
    ids = [theirs[name] for name, _ in sorted(ours.items(), key=lambda pair: pair[1])]
    target = build("llama", vocab=600)
    draft = permuted(target, ids + list(range(256, 600)))
    # The draft's vocabulary has only bytes, and no token for the end.
    options: dict[str, Any] = {
        "max_tokens": 30,
        "constraint": allowed_tokens(range(256)),
    }
    generator = SpeculativeGenerator(
        target,
        TARGET,
        draft=ForeignModelDraft(draft, CommonTokens(TARGET, draft_tokenizer)),
        draft_length=4,
        acceptance=acceptance,
    )
    sampling = Sampling(temperature=temperature, seed=5)
    result = generator.generate(PROMPT, sampling=sampling, stop_tokens=(), **options)
    assert result.stats.acceptance_rate == 1
    assert result.stats.drafted >= 23


@given(seed=st.integers(0, 500), merges=st.integers(0, 120), text=st.text(max_size=30))
@settings(max_examples=EXAMPLES)
def test_text_in_tokens_of_the_draft_is_the_same_text(
    seed: int, merges: int, text: str
) -> None:
    one, other = merging_tokenizer(seed, merges), merging_tokenizer(seed + 1, 60)
    common = CommonTokens(one, other)
    tokens = one.encode(text, add_special_tokens=False)
    again = [draft_token for token in tokens for draft_token in common.each(token)]
    assert common.draft.joined(again) == common.target.joined(tokens) == text.encode()
    if text:
        assert common.draft.joined(common.whole(tokens)) == text.encode()
        assert common.whole(tokens) == other.encode(text, add_special_tokens=False)
    assert len(set(common.pairs.values())) == len(common.pairs)
    for mine, draft_token in common.pairs.items():
        assert common.target.joined([mine]) == common.draft.joined([draft_token])


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes spaces and bytes as SentencePiece does."""
    names = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", "é", "ab", "<0x0A>", "<0x62>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")][:0]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_a_token_is_what_it_adds_whatever_it_is_called() -> None:
    texts = TokenTexts(sentencepiece_like())
    pieces = [texts.bytes[i] for i in range(10)]
    assert pieces == [
        b"",
        b"",
        b"",
        b" ",
        b" a",
        b"b",
        "é".encode(),
        b"ab",
        b"\n",
        b"b",
    ]
    assert texts.ids[b"b"] == 5
    assert texts.end == 2
    assert texts.pieces(b"ab \nb\xff a") == [7, 3, 8, 5, 4]
    level = byte_tokenizer(("<end>",))
    common = CommonTokens(sentencepiece_like(), level)
    assert {texts.bytes[i] for i in common.pairs} == {b" ", b"b", b"\n"}
    for i, draft_token in common.pairs.items():
        assert common.draft.bytes[draft_token] == texts.bytes[i]
    assert [common.draft.bytes[draft_token] for draft_token in common.each(6)] == [
        b"\xc3",
        b"\xa9",
    ]


def test_too_few_common_tokens_are_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"0 tokens in common, 0% of the"):
        CommonTokens(
            _words(["alpha", "beta", "gamma", "delta"]), _words(["one", "two", "three"])
        )


def _words(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_folder_is_loaded_and_says_what_it_shares(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    generator = SpeculativeGenerator.from_pretrained(
        tmp_path,
        draft=tmp_path,
        draft_length=3,
        draft_vocabulary="intersection",
    )
    (said,) = generator.notices
    assert "256 tokens in common, 100% of the target's 256 and 100% of" in said
    result = generator.generate("def add(a, b):", max_tokens=12)
    assert result.stats.sources["foreign model"].accepted > 0
    plain = generator.generate("def add(a, b):", max_tokens=12, draft_length=0)
    assert result.tokens == plain.tokens
    caches = make_prompt_cache(generator.draft_models[0])
    with pytest.raises(InvalidRequestError, match="another tokenizer"):
        generator.stream("x", draft_cache=caches)


@pytest.mark.parametrize(
    "draft", ["lookup", "auto", None, CascadeDraft(LookupDraft(), LookupDraft())]
)
def test_what_is_no_folder_of_a_model_is_refused(draft: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not the folder of a draft model"):
        SpeculativeGenerator(
            model("llama"), TARGET, draft=draft, draft_vocabulary="intersection"
        )
    with pytest.raises(InvalidRequestError, match="'all', and 'intersection'"):
        SpeculativeGenerator(
            model("llama"),
            TARGET,
            draft=model("llama", 1),
            draft_vocabulary="all",  # type: ignore[arg-type]
        )


def test_a_draft_without_rows_for_its_tokens_is_refused() -> None:
    common = CommonTokens(TARGET, merging_tokenizer(2, 0))
    draft = ForeignModelDraft(model("llama", vocab=200), common)
    with pytest.raises(InvalidRequestError, match="200 token ids"):
        SpeculativeGenerator(model("llama"), TARGET, draft=draft)


def test_a_prefix_cache_keeps_the_target_alone() -> None:
    """The draft's lane holds other ids, and is not kept."""
    common = CommonTokens(TARGET, merging_tokenizer(2, 40))
    plain = SpeculativeGenerator(model("llama"), TARGET, draft=None)
    generator = SpeculativeGenerator(
        model("llama"),
        TARGET,
        draft=ForeignModelDraft(model("llama", 1), common),
        draft_length=3,
        prefix_cache=PrefixCache(1 << 24),
    )
    prompt = np.arange(40).tolist()
    for tail in ([], [7, 8], [7, 9, 1]):
        result = generator.generate([*prompt, *tail], max_tokens=12)
        assert not result.stats.drafter_faults
        expected = plain.generate([*prompt, *tail], max_tokens=12)
        assert result.tokens == expected.tokens
    assert result.stats.reused >= 40
