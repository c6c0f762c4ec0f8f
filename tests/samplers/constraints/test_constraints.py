"""States of a constraint allow the right ids, and their forks are independent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.errors import ConstraintError, InvalidRequestError
from mlx_speculation.samplers import (
    Constraint,
    ConstraintState,
    TokenAutomaton,
    allowed_tokens,
)
from support.sampling.constraints import IDS, at, automata, ids, walk

PICKS = st.lists(st.integers(0, 100), max_size=8)


@given(automaton=automata(), picks=PICKS, more=PICKS)
def test_a_fork_stands_where_its_parent_does_and_goes_its_own_way(
    automaton: TokenAutomaton, picks: list[int], more: list[int]
) -> None:
    tokens = walk(automaton, picks)
    parent = at(automaton, tokens)
    fork = parent.fork()
    followed = list(tokens)
    for pick in more:
        if not (choices := ids(fork)):
            break
        followed.append(choices[pick % len(choices)])
        fork.advance(followed[-1])
    for state, path in ((fork, followed), (parent, tokens)):
        fresh = at(automaton, path)
        assert np.array_equal(state.allowed(), fresh.allowed())
        assert state.may_end == fresh.may_end


@given(automaton=automata(), picks=PICKS)
def test_what_is_allowed_is_what_advances(
    automaton: TokenAutomaton, picks: list[int]
) -> None:
    tokens = walk(automaton, picks)
    allowed = ids(at(automaton, tokens))
    for token in range(IDS + 1):
        state = at(automaton, tokens)
        if token in allowed:
            state.advance(token)
            continue
        with pytest.raises(ConstraintError, match=f"Token {token} is not allowed"):
            state.advance(token)
        assert ids(state) == allowed


def test_an_automaton_is_its_table() -> None:
    automaton = TokenAutomaton({0: {5: 1}, 1: {5: 2}, 2: {6: 2, 7: 2}}, accepting={2})
    states = [at(automaton, path) for path in ([], [5], [5, 5], [5, 5, 7])]
    assert [ids(state) for state in states] == [[5], [5], [6, 7], [6, 7]]
    assert [state.may_end for state in states] == [False, False, True, True]


def test_an_automaton_may_begin_anywhere_and_keeps_its_table() -> None:
    table = {3: {1: 4}}
    automaton = TokenAutomaton(table, accepting=[4], start=3)
    table[3][2] = 4
    assert ids(automaton.begin()) == [1]
    end = at(automaton, [1])
    assert ids(end) == []
    assert end.may_end


def test_allowed_tokens_are_allowed_at_any_length() -> None:
    constraint = allowed_tokens([9, 2])
    for path in ([], [2], [9, 9, 2, 9]):
        assert ids(at(constraint, path)) == [2, 9]
        assert at(constraint, path).may_end


def test_negative_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token id -1"):
        allowed_tokens([3, -1])


def test_automata_are_constraints() -> None:
    automaton = allowed_tokens([1])
    assert isinstance(automaton, Constraint)
    assert isinstance(automaton.begin(), ConstraintState)
