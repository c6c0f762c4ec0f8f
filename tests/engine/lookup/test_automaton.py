"""Matches, continuations and counts of the automaton are those of a plain search."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.lookup.automaton import (
    BREAK,
    LONGEST_FALL,
    NO_MATCH,
    Match,
    SuffixAutomaton,
)

UNCUT = 10**6  # a limit `walk` that is never reached: counts and ends are exact
texts = st.integers(1, 4).flatmap(
    lambda ids: st.lists(
        st.integers(0, ids - 1) | st.just(BREAK) if ids > 1 else st.just(0), max_size=60
    )
)


def index_of(tokens: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton(walk=UNCUT)
    for token in tokens:
        automaton.append(token)
    return automaton


def ends_of(tokens: list[int], wanted: list[int]) -> list[int]:
    """Return the ends of the occurrences of `wanted` that a token follows."""
    size = len(wanted)
    ends = range(size, len(tokens))
    return [e for e in ends if tokens[e - size : e] == wanted and tokens[e] != BREAK]


def occurrences(tokens: list[int], wanted: list[int]) -> int:
    """Count the occurrences of `wanted` that a token or a BREAK follows."""
    size = len(wanted)
    return sum(tokens[end - size : end] == wanted for end in range(size, len(tokens)))


def longest_suffix(tokens: list[int], text: list[int]) -> list[int]:
    """Return the longest suffix of `text` that a token follows in `tokens`."""
    for start in range(len(text)):
        tail = text[start:]
        if BREAK not in tail and ends_of(tokens, tail):
            return tail
    return []


def check(automaton: SuffixAutomaton, tokens: list[int], text: list[int]) -> None:
    match = NO_MATCH
    for token in text:
        match = automaton.follow(match, token)
    compare(automaton, tokens, automaton.with_successor(match), text)


def compare(
    automaton: SuffixAutomaton, tokens: list[int], match: Match, text: list[int]
) -> None:
    length, state = match
    tail = longest_suffix(tokens, text)
    assert length == len(tail)
    if not tail:
        return
    ends = ends_of(tokens, tail)
    proposed = automaton.continuation(state, 5)
    latest = tokens[ends[-1] :]
    if BREAK in latest:
        assert proposed == latest[: latest.index(BREAK)][:5]
    assert proposed[: len(latest)] == latest[: len(proposed)]
    (with_first, total), *_ = automaton.shares(state, proposed)
    assert total == occurrences(tokens, tail)
    # If the only occurrence ends the index, `occurrences` does not count it.
    assert with_first == max(1, occurrences(tokens, [*tail, proposed[0]]))


@given(texts, texts)
def test_the_end_of_any_text_is_found_with_what_followed_it(
    tokens: list[int], text: list[int]
) -> None:
    check(index_of(tokens), tokens, [token for token in text if token != BREAK])


@given(texts)
def test_the_end_of_the_indexed_tokens_is_found_at_every_length(
    tokens: list[int],
) -> None:
    automaton = SuffixAutomaton(walk=UNCUT)
    tokens = [token for token in tokens if token != BREAK]
    for size, token in enumerate(tokens):
        automaton.append(token)
        known = tokens[: size + 1]
        state = automaton.with_successor(automaton.match())
        compare(automaton, known, state, known)


def test_a_run_of_one_token_walks_no_more_states_than_it_may() -> None:
    automaton = index_of([0] * 3 * LONGEST_FALL)
    match = NO_MATCH
    for _ in range(3 * LONGEST_FALL):
        match = automaton.follow(match, 0)
    assert automaton.follow(match, 1) == NO_MATCH
    assert automaton.follow(NO_MATCH, 0).length == 1


def test_shares_of_what_never_occurred_are_none_of_none() -> None:
    automaton = index_of([1, 2, 3, 1, 2])
    state = automaton.match().state
    assert list(automaton.shares(state, [3, 9, 3])) == [(1, 1), (0, 0), (0, 0)]
