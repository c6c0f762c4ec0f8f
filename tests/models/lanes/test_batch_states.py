"""States of a batch that a head has not read: each row's own, in order."""

from typing import Any

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.models import BatchStates, HiddenStates, Unread
from support.models.tiny_models import build

DIM = 2


def tagged(rows: int, first: int, count: int) -> mx.array:
    """Return states [rows, count, DIM] that say row and number."""
    numbers = [[[row, first + i] for i in range(count)] for row in range(rows)]
    return mx.array(numbers, mx.float32).reshape(rows, count, DIM)


def listed(unread: Unread) -> list[list[Any]]:
    """Return each row's states on the host."""
    held = unread.gathered()
    if not held.parts:
        return [[] for _ in range(held.rows)]
    found: Any = held.array.tolist()
    assert held.array.shape[:2] == (held.rows, max(held.counts))
    return [row[:count] for row, count in zip(found, held.counts, strict=True)]


@given(data=st.data())
def test_rows_have_their_own_states_whatever_happens(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4), "rows")
    unread: Unread = Unread.of([None] * rows)
    expected: list[list[Any]] = [[] for _ in range(rows)]
    steps = ["add", "add", "even", "read", "rows", "join"]
    for number in range(data.draw(st.integers(1, 8), "steps")):
        kind = data.draw(st.sampled_from(steps), "kind")
        width = data.draw(st.integers(1, 4), "width")
        count = len(expected)
        each = [data.draw(st.integers(0, width)) for _ in expected]
        if kind in ("add", "even"):
            keep = [width] * count if kind == "even" else each
            made = tagged(count, 10 * number, width)
            values: Any = made.tolist()
            unread = unread.more(made, keep)
            for row, found, kept in zip(expected, values, keep, strict=True):
                row += found[:kept]
        elif kind == "read":
            read = [min(n, len(row)) for n, row in zip(each, expected, strict=True)]
            unread = unread.behind(read)
            expected = [row[n:] for row, n in zip(expected, read, strict=True)]
        elif kind == "rows":
            stay = data.draw(st.permutations(range(count)))[: max(1, count - 1)]
            unread = unread.only(stay)
            expected = [expected[place] for place in stay]
        elif count < 8:
            new = [None if n == 0 else tagged(1, 90, n) for n in each[:2]]
            unread = unread.beside(Unread.of(new))
            expected += [[] if one is None else one[0].tolist() for one in new]  # type: ignore[misc]
        assert listed(unread) == expected
        assert list(unread.counts) == [len(row) for row in expected]
        held = unread.gathered()
        if held.parts:
            last: Any = held.last().tolist()
            pairs = zip(last, expected, strict=True)
            assert all(found == row[-1:] for found, row in pairs if row)


def test_a_commit_adds_what_each_row_keeps_from_where_it_stands() -> None:
    model = build("llama")
    taps = HiddenStates(model, after_norm=True)
    follower = BatchStates(taps, lambda states: states.after_norm)
    follower.held, follower.rows = Unread(2), [2, 0]
    states = taps.states()
    states.add({"after_norm": tagged(4, 0, 4)})  # three rows, and a place of none
    states.cut(3, [0, 1, 3])
    assert listed(follower.added(states, [3, 1, 2])) == [
        [[3, 0], [3, 1]],
        [[0, 0], [0, 1], [0, 2]],
    ]
    states = taps.states()
    states.add({"after_norm": tagged(3, 0, 3)})
    states.cut(3, [1, 0, 2])
    assert listed(follower.added(states, 1)) == [[[2, 0]], [[1, 0]]]
    assert follower.held.counts == (0, 0)
