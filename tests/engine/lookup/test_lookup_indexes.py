"""What an index finds is what a search through the whole text finds."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.lookup.index import (
    BREAK,
    NO_MATCH,
    Index,
    Match,
    append_all,
    continuation,
)
from mlx_speculation.engine.lookup.ngram_index import NgramIndex
from mlx_speculation.engine.lookup.suffix_automaton import SuffixAutomaton

# Ends are exact as long as no walk is cut.
UNCUT = 10**6


def texts(ids: int, longest: int) -> st.SearchStrategy[list[int]]:
    """Random tokens, and tokens that were copied from further up."""

    def grown(parts: list[list[int] | tuple[int, int]]) -> list[int]:
        text: list[int] = []
        for part in parts:
            if isinstance(part, list):
                text += part
            else:
                start = part[0] % (len(text) + 1)
                text += text[start : start + part[1]]
        return text[:longest]

    fresh = st.lists(st.integers(0, ids - 1), min_size=1, max_size=8)
    copied = st.tuples(st.integers(0, longest), st.integers(1, 30))
    return st.lists(fresh | copied, max_size=20).map(grown)


any_text = st.integers(1, 4).flatmap(lambda ids: texts(ids, 80))


def search(text: Sequence[int], tail: Sequence[int], least: int = 1) -> Match:
    """Find the longest end of `tail` before some token of `text`, and the last such."""
    best = NO_MATCH
    for end in range(1, len(text)):
        length = common(text[:end], tail)
        if text[end] != BREAK and length >= max(least, best.length):
            best = Match(length, end)
    return best


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count how many of the last tokens agree; a BREAK agrees with nothing."""
    length = 0
    while (
        length < min(len(one), len(other))
        and one[-1 - length] == other[-1 - length] != BREAK
    ):
        length += 1
    return length


@given(any_text)
def test_the_automaton_finds_the_longest_suffix_and_its_latest_place(
    text: list[int],
) -> None:
    automaton = SuffixAutomaton(walk=UNCUT)
    for index, token in enumerate(text):
        automaton.append(token)
        known = text[: index + 1]
        assert automaton.match() == search(known, known)
    assert automaton.tokens.tolist() == text


@given(any_text, st.integers(1, 3))
def test_a_cut_walk_costs_no_length_and_ends_are_true(
    text: list[int], walk: int
) -> None:
    automaton = SuffixAutomaton(walk=walk)
    for index, token in enumerate(text):
        automaton.append(token)
        known = text[: index + 1]
        match = automaton.match()
        assert match.length == search(known, known).length
        if match.length:
            assert match.length <= match.end < len(known)
            assert common(known[: match.end], known) >= match.length


@given(any_text, st.integers(1, 4))
def test_the_ngram_index_finds_the_latest_place_of_the_last_n_tokens(
    text: list[int], n: int
) -> None:
    index = NgramIndex(n)
    for position, token in enumerate(text):
        index.append(token)
        known = text[: position + 1]
        ends = [
            end for end in range(n, len(known)) if known[end - n : end] == known[-n:]
        ]
        expected = NO_MATCH
        if ends and len(known) >= n:
            length = min(common(known[: ends[-1]], known), 64)
            expected = Match(length, ends[-1])
        assert index.match() == expected
    assert index.tokens.tolist() == text


INDEXES: list[Callable[[], Index]] = [
    lambda: SuffixAutomaton(walk=UNCUT),
    lambda: NgramIndex(2),
]


@given(st.lists(texts(3, 30), max_size=5), texts(3, 40))
def test_no_match_in_documents_reaches_across_their_borders(
    documents: list[list[int]], text: list[int]
) -> None:
    everything = [token for document in documents for token in [*document, BREAK]]
    automaton, ngrams = SuffixAutomaton(walk=UNCUT), NgramIndex(2)
    append_all(automaton, everything)
    append_all(ngrams, everything)
    for stop in range(len(text) + 1):
        assert automaton.match_of(text[:stop]) == search(everything, text[:stop])
        match = ngrams.match_of(text[:stop])
        ends = [
            end
            for end in range(2, len(everything))
            if everything[end] != BREAK
            and stop >= 2
            and everything[end - 2 : end] == text[stop - 2 : stop]
        ]
        if ends:
            length = common(everything[: ends[-1]], text[:stop])
            assert match == Match(length, ends[-1])
        else:
            assert match == NO_MATCH


@given(st.lists(texts(3, 30), min_size=1, max_size=4), st.data())
def test_a_continuation_ends_with_its_document(
    documents: list[list[int]], data: st.DataObject
) -> None:
    automaton = SuffixAutomaton()
    for document in documents:
        append_all(automaton, [*document, BREAK])
    tokens = automaton.tokens.tolist()
    end = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(0, 40))
    stop = tokens.index(BREAK, end)
    found = continuation(automaton.tokens, end, count)
    assert found == tokens[end : min(stop, end + count)]


@given(any_text, st.integers(0, 200))
def test_a_continuation_goes_on_as_if_its_tokens_were_appended(
    text: list[int], count: int
) -> None:
    index = SuffixAutomaton()
    append_all(index, text)
    for end in range(len(text)):
        grown = list(text)
        for offset in range(count):
            grown.append(grown[end + offset])
        expected = grown[end : end + count]
        assert continuation(index.tokens, end, count) == expected


@pytest.mark.parametrize("ids", [1, 2, 50])
def test_long_texts_take_time_in_proportion(ids: int) -> None:
    """A run of one token has as many suffixes that occurred before as tokens."""
    text = [(i * i // 7) % ids for i in range(20_000)]
    automaton = SuffixAutomaton()
    append_all(automaton, text)
    match = automaton.match()
    assert text[match.end - match.length : match.end] == text[-match.length :]
    assert 0 < match.end < len(text)
    # At most 2 states a token, whatever the text.
    assert len(automaton._length) <= 2 * len(text)


def test_the_worked_examples() -> None:
    automaton = SuffixAutomaton()
    append_all(automaton, [0, 1, 2, 0, 1])
    assert automaton.match() == Match(length=2, end=2)
    automaton.append(2)
    assert automaton.match() == Match(length=3, end=3)
    assert continuation(automaton.tokens, 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert SuffixAutomaton().match() == NO_MATCH
    assert NgramIndex(2).match() == NO_MATCH
