"""Views of a fixed size: with their masks they show the rows of a native cache."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches import (
    FixedShape,
    SlidingKVCache,
    Speculation,
    check_fixed,
    restore,
    snapshot,
)
from mlx_speculation.caches.types.fixed_view import fixed_mask
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from support.caches.cache_twins import Rows, tagged

SHAPE = FixedShape(4, 6)
WINDOW = 5

rounds_drawn = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=24)


def seen_by(view: Any, mask: mx.array) -> list[list[float]]:
    """Return the serial numbers of the rows that each row of a round sees."""
    serials = np.array(view)[0, 0, :, 1]
    return [serials[row].tolist() for row in np.array(mask)]


@given(rounds=rounds_drawn, window=st.sampled_from([None, WINDOW]))
def test_each_row_sees_the_kept_rows_before_it(
    rounds: list[tuple[int, int]], window: int | None
) -> None:
    """The number of keys depends on a row's position, not on the rows fed with it."""
    cache = KVCache() if window is None else SlidingKVCache(window)
    kept: list[int] = []  # serial numbers
    serial = 0
    for fed, keep in rounds:
        at = len(kept)
        count = min(fed, SHAPE.room(at))
        serials = range(serial, serial + SHAPE.rows)
        serial += SHAPE.rows
        with Speculation([cache], shape=SHAPE) as speculation:
            (shown,) = speculation.caches
            mask = shown.make_mask(SHAPE.rows, return_array=False)
            keys, values = shown.update_and_fetch(*tagged(Rows(at, tuple(serials))))
            stop = SHAPE.shown(at)
            first = 0 if window is None else max(stop - SHAPE.step - window, 0)
            assert keys.shape[2] == values.shape[2] == stop - first
            assert mask.shape == (SHAPE.rows, stop - first)
            assert np.array(mask).any(axis=1).all()
            live: Any = cache.keys
            assert live.shape[2] == stop - first  # the buffer is as long as the view
            for row, seen in enumerate(seen_by(keys, mask)[:count]):
                expected = [*kept, *serials[: row + 1]]
                assert seen == expected[-window:] if window else expected
                assert SHAPE.shown(at + row) == stop
            assert speculation.written == SHAPE.rows
            keep = min(keep, count)
            speculation.commit(keep)
        kept += serials[:keep]
        assert cache.offset == len(kept)
        if keep:
            kept_keys, _ = cache.keys_and_values()
            rows = len(kept) if window is None else min(window, len(kept))
            assert np.array(kept_keys)[0, 0, -rows:, 1].tolist() == kept[-rows:]


@given(rounds=rounds_drawn)
def test_a_quantized_cache_holds_what_a_native_one_does(
    rounds: list[tuple[int, int]],
) -> None:
    cache, native = (QuantizedKVCache(group_size=32, bits=8) for _ in range(2))
    noise = mx.random.normal((1, 2, 200, 32), key=mx.random.key(3))
    for fed, keep in rounds:
        at = cache.offset
        keep = min(fed, keep, SHAPE.room(at))
        rows = noise[..., at : at + SHAPE.rows, :]
        with Speculation([cache], shape=SHAPE) as speculation:
            shown = speculation.caches[0].update_and_fetch(rows, rows)
            stop = SHAPE.shown(at)
            assert all(part.shape[2] == stop for both in shown for part in both)
            speculation.commit(keep)
        if keep:
            kept = noise[..., at : at + keep, :]
            native.update_and_fetch(kept, kept)
            both = zip(*(c.keys_and_values()[0] for c in (cache, native)), strict=True)
            assert all(mx.array_equal(one, other) for one, other in both)


@pytest.mark.parametrize("kind", [KVCache, lambda: SlidingKVCache(WINDOW)])
def test_what_was_written_before_in_other_shapes_is_shown(kind: Any) -> None:
    """The cache is filled natively, or restored from a snapshot."""
    native = kind()
    native.update_and_fetch(*tagged(Rows(0, tuple(range(9)))))
    taken = snapshot([native])
    restored = kind()
    restore(taken, [restored])
    for cache in (native, restored):
        with Speculation([cache], shape=SHAPE) as speculation:
            (shown,) = speculation.caches
            mask = shown.make_mask(SHAPE.rows)
            keys, _ = shown.update_and_fetch(*tagged(Rows(9, (90, 91, 92, 93))))
            expected = [*map(float, range(9)), 90.0]
            window = getattr(cache, "max_size", 10)
            assert seen_by(keys, mask)[0] == expected[-window:]
            speculation.commit(2)
        assert cache.offset == 11


def test_rows_that_a_snapshot_shares_stay_as_they_were() -> None:
    cache = KVCache()
    with Speculation([cache], shape=SHAPE) as speculation:
        speculation.caches[0].update_and_fetch(*tagged(Rows(0, (0, 1, 2, 3))))
        speculation.commit(4)
    taken = snapshot([cache])
    cache.trim(2)
    with Speculation([cache], shape=SHAPE) as speculation:
        speculation.caches[0].update_and_fetch(*tagged(Rows(2, (8, 9, 10, 11))))
        speculation.commit(4)
    other = KVCache()
    restore(taken, [other])
    assert np.array(other.keys_and_values()[0])[0, 0, :, 1].tolist() == [0, 1, 2, 3]


def test_a_round_that_is_left_changes_nothing() -> None:
    cache = SlidingKVCache(WINDOW)
    cache.update_and_fetch(*tagged(Rows(0, tuple(range(5)))))
    before = dict(vars(cache))
    for _ in range(2):
        with Speculation([cache], shape=SHAPE) as speculation:
            (shown,) = speculation.caches
            shown.update_and_fetch(*tagged(Rows(5, (50, 51, 52, 53))))
        assert vars(cache) == before


def test_padding_sees_what_the_last_row_of_the_view_sees() -> None:
    mask = np.array(fixed_mask(4, 4, 0, 6, window=2)).astype(int).tolist()
    assert mask == [
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("rows", "step"), [(1, 8), (65, 80), (4, 3), (8, 0), (2.0, 4)])
def test_a_shape_is_checked(rows: Any, step: Any) -> None:
    with pytest.raises(InvalidRequestError, match="has to be a whole number"):
        FixedShape(rows, step)


@pytest.mark.parametrize(
    "leaf", [RotatingKVCache(8), RotatingKVCache(8, keep=4), ChunkedKVCache(8)]
)
def test_kinds_without_a_fixed_view_are_refused(leaf: Any) -> None:
    good = [KVCache(), CacheList(ArraysCache(2), QuantizedKVCache()), SlidingKVCache(4)]
    assert len(check_fixed(good)) == 4
    for caches in ([leaf], [*good, leaf]):
        with pytest.raises(UnsupportedCacheError, match="fixed shape"):
            check_fixed(caches)
        with pytest.raises(UnsupportedCacheError, match="fixed shape"):
            Speculation(caches, shape=SHAPE)
