"""What the lookup drafter proposes, and where it looks."""

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import save_config, save_model

from mlx_speculation import InvalidRequestError, LookupDraft, SpeculativeGenerator
from mlx_speculation.engine import Drafter, Proposal
from mlx_speculation.engine.lookup.drafter import LookupDrafter
from mlx_speculation.engine.lookup.suffix_automaton import SuffixAutomaton
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


def looking_up(**options: Any) -> LookupDraft:
    return LookupDraft(**{"minimum_match": 3, **options})


def opened(**options: Any) -> LookupDrafter:
    return LookupDrafter(looking_up(**options))


def begun(tokens: SequenceOf[int], **options: Any) -> LookupDrafter:
    drafter = opened(**options)
    drafter.begin(Sequence(list(tokens)))
    return drafter


def expected(
    places: list[list[int]], tail: list[int], minimum: int, per: int, limit: int
) -> list[int]:
    """Search the places in turn; the first is the text itself and has no end."""
    for number, place in enumerate(places):
        best, found = 0, -1
        for end in range(1, len(place)):
            length = 0
            while (
                length < min(end, len(tail), 64 if number else len(tail))
                and place[end - 1 - length] == tail[-1 - length]
            ):
                length += 1
            if length >= max(best, 1):
                best, found = length, end
        if best >= minimum:
            count = min(limit, best * per)
            text = list(place)
            for offset in range(count if number == 0 else 0):
                text.append(text[found + offset])
            return text[found : found + count]
    return []


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(
    text=tokens.filter(len),
    rounds=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6),
    corpus=tokens,
    minimum=st.integers(1, 4),
    per=st.integers(1, 3),
    limit=st.integers(1, 9),
)
def test_proposals_are_what_a_search_finds(
    text: list[int],
    rounds: list[list[int]],
    corpus: list[int],
    minimum: int,
    per: int,
    limit: int,
) -> None:
    """Whatever was proposed between: the place is found in the sequence."""
    drafter = begun(text, minimum_match=minimum, tokens_per_match=per, corpus=[corpus])
    for emitted in [[], *rounds]:
        text = text + emitted
        assert proposed(drafter, text, limit) == expected(
            [text, corpus], text, minimum, per, limit
        )


def test_the_text_comes_first_then_earlier_requests_then_the_corpus() -> None:
    drafter = opened(corpus=[[1, 2, 3, 30]], earlier_tokens=100)
    assert proposed(drafter, [9, 1, 2, 3]) == [30]
    drafter.remember([1, 2, 3, 20])
    drafter.begin(Sequence([9, 1, 2, 3]))
    assert proposed(drafter, [9, 1, 2, 3]) == [20]
    drafter.begin(Sequence([1]))
    assert proposed(drafter, [1, 2, 3, 10, 1, 2, 3]) == [10, 1, 2]


def test_the_latest_of_equally_long_matches_is_taken() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    assert proposed(begun(text), text) == [5, 1, 2]
    drafter = opened(corpus=[[1, 2, 3, 4], [1, 2, 3, 5]])
    assert proposed(drafter, [1, 2, 3]) == [5]
    draft = looking_up(earlier_tokens=20)
    for last in (4, 5, 6):
        LookupDrafter(draft).remember([0, 1, 2, 3, last])
        assert proposed(LookupDrafter(draft), [1, 2, 3]) == [last]


@pytest.mark.parametrize("index", ["automaton", "ngram"])
def test_a_draft_is_as_long_as_its_match_allows(index: Any) -> None:
    text = [*TWIN, 9, 3, 4, 5]
    assert proposed(begun(text, index=index), text) == [6, 7, 8]
    assert proposed(begun(text, index=index, tokens_per_match=2), text) == [
        *[6, 7, 8, 9, 3, 4]
    ]
    assert proposed(begun(text, index=index), text, limit=2) == [6, 7]
    assert proposed(begun(text, index=index, minimum_match=4), text) == []


@pytest.mark.parametrize("index", ["automaton", "ngram"])
def test_a_repeating_text_is_drafted_beyond_its_end(index: Any) -> None:
    text = [7, 1, 2, 1, 2, 1, 2]
    drafter = begun(text, index=index, tokens_per_match=3)
    assert proposed(drafter, text, limit=6) == [1, 2, 1, 2, 1, 2]


def test_drafts_end_with_the_document() -> None:
    documents: Any = [[1, 2, 3, 4], [5, 6, 7, 8], mx.array([9, 1, 2]), np.array([3, 4])]
    drafter = opened(corpus=documents, minimum_match=2, tokens_per_match=9)
    assert proposed(drafter, [5, 6]) == [7, 8]
    assert proposed(drafter, [7, 8]) == []  # followed by nothing
    assert proposed(drafter, [1, 2]) == [3, 4]  # followed by something once
    assert proposed(drafter, [4, 5]) == []  # only across a border


def test_old_requests_are_dropped_beyond_the_limit() -> None:
    drafter = opened(earlier_tokens=40)
    for start in range(0, 200, 10):
        drafter.remember(range(start, start + 9))
        known = drafter._draft.earlier.indexes
        assert sum(len(index.tokens) for index in known) <= 40
        assert proposed(drafter, range(start, start + 5)) == [
            *range(start + 5, start + 9)
        ]
        if start:  # at least half of the limit is known
            assert proposed(drafter, range(start - 10, start - 5)) != []
    assert proposed(drafter, range(100, 105)) == []
    drafter.remember(range(1000, 2000))  # longer than all: its end
    assert proposed(drafter, range(1990, 1995)) == [*range(1995, 2000)]
    assert proposed(drafter, range(1970, 1975)) == []


def test_the_next_turn_of_a_chat_is_not_indexed_twice() -> None:
    drafter = opened(earlier_tokens=2000)
    chat: list[int] = []
    for turn in range(10):
        chat += range(100 * turn, 100 * turn + 80)
        drafter.remember(chat)
    known = sum(len(index.tokens) for index in drafter._draft.earlier.indexes)
    assert known <= 10 * (80 + 1) + 9 * 64
    assert proposed(drafter, [178, 179]) == []
    assert proposed(drafter, [177, 178, 179]) == [200, 201, 202]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_small_limits_hold_nothing_that_could_follow(limit: int) -> None:
    drafter = opened(earlier_tokens=limit, minimum_match=1)
    drafter.remember([1, 2, 3, 4])
    known = drafter._draft.earlier.indexes
    assert sum(len(index.tokens) for index in known) <= limit


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_indexing_does_no_harm(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [*TWIN, 9, 3, 4, 5]
    drafter = begun(text[:3])
    with monkeypatch.context() as patched:

        def interrupted(self: SuffixAutomaton, token: int) -> None:
            raise error  # the token is noted, and has no state yet

        patched.setattr(SuffixAutomaton, "_extend", interrupted)
        with pytest.raises(error):
            drafter.propose(Sequence(text), 8, no_choice)
    drafter.discard()
    assert proposed(drafter, text) == [6, 7, 8]


def test_streams_share_the_corpus_and_not_the_text() -> None:
    draft = looking_up(corpus=[[1, 2, 3, 4]])
    one, other = LookupDrafter(draft), LookupDrafter(draft)
    assert proposed(one, [5, 6, 7, 8, 5, 6, 7]) == [8, 5, 6]
    assert proposed(other, [5, 6, 7]) == []
    assert proposed(other, [1, 2, 3]) == [4]
    assert proposed(one, [5, 6, 7, 8, 5, 6, 7, 8]) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"index": "trie"}, ["'trie'", "'automaton' or 'ngram'"]),
        ({"minimum_match": 0}, ["minimum_match is 0", "at least 1"]),
        ({"minimum_match": 2.0}, ["minimum_match is 2.0", "whole number"]),
        ({"tokens_per_match": True}, ["tokens_per_match is True", "at least 1"]),
        ({"earlier_tokens": -1}, ["earlier_tokens is -1", "at least 0"]),
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
    generator = SpeculativeGenerator(
        model, tokenizer, draft=looking_up(earlier_tokens=1000)
    )
    first = generator.generate(prompt, max_tokens=60)
    again = generator.generate(prompt, max_tokens=60)
    assert first.tokens == again.tokens == text
    assert first.stats.accepted < again.stats.accepted
    assert again.stats.acceptance_rate == 1.0
    assert again.stats.tokens_per_round > 4
    assert again.stats.sources["lookup"].accepted == again.stats.accepted


def test_a_lookup_needs_no_folder(tmp_path: Path) -> None:
    """And a folder of that name is none of its business."""
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
    generator = SpeculativeGenerator(model, tokenizer, draft=looking_up())
    streams = [generator.stream(p, max_tokens=20) for p in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for stream, found in zip(streams, got, strict=True):
            found.append(next(stream).token)
    assert got == expected


def test_a_stream_that_failed_or_never_ran_is_not_remembered() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    draft = looking_up(earlier_tokens=1000)
    generator = SpeculativeGenerator(model, tokenizer, draft=draft)
    generator.stream([1, 2, 3, 4]).close()
    assert proposed(LookupDrafter(draft), [1, 2, 3]) == []
    stream = generator.stream([1, 2, 3, 4], max_tokens=9)
    next(stream)
    stream.close()
    assert proposed(LookupDrafter(draft), [1, 2, 3])[:1] == [4]
