"""The sliding cache, case by case (random rounds: test_sliding_twins.py)."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mlx_speculation.caches import (
    SlidingKVCache,
    Speculation,
    as_native,
    with_slack,
)
from mlx_speculation.caches.types.sliding_kv import default_slack
from mlx_speculation.errors import InvalidRequestError
from support.caches.cache_twins import Rows, tagged
from support.each import each


def write(cache: Any, width: int, serial: int = 0) -> Any:
    rows = Rows(cache.offset, tuple(range(serial, serial + width)))
    return cache.update_and_fetch(*tagged(rows))


def fed(cache: Any, widths: list[int]) -> Any:
    for width in widths:
        write(cache, width)
    return cache


def positions(arrays: Any) -> list[int]:
    """Return the positions of rows, after a check of the values."""
    keys, values = (np.array(a)[0, 0] for a in arrays)
    np.testing.assert_array_equal(values[:, :2], -keys)
    return [int(position) for position in keys[:, 0]]


def test_one_row_has_no_mask() -> None:
    cache = SlidingKVCache(8, 3)
    for _ in range(30):
        for window in (None, 8, 9):
            assert cache.make_mask(1, window_size=window, return_array=True) is None
        write(cache, 1)
    assert cache.make_mask(1, window_size=5).tolist() == [False] * 3 + [True] * 5


def test_a_conversion_does_not_share_rows() -> None:
    native = fed(RotatingKVCache(max_size=4), [1] * 6)
    cache = SlidingKVCache.from_native(native)
    back = cache.to_native()
    write(cache, 1, serial=500)
    write(back, 1, serial=600)
    write(native, 1, serial=700)
    for one, serial in ((cache, 500), (back, 600), (native, 700)):
        serials = np.array(one.keys_and_values()[0])[0, 0, :, 1]
        assert sorted(serials.tolist()) == [0, 0, 0, serial]


def test_what_is_no_plain_ring_is_not_converted() -> None:
    kept = fed(RotatingKVCache(max_size=8, keep=2), [9])
    cut = fed(RotatingKVCache(max_size=8), [1] * 9)
    cut.keys, cut.values, cut._idx = cut.keys[..., :5, :], cut.values[..., :5, :], 5
    other: Any = KVCache()
    for native, words in ((kept, "keep=2"), (cut, "holds 5 rows"), (other, "KVC")):
        with pytest.raises(InvalidRequestError, match=words):
            SlidingKVCache.from_native(native)


@pytest.mark.parametrize(("size", "slack"), [(0, None), (4, 0), (-1, 3)])
def test_sizes_are_checked(size: int, slack: int | None) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1 row"):
        SlidingKVCache(size, slack)


def test_lists_are_converted_member_by_member() -> None:
    rings = [RotatingKVCache(max_size=4), RotatingKVCache(max_size=4, keep=1)]
    caches = [KVCache(), CacheList(rings[0], KVCache()), *rings]
    ours = with_slack(caches, 7)
    assert [type(cache) for cache in ours] == [
        KVCache,
        CacheList,
        SlidingKVCache,
        RotatingKVCache,
    ]
    assert type(ours[1].caches[0]) is SlidingKVCache
    assert ours[2].slack == 7
    assert ours[0] is caches[0]
    assert ours[3] is rings[1]
    assert with_slack([RotatingKVCache(max_size=4)])[0].slack == default_slack(4)
    native = as_native(ours)
    assert [type(cache) for cache in native] == [type(cache) for cache in caches]
    assert type(native[1].caches[0]) is RotatingKVCache


@each(n=range(12), widths=[[3], [6, 1], [1] * 9, [9, 3], [30], [1] * 40])
def test_rows_are_trimmed_where_the_window_remains(widths: list[int], n: int) -> None:
    cache, total = fed(SlidingKVCache(5, 4), widths), sum(widths)
    n = min(n, total)
    left = total - n
    # The buffer has room for 9 rows. If a write does not fit, the last 5 rows first
    # move to the beginning of the buffer.
    if cache._end - n >= min(left, 5):
        assert cache.trim(n if n < total else n + 100) == n
        native = cache.to_native()
        assert native.empty() == (left == 0)
        if left:
            kept_positions = list(range(max(0, left - 5), left))
            assert positions(native.keys_and_values()) == kept_positions
        assert positions(write(cache, 2)) == list(range(max(0, left - 4), left + 2))
    else:
        assert not cache.is_trimmable()
        before = cache.state[2:]
        with pytest.raises(InvalidRequestError, match=f"trim\\({n}\\)"):
            cache.trim(n)
        assert cache.state[2:] == before


def test_a_negative_number_of_rows_is_not_trimmed() -> None:
    with pytest.raises(InvalidRequestError, match=r"trim\(-1\)"):
        fed(SlidingKVCache(5, 4), [3]).trim(-1)


def test_it_is_what_models_expect() -> None:
    cache = SlidingKVCache(8, 3)
    assert cache
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "to_quantized")  # mlx-lm would call it
    assert (cache.keep, cache.max_size, cache.nbytes) == (0, 8, 0)
    assert (cache.empty(), cache.size()) == (True, 0)
    write(cache, 3)
    assert (cache.empty(), cache.size()) == (False, 3)
    assert cache.nbytes == 11 * (2 + 3) * 4
    write(cache, 9)
    assert cache.size() == 8


def test_a_round_can_be_taken_back_after_a_later_one_moved_the_window() -> None:
    """Plain decoding undoes a committed step if the step after it fails."""
    cache = fed(SlidingKVCache(4, 2), [5])
    first, second = Speculation([cache]), None
    write(first.caches[0], 1, serial=500)
    first.commit(1)
    before = cache.keys
    second = Speculation([cache])
    write(second.caches[0], 3, serial=600)
    assert cache.keys is not before  # moved
    second.rollback()
    first.rollback()
    assert (cache.offset, positions(cache.keys_and_values())) == (5, list(range(5)))
    assert positions(write(cache, 1)) == [2, 3, 4, 5]


def test_the_buffer_shrinks_again_after_a_long_write() -> None:
    cache = SlidingKVCache(8, 4)
    write(cache, 100)
    assert cache.keys is not None
    assert cache.keys.shape[2] == 100
    write(cache, 1)
    assert cache.keys.shape[2] == 12


def test_the_buffer_grows_in_steps_and_then_stays() -> None:
    cache = SlidingKVCache(600, 100)
    sizes = set()
    for _ in range(1500):
        write(cache, 1)
        assert cache.keys is not None
        sizes.add(cache.keys.shape[2])
    assert sorted(sizes) == [256, 512, 700]


def peak(cache: SlidingKVCache, row: mx.array, keep: int) -> int:
    """Return the peak memory of one round, in bytes."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with Speculation([cache]) as speculation:
        mx.eval(speculation.caches[0].update_and_fetch(row, row))
        speculation.commit(keep)
    mx.eval(cache.state)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(("width", "keep"), [(1, 0), (1, 1), (5, 2), (5, 5)])
def test_a_round_copies_the_window_only_when_the_buffer_is_full(
    width: int, keep: int
) -> None:
    window, slack = 1024, 256
    cache = SlidingKVCache(window, slack)
    row, block = mx.ones((1, 4, width, 64)), mx.ones((1, 4, window + 1, 64))
    mx.eval(cache.update_and_fetch(block, block), row)
    del block
    whole = cache.nbytes // 2
    rounds = 2 * slack
    copies = sum(peak(cache, row, keep) > whole // 2 for _ in range(rounds))
    assert copies == sum(_fillings(slack, width, keep, rounds))


def _fillings(slack: int, width: int, keep: int, rounds: int) -> list[bool]:
    """Simulate rounds; return for each round whether it finds the buffer full."""
    free, fills = slack - 1, []
    for _ in range(rounds):
        fills.append(free < width)
        free = (slack if free < width else free) - keep
    return fills
