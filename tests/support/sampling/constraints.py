"""Random constraints, and walks that follow them."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from mlx_speculation.samplers import Constraint, ConstraintState, TokenAutomaton

STATES, IDS = 4, 7


@st.composite
def automata(draw: st.DrawFn) -> TokenAutomaton:
    """Draw an automaton; some states allow nothing, some only the end."""
    place = st.integers(0, STATES - 1)
    steps = st.dictionaries(st.integers(0, IDS - 1), place, max_size=4)
    table = draw(st.dictionaries(place, steps, min_size=1))
    return TokenAutomaton(table, accepting=draw(st.sets(place)))


def at(constraint: Constraint, tokens: Sequence[int]) -> ConstraintState:
    """Return a new state of a constraint after these tokens."""
    state = constraint.begin()
    for token in tokens:
        state.advance(token)
    return state


def ids(state: ConstraintState) -> list[int]:
    return [int(token) for token in np.flatnonzero(state.allowed())]


def walk(constraint: Constraint, picks: Sequence[int]) -> list[int]:
    """Return tokens that the picks choose; the walk ends early if no id is allowed."""
    state, tokens = constraint.begin(), []
    for pick in picks:
        choices = ids(state)
        if not choices:
            break
        tokens.append(choices[pick % len(choices)])
        state.advance(tokens[-1])
    return tokens
