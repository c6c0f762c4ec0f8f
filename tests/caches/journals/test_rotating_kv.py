"""The journal of rotating caches, case by case (random rounds: test_twins.py)."""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, RotatingKVCache

from mlx_speculation.caches import SlidingKVCache, Speculation
from mlx_speculation.caches.journals import ring
from support.caches.cache_twins import Rows, Visible, tagged
from support.each import each


def filled(window: int, rows: int, keep: int = 0) -> RotatingKVCache:
    """Return a ring that was fed `rows` rows one by one, tagged by position."""
    cache = RotatingKVCache(max_size=window, keep=keep)
    for position in range(rows):
        cache.update_and_fetch(*tagged(Rows(position, (position,))))
    return cache


def positions(cache: RotatingKVCache) -> list[int]:
    """Return the positions of the rows that the cache holds, slot by slot."""
    keys, values = cache.keys_and_values()
    np.testing.assert_array_equal(np.array(values[..., :2]), -np.array(keys))
    result: list[int] = np.array(keys[0, 0, :, 0]).astype(int).tolist()
    return result


def write(cache: Any, position: int, serial: int = 999) -> None:
    cache.update_and_fetch(*tagged(Rows(position, (serial,))))


def test_a_row_that_was_undone_is_not_saved_for_later() -> None:
    """Both rounds overwrite old rows; the second must not restore rows of the first."""
    cache = filled(window=3, rows=2)
    with Speculation([cache]) as first:
        for position in (2, 3):
            write(first.caches[0], position, serial=500)
    with Speculation([cache]) as second:
        for position in (2, 3, 4, 5):
            write(second.caches[0], position, serial=600)
        second.commit(1)
    assert cache.keys is not None
    assert np.array(cache.keys[0, 0, :, 1]).tolist() == [0, 1, 600]


def test_rows_saved_before_the_state_was_replaced_are_not_used() -> None:
    """A user can load another text into the same object, at the same position."""
    cache, other = filled(window=4, rows=6), RotatingKVCache(max_size=4)
    for position in range(6):
        write(other, position, serial=700 + position)
    with Speculation([cache]) as first:
        write(first.caches[0], 6)
    cache.state = other.state
    with Speculation([cache]) as second:
        write(second.caches[0], 6)
    assert cache.keys is not None
    assert np.array(cache.keys[0, 0, :, 1]).tolist() == [704, 705, 702, 703]


def peak_of_a_write(cache: RotatingKVCache, row: mx.array, keep: int) -> int:
    """Return the peak memory of a round of one row, in bytes."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with Speculation([cache]) as speculation:
        mx.eval(speculation.caches[0].update_and_fetch(row, row))
        speculation.commit(keep)
    mx.eval(cache.keys, cache.values)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("keep", [0, 1])
def test_single_rows_copy_the_window_once_in_many_writes(keep: int) -> None:
    window = 2048
    row = mx.ones((1, 4, 1, 64))
    block = mx.ones((1, 4, window, 64))
    cache = RotatingKVCache(max_size=window)
    mx.eval(cache.update_and_fetch(block, block), row)
    del block
    mx.eval(cache.update_and_fetch(row, row))
    assert cache.keys is not None
    whole = cache.keys.nbytes
    peaks = [peak_of_a_write(cache, row, keep) for _ in range(ring.SAVED_ROWS * 2)]
    copies = sum(peak > whole // 2 for peak in peaks)
    assert copies <= 2, [peak for peak in peaks if peak > whole // 2]


def test_single_rows_of_a_kv_cache_copy_nothing() -> None:
    cache = KVCache()
    row = mx.ones((1, 4, 1, 64))
    block = mx.ones((1, 4, 1920, 64))
    mx.eval(cache.update_and_fetch(block, block))
    assert cache.keys is not None
    whole = cache.keys.nbytes
    for _ in range(64):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with Speculation([cache]) as speculation:
            speculation.caches[0].update_and_fetch(row, row)
            mx.eval(cache.state[:2])
            speculation.commit(1)
        assert mx.get_peak_memory() - before < whole // 2


@each(
    window_size=[None, 2, 4, 5, 9],
    rows=[0, 2, 3, 4, 9],
    slack=[False, True],
    isolated=[False, True],
)
def test_each_row_of_a_round_sees_what_it_would_see_alone(
    rows: int, window_size: int | None, slack: bool, isolated: bool
) -> None:
    """The model's window can be larger than the ring, as in plamo3."""
    alone = filled(window=4, rows=rows)
    cache: Any = copy.deepcopy(alone)
    cache = SlidingKVCache.from_native(cache) if slack else cache
    seen = []
    for position in range(rows, rows + 3):
        mask = alone.make_mask(1, window_size=window_size)
        write(alone, position)
        kept_positions = positions(alone)
        shown = (
            kept_positions
            if mask is None
            else np.array(kept_positions)[np.array(mask).reshape(-1)]
        )
        seen.append(sorted(int(place) for place in shown))
    with Speculation([cache], isolated=isolated) as speculation:
        ring = speculation.caches[0]
        mask = ring.make_mask(3, window_size=window_size, return_array=True)
        keys, _ = ring.update_and_fetch(*tagged(Rows(rows, (1, 2, 3))))
        places = np.array(keys[0, 0, :, 0]).astype(int)
        together = [sorted(places[row].tolist()) for row in np.array(mask)]
        speculation.commit(3)
    assert together == seen


@pytest.mark.parametrize("kind", [RotatingKVCache, SlidingKVCache])
def test_a_prompt_sees_the_window_that_the_model_asks_for(kind: type) -> None:
    cache: Any = kind(max_size=4)
    native = cache.make_mask(9, window_size=5, return_array=True)
    with Speculation([cache], whole=True) as speculation:
        mask = speculation.caches[0].make_mask(9, window_size=5, return_array=True)
    assert mx.array_equal(mask, native)


@pytest.mark.parametrize("before", [2, 9])
def test_each_row_of_a_batch_sees_what_it_would_see_alone(before: int) -> None:
    cache: Any = BatchRotatingKVCache(max_size=4, left_padding=[0, 1])
    for _ in range(before):
        cache.update_and_fetch(mx.zeros((2, 1, 1, 2)), mx.zeros((2, 1, 1, 2)))
    masks = {}
    for whole in (False, True):
        for window_size in (4, 5):
            with Speculation([cache], whole=whole) as speculation:
                ring = speculation.caches[0]
                mask = ring.make_mask(3, window_size=window_size, return_array=True)
                masks[whole, window_size] = np.array(mask)
    np.testing.assert_array_equal(masks[False, 5], masks[False, 4])
    assert (masks[True, 5] != masks[True, 4]).any()


def visible(cache: Any, rows: Rows) -> list[list[int]]:
    """Write rows; for each, return the serial numbers of the rows that it sees."""
    mask = cache.make_mask(rows.width)
    keys, values = cache.update_and_fetch(*tagged(rows))
    shown = Visible(keys[0, 0], values[0, 0], mask, rows.width)
    return [[int(key[1]) for key in seen] for seen in shown.rows()]


@each(window=[4, 5, 7], keep=[0, 1, 3])
def test_rows_of_a_round_see_what_they_would_see_one_by_one(
    window: int, keep: int
) -> None:
    """mlx-lm's own mask would hide the rows of `keep` from later rows of a write."""
    for kept_rows in range(2 * window + 2):
        for width in range(1, window + 3):
            serials = tuple(range(kept_rows, kept_rows + width))
            one_by_one = filled(window, kept_rows, keep)
            expected = [
                visible(one_by_one, Rows(serial, (serial,)))[0] for serial in serials
            ]
            with Speculation([filled(window, kept_rows, keep)]) as speculation:
                (ring,) = speculation.caches
                assert visible(ring, Rows(kept_rows, serials)) == expected
