"""Rows read from another owner's cache of any kind and state; the cost of reading."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches import (
    SlidingKVCache,
    Speculation,
    check_readable,
    read_rows,
)
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError

WINDOW = 8
MAKE: dict[str, Any] = {
    "whole": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "joined": ConcatenateKVCache,
    "ring": lambda: RotatingKVCache(max_size=WINDOW),
    "sliding": lambda: SlidingKVCache(WINDOW, slack=5),
}
SLIDES = ("ring", "sliding")


def tagged(first: int, count: int) -> tuple[mx.array, mx.array]:
    """Return rows with their position as key, and its negative as value."""
    rows = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(rows, (1, 2, count, 32))
    return keys, -keys


def positions(cache: Any, stop: int, count: int | None) -> list[int]:
    """Return the positions that `read_rows` reads, sorted."""
    keys, values = read_rows(cache, stop, count)
    assert keys.shape == values.shape
    assert mx.allclose(keys, -values)
    rows: list[float] = keys[0, 1, :, 7].tolist()  # type: ignore[assignment]
    return sorted(round(row) for row in rows)


@pytest.mark.parametrize("kind", MAKE)
@given(
    writes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1),
    left_out=st.integers(0, 1),
    count=st.one_of(st.none(), st.integers(1, 2 * WINDOW)),
)
def test_what_is_read_are_the_last_rows_before_a_position(
    kind: str, writes: list[tuple[int, int]], left_out: int, count: int | None
) -> None:
    """Before the read, each round writes rows and keeps none, some or all of them."""
    cache = MAKE[kind]()
    for rows, keep in writes:
        with Speculation([cache]) as speculation:
            speculation.caches[0].update_and_fetch(*tagged(cache.offset, rows))
            speculation.commit(min(rows, keep))
    stop = cache.offset - left_out
    if stop < 1:
        return
    read = positions(cache, stop, count)
    wanted = range(max(0, stop - (count or stop)), stop)
    if kind not in SLIDES:
        assert read == list(wanted)
        return
    # The last WINDOW rows are held; `left_out` of them are not before `stop`.
    least = wanted[-max(1, WINDOW - left_out) :]
    assert read == list(wanted[-len(read) :])
    assert len(read) >= len(least) or read == list(wanted)


@pytest.mark.parametrize("kind", MAKE)
def test_rows_that_are_not_held_are_refused(kind: str) -> None:
    cache = MAKE[kind]()
    with pytest.raises(InvalidRequestError, match="were requested, but it holds only"):
        read_rows(cache, 0, None)
    cache.update_and_fetch(*tagged(0, 3))
    with pytest.raises(InvalidRequestError, match=r"\[1, 4\).*holds only \[0, 3\)"):
        read_rows(cache, 4, 3)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (RotatingKVCache(max_size=8, keep=2), "RotatingKVCache with keep=2"),
        (ChunkedKVCache(8), "its cache, a ChunkedKVCache. Use"),
        (ArraysCache(2), "its cache, a ArraysCache. Use"),
    ],
)
def test_other_kinds_are_refused(cache: Any, said: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=f"layer 3, .*{said}"):
        check_readable(cache, 3)


@pytest.mark.parametrize("kind", MAKE)
def test_known_kinds_are_not_refused(kind: str) -> None:
    check_readable(MAKE[kind](), 0)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("kind", ["whole", "ring", "sliding"])
def test_reading_copies_nothing_and_leaves_writes_in_place(
    kind: str, hold: bool
) -> None:
    """While arrays that were read are held, the next write copies the buffer."""
    rows, dim = 4096, 64
    make: dict[str, Any] = {
        "whole": KVCache,
        "ring": lambda: RotatingKVCache(max_size=rows),
        "sliding": lambda: SlidingKVCache(rows, slack=4096),
    }
    cache: Any = make[kind]()
    part = mx.ones((1, 2, rows, dim))
    cache.update_and_fetch(part, part)
    row = mx.ones((1, 2, 1, dim))
    for _ in range(3):
        cache.update_and_fetch(row, row)
    mx.eval(cache.state)
    whole = cache.keys.nbytes
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kept = []
    for _ in range(3):
        read = read_rows(cache, cache.offset, None)
        used = [mx.max(array) for array in read]
        mx.eval(used)
        if hold:
            kept.append(read)
        del read
        cache.update_and_fetch(row, row)
        mx.eval(cache.keys, cache.values)
    peak = mx.get_peak_memory() - before
    assert (peak > whole // 2) == hold
