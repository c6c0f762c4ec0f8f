"""Masks and commits for several tokens at once equal those made one by one."""

from collections import Counter
from collections.abc import Collection

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers import (
    Constrained,
    TokenAutomaton,
    allowed_tokens,
)
from mlx_speculation.samplers.constraints.base import AutomatonState
from support.sampling.constraints import IDS, at, automata, ids, walk

PICKS = st.lists(st.integers(0, 100), max_size=5)
DRAFTS = st.lists(st.integers(0, IDS), max_size=5)
ENDS = st.sets(st.integers(0, IDS - 1), max_size=2)
# Forty tokens, then the text is complete.
LONG = TokenAutomaton({i: {1: i + 1} for i in range(40)}, accepting={40})


def usable(missing: Collection[int] = ()) -> NDArray[np.bool_]:
    return np.array([token not in missing for token in range(IDS)])


def may_follow(
    automaton: TokenAutomaton, path: list[int], ends: set[int], missing: set[int]
) -> list[int] | None:
    """Return the ids that the table allows after a path; None: no such path."""
    state = automaton.begin()
    for token in path:
        if token in ends or token in missing or token not in ids(state):
            return None
        state.advance(token)
    allowed = set(ids(state)) - ends
    if state.may_end:
        allowed |= ends
    return sorted(allowed - missing)


def rows_of(masks: mx.array) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.array(masks)]


@given(
    automaton=automata(),
    picks=PICKS,
    drafted=DRAFTS,
    ends=ENDS,
    missing=st.sets(st.integers(0, IDS - 1), max_size=2),
)
def test_every_row_allows_what_the_tokens_before_it_allow(
    automaton: TokenAutomaton,
    picks: list[int],
    drafted: list[int],
    ends: set[int],
    missing: set[int],
) -> None:
    text = Constrained(automaton, usable=usable(missing), ends=ends)
    committed: list[int] = []
    for token in walk(automaton, picks):
        allowed = may_follow(automaton, committed, ends, missing) or []
        if token not in allowed or token in ends:
            break
        text.commit([token])
        committed.append(token)
    expected = []
    for length in range(len(drafted) + 1):
        path = committed + drafted[:length]
        allowed = may_follow(automaton, path, ends, missing) or []
        expected.append(allowed or list(range(IDS)))
    for count in range(1, len(drafted) + 2):
        masks = text.masks(drafted, count)
        assert masks.dtype == mx.bool_
        assert masks.shape == (count, IDS)
        assert rows_of(masks) == expected[-count:]


@given(automaton=automata(), picks=PICKS, drafts=st.lists(DRAFTS, max_size=4))
def test_what_was_looked_at_and_not_committed_leaves_no_trace(
    automaton: TokenAutomaton, picks: list[int], drafts: list[list[int]]
) -> None:
    tokens = walk(automaton, picks)
    text = Constrained(automaton, usable=usable(), ends=())
    twin = Constrained(automaton, usable=usable(), ends=())
    for index in range(len(tokens) + 1):
        for drafted in drafts:
            text.masks(drafted, len(drafted) + 1)
            try:
                text.follow(drafted)
            except ConstraintError:
                with pytest.raises(ConstraintError):
                    text.commit(drafted)
        assert rows_of(text.masks([], 1)) == rows_of(twin.masks([], 1))
        assert text.complete == twin.complete
        text.commit(tokens[index : index + 1])
        twin.commit(tokens[index : index + 1])


@given(automaton=automata(), picks=PICKS, data=st.data())
def test_tokens_committed_together_are_those_committed_one_by_one(
    automaton: TokenAutomaton, picks: list[int], data: st.DataObject
) -> None:
    tokens = walk(automaton, picks)
    drafted = data.draw(DRAFTS)
    cut = data.draw(st.integers(0, len(tokens)))
    at_once = Constrained(automaton, usable=usable(), ends=())
    if data.draw(st.booleans()):
        at_once.masks(tokens, 1)
    at_once.commit(tokens[:cut])
    at_once.commit(tokens[cut:])
    singly = Constrained(automaton, usable=usable(), ends=())
    for token in tokens:
        singly.commit([token])
    count = len(drafted) + 1
    assert mx.array_equal(
        at_once.masks(drafted, count), singly.masks(drafted, count)
    ).item()
    assert at_once.complete == singly.complete


@given(automaton=automata(), picks=PICKS, ends=ENDS)
def test_tokens_stay_up_to_the_first_that_nothing_may_follow(
    automaton: TokenAutomaton, picks: list[int], ends: set[int]
) -> None:
    text = Constrained(automaton, usable=usable(), ends=ends)
    emitted: list[int] = []
    for token in walk(automaton, picks):
        if token in ends:
            break
        emitted.append(token)
    keep, complete = len(emitted), False
    for length in range(1, len(emitted) + 1):
        state = at(automaton, emitted[:length])
        if not set(ids(state)) - ends:
            keep, complete = length, state.may_end
            break
    followed = text.follow(emitted)
    assert (followed.keep, followed.complete) == (keep, complete)
    text.commit(emitted[:keep])
    assert not complete or text.complete


def test_an_end_is_allowed_exactly_where_the_text_may_end() -> None:
    """A table can name an end token where no text ends, or none where texts can end."""
    automaton = TokenAutomaton({0: {1: 1, 6: 1}, 1: {1: 2}, 2: {1: 1}}, accepting={2})
    text = Constrained(automaton, usable=usable(), ends=[6, 99])
    assert rows_of(text.masks([1, 1, 1], 4)) == [[1], [1], [1, 6], [1]]
    assert text.place([6]) is None
    assert text.goes_on
    text.commit([1, 1, 6])
    assert not text.goes_on
    assert rows_of(text.masks([], 1)) == [[1, 6]]
    assert not text.complete
    with pytest.raises(ConstraintError, match="After 2 constrained tokens"):
        text.follow([3])


def test_an_end_stops_the_tokens_of_a_round() -> None:
    text = Constrained(allowed_tokens([1, 2]), usable=usable(), ends=[6])
    assert text.follow([1, 6, 2]).keep == 2
    assert not text.follow([1, 6]).complete


def test_a_complete_text_asks_for_no_end() -> None:
    automaton = TokenAutomaton({0: {1: 1}}, accepting={1})
    text = Constrained(automaton, usable=usable(), ends=[6])
    assert not text.complete
    followed = text.follow([1, 6])
    assert (followed.keep, followed.complete) == (1, True)
    assert text.goes_on
    text.commit([1])
    assert text.complete
    assert not text.goes_on
    text.check()


def test_a_text_that_is_stuck_is_refused_and_drafts_that_get_stuck_are_not() -> None:
    automaton = TokenAutomaton({0: {1: 1, 2: 0}, 1: {5: 0}}, accepting=())
    text = Constrained(automaton, usable=usable({5}), ends=[6])
    text.commit([2, 2])
    assert rows_of(text.masks([1], 2)) == [[1, 2], list(range(IDS))]
    followed = text.follow([2, 1, 2])
    assert (followed.keep, followed.complete) == (2, False)
    text.check()
    text.commit([2, 1])
    assert not text.complete
    assert not text.goes_on
    with pytest.raises(ConstraintError, match=r"After 4 .* tokens.* none of the 6 ids"):
        text.check()


def test_a_failure_counts_where_it_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar can get too complex in a draft that the text never accepts."""

    def failing(self: AutomatonState) -> NDArray[np.bool_]:
        if self._place == 2:
            raise ConstraintError("too complex")
        return allowed(self)

    allowed = AutomatonState.allowed
    monkeypatch.setattr(AutomatonState, "allowed", failing)
    automaton = TokenAutomaton({0: {1: 1, 3: 2}, 1: {1: 0}, 2: {1: 2}}, accepting={1})
    text = Constrained(automaton, usable=usable(), ends=[6])
    everything = list(range(IDS))
    assert rows_of(text.masks([3, 1], 3)) == [[1, 3], everything, everything]
    text.commit([1, 1])
    text.check()
    followed = text.follow([3, 1])
    assert (followed.keep, followed.complete) == (1, False)
    text.commit([3])
    assert not text.complete
    with pytest.raises(ConstraintError, match="too complex"):
        text.check()


def test_tokens_that_were_not_allowed_are_refused_and_change_nothing() -> None:
    text = Constrained(LONG, usable=usable(), ends=[6])
    text.commit([1])
    for wrong in ([2], [1, 2], [1, 6, 1], [-1], [IDS]):
        with pytest.raises(ConstraintError, match=r"After 1 constrained tokens"):
            text.commit(wrong)
    with pytest.raises(ConstraintError, match=r"the chosen tokens \[1, 2\]"):
        text.follow([1, 2])
    text.commit([1] * 38)
    assert text.follow([1]).complete


def test_a_place_is_looked_at_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft steps, verify rows and the commit share the result."""
    calls: Counter[str] = Counter()
    for name in ("allowed", "advance", "fork"):
        original = getattr(AutomatonState, name)

        def counted(
            self: AutomatonState, *args: int, name: str = name, call: object = original
        ) -> object:
            calls[name] += 1
            return call(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(AutomatonState, name, counted)
    text = Constrained(LONG, usable=usable(), ends=[6])
    assert calls == {"allowed": 1}
    for _ in range(2):
        for length in range(4):
            text.masks([1] * length, 1)
        text.masks([1] * 4, 5)
        assert text.follow([1] * 5).keep == 5
        text.commit([1] * 5)
    assert calls == {"allowed": 11, "advance": 10, "fork": 10}


@pytest.mark.parametrize(
    "wrong", [np.array([1, 4]), np.ones((1, 7), dtype=np.bool_), np.array(True)]
)
def test_a_mask_of_another_kind_is_refused(
    wrong: NDArray[np.bool_], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutomatonState, "allowed", lambda self: wrong)
    with pytest.raises(ConstraintError, match=r"has to return bool \[ids\]"):
        Constrained(LONG, usable=usable(), ends=())
