"""Proposals of the lookup drafter, and the texts that it searches."""

import math
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import save_config, save_model

from mlx_speculation import InvalidRequestError, LookupDraft, SpeculativeGenerator
from mlx_speculation.engine import Drafter, Proposal
from mlx_speculation.engine.lookup.drafter import LookupDrafter
from mlx_speculation.engine.lookup.lookup import CHUNK
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.samplers import Choice, Rows
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

TWIN = [1, 2, 3, 4, 5, 6, 7, 8]


def no_choice(logits: mx.array, rows: Rows, ids: mx.array | None = None) -> Choice:
    raise AssertionError("a lookup chooses nothing")


def proposed(drafter: Drafter, tokens: SequenceOf[int], limit: int = 8) -> list[int]:
    draft = drafter.propose(Sequence(list(tokens)), limit, no_choice)
    assert isinstance(draft, Proposal)
    assert draft.tokens.dtype == mx.uint32
    assert draft.source == "lookup"
    assert draft.reads == 0
    return [int(token) for token in np.array(draft.tokens)]


def opened(**options: Any) -> LookupDrafter:
    return LookupDrafter(LookupDraft(**options))


def started(tokens: SequenceOf[int], **options: Any) -> LookupDrafter:
    drafter = opened(**options)
    drafter.begin(Sequence(list(tokens)))
    return drafter


def test_a_draft_goes_on_with_the_longest_match_and_is_as_long_as_asked() -> None:
    text = [*TWIN, 9, 3, 4, 5]
    assert proposed(started(text), text, limit=3) == [6, 7, 8]
    assert proposed(started(text), text, limit=6) == [6, 7, 8, 9, 3, 4]
    assert proposed(started(text), [*text, 99]) == []


def test_the_place_with_the_longest_match_is_taken() -> None:
    drafter = opened(corpus=[[1, 2, 3, 30]], history=100)
    assert proposed(drafter, [9, 1, 2, 3])[:1] == [30]
    drafter.remember([1, 2, 3, 20], 0)  # of equally long matches, the history's wins
    assert proposed(drafter, [9, 1, 2, 3])[:1] == [20]
    assert proposed(drafter, [1, 2, 3, 10, 1, 2, 3])[:1] == [10]
    assert proposed(drafter, [8, 3, 10, 1, 2, 3])[:1] == [20]


def test_a_prediction_is_looked_in_and_counts_as_its_own_source() -> None:
    sequence = Sequence([1, 2, 3], prediction=[2, 3, 4, 5])
    draft = opened().propose(sequence, 2, no_choice)
    assert draft.tokens.tolist() == [4, 5]
    assert draft.source == "prediction"


def test_every_token_has_its_survival_as_far_as_it_is_probable() -> None:
    draft = started(TWIN).propose(Sequence([*TWIN, *TWIN[:2]]), 4, no_choice)
    assert draft.survival is not None
    assert len(draft.survival) == draft.length == 4
    assert draft.until(2).survival == draft.survival[:2]
    long = started(TWIN).propose(Sequence([1, 2, 1]), 40, no_choice)
    assert long.survival is not None
    assert len(long.survival) < long.length == 40


def test_a_repeating_text_is_drafted_beyond_its_end() -> None:
    text = [7, 1, 2, 1, 2, 1, 2]
    assert proposed(started(text), text, limit=6) == [1, 2, 1, 2, 1, 2]


def test_drafts_end_with_the_document() -> None:
    documents: Any = [[1, 2, 3, 4], [5, 6, 7, 8], mx.array([9, 1, 2]), np.array([3, 4])]
    drafter = opened(corpus=documents)
    assert proposed(drafter, [5, 6]) == [7, 8]
    assert proposed(drafter, [7, 8]) == []  # followed by nothing
    assert proposed(drafter, [1, 2]) == [3, 4]  # in two documents, at the end of one
    assert proposed(drafter, [8, 9]) == [1, 2]  # only 9 matches: 8 ends a document


def test_a_long_prompt_is_read_ahead_in_pieces() -> None:
    sequence = Sequence(list(range(5000)) * 2)
    drafter, pieces = opened(), 1
    while not drafter.read_ahead(sequence, lambda count: False):
        pieces += 1
    assert pieces == math.ceil(10_000 / CHUNK)
    assert drafter.propose(sequence, 2, no_choice).tokens.tolist() == [0, 1]


def test_streams_share_history_and_corpus_and_not_the_text() -> None:
    draft = LookupDraft(corpus=[[1, 2, 3, 4]])
    one, other = LookupDrafter(draft), LookupDrafter(draft)
    assert proposed(one, [5, 6, 7, 8, 5, 6, 7], 3) == [8, 5, 6]
    assert proposed(other, [5, 6, 7]) == []
    assert proposed(other, [1, 2, 3]) == [4]
    one.remember([5, 6, 7, 8], 2)
    assert proposed(other, [5, 6, 7]) == [8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"history": -1}, ["history is -1", "at least 0"]),
        ({"history": 2.0}, ["history is 2.0", "whole number"]),
        ({"corpus": [[1], "text"]}, ["Document 1", "str", "Encode"]),
        ({"corpus": [[1.5]]}, ["Document 0", "list", "Encode"]),
        ({"corpus": [3]}, ["Document 0", "int", "Encode"]),
        ({"corpus": [[1], [0, -1]]}, ["Document 1", "-1", "0 to"]),
        ({"corpus": [[2**31]]}, [str(2**31), str(2**31 - 1)]),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LookupDraft(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_generator_looks_up_where_it_is_asked_to() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    plain = SpeculativeGenerator(model, tokenizer)
    prompt = [(7 * i * i + 3) % 256 for i in range(30)]
    text = plain.generate(prompt, max_tokens=60).tokens
    lookup = SpeculativeGenerator(model, tokenizer, draft="lookup")
    result = lookup.generate(prompt + text + prompt, max_tokens=1)
    assert result.stats.drafts == 0
    generator = SpeculativeGenerator(model, tokenizer, draft=LookupDraft(history=1000))
    first = generator.generate(prompt, max_tokens=60)
    again = generator.generate(prompt, max_tokens=60)
    assert first.tokens == again.tokens == text
    assert first.stats.accepted < again.stats.accepted
    assert again.stats.acceptance_rate == 1.0
    assert again.stats.tokens_per_round > 4
    assert again.stats.sources["lookup"].accepted == again.stats.accepted


def test_a_lookup_needs_no_folder(tmp_path: Path) -> None:
    tiny = TINY_MODELS["llama"]
    save_model(tmp_path, build("llama"))
    save_config({**tiny.args, "model_type": tiny.module}, tmp_path / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(tmp_path)
    generator = SpeculativeGenerator.from_pretrained(tmp_path, draft="lookup")
    prompt = [1, 2, 3, 4, 5] * 4
    result = generator.generate(prompt, max_tokens=30)
    assert result.stats.sources.keys() == {"lookup"}
    plain = SpeculativeGenerator(generator.model, generator.tokenizer)
    assert plain.generate(prompt, max_tokens=30).tokens == result.tokens


def test_two_streams_of_one_generator_are_independent() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    prompts = [[5, 6, 7, 8] * 5, [9, 8, 7] * 6]
    plain = SpeculativeGenerator(model, tokenizer)
    expected = [plain.generate(p, max_tokens=20).tokens for p in prompts]
    generator = SpeculativeGenerator(model, tokenizer, draft=LookupDraft())
    streams = [generator.stream(p, max_tokens=20) for p in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for stream, written in zip(streams, got, strict=True):
            written.append(next(stream).token)
    assert got == expected


def test_a_stream_that_failed_or_never_ran_is_not_remembered() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    draft = LookupDraft(history=1000)
    generator = SpeculativeGenerator(model, tokenizer, draft=draft)
    generator.stream([1, 2, 3, 4]).close()
    assert proposed(LookupDrafter(draft), [1, 2, 3]) == []
    stream = generator.stream([1, 2, 3, 4], max_tokens=9)
    next(stream)
    stream.close()
    assert proposed(LookupDrafter(draft), [1, 2, 3])[:1] == [4]
