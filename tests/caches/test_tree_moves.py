"""Caches in a round with a tree: what its rows see, and the rows that stay."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches import (
    SlidingKVCache,
    Speculation,
    check_trees,
    tree_views,
)
from mlx_speculation.caches.journals import sliding_kv
from mlx_speculation.caches.types import padded_kv, tree_view
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from mlx_speculation.models.lanes.draft_tree import tree_rows
from support.drafters.tree_drafter import path_to, random_parents

WINDOW = 6
KINDS: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "QuantizedKVCache": lambda: QuantizedKVCache(group_size=32, bits=8),
    "SlidingKVCache": lambda: SlidingKVCache(WINDOW, 9),
    "RotatingKVCache": lambda: RotatingKVCache(WINDOW),
}


def written(cache: Any, serials: list[int]) -> Any:
    """Write rows with these serial numbers; return the result of the write."""
    keys = mx.broadcast_to(
        mx.array(serials, mx.float32)[None, None, :, None], (1, 2, len(serials), 32)
    )
    return cache.update_and_fetch(keys, keys + 0.25)


def shown(cache: Any) -> tuple[list[float], list[float]]:
    """Return the numbers in the keys and values that a next row would see."""
    cache = cache if not isinstance(cache, list) else cache[0]
    rows: Any = written(cache, [-1])
    if isinstance(cache, QuantizedKVCache):
        rows = [mx.dequantize(w, s, b, 32, 8) for w, s, b in rows]
    keys, values = (each[0, 0, :, 0].tolist() for each in rows)
    return keys, values


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.randoms(use_true_random=False), layers=st.integers(1, 2))
def test_a_cache_after_a_path_equals_one_that_saw_its_tokens(
    kind: str, data: random.Random, layers: int
) -> None:
    caches, twins = ([KINDS[kind]() for _ in range(layers)] for _ in range(2))
    serial = 0
    for _ in range(data.randint(1, 4)):
        width = data.randint(1, 9)
        rows = list(range(serial, serial := serial + width))
        kept = sorted(data.sample(rows, data.randint(0, width)))
        with Speculation(caches) as speculation:
            for cache in speculation.caches:
                written(cache, rows)
            moved = data.choice([rows, kept]) if data.random() < 0.2 else kept
            speculation.move([row - rows[0] for row in moved])
            if data.random() < 0.8:
                keep = data.randint(0, len(moved))
                speculation.prepare(keep)
                speculation.commit(keep)
                if keep and data.random() < 0.2:
                    speculation.rollback()
                    keep = 0
            else:
                keep = 0  # leaving `with` without a commit rolls back
        for twin in twins if keep else ():
            if isinstance(twin, RotatingKVCache):
                written(twin, moved[:keep])
            else:
                for row in moved[:keep]:
                    written(twin, [row])
    for cache, twin in zip(caches, twins, strict=True):
        assert cache.offset == twin.offset
        ends = [sorted(each)[-WINDOW:] for each in (shown(cache)[0], shown(twin)[0])]
        assert ends[0] == ends[1]
        both = [sorted(each)[-WINDOW:] for each in (shown(cache)[1], shown(twin)[1])]
        assert both[0] == both[1]


@pytest.mark.parametrize("kind", ["KVCache", "SlidingKVCache", "RotatingKVCache"])
@given(data=st.randoms(use_true_random=False))
def test_a_row_sees_the_window_before_it_and_its_ancestors(
    kind: str, data: random.Random
) -> None:
    cache, offset = KINDS[kind](), data.randint(0, 20)
    for position in range(offset):
        written(cache, [position])
    lead, nodes = data.randint(1, 3), data.randint(1, 9)
    parents = random_parents(data, nodes)
    rows = tree_rows(mx.array(parents), levels=nodes, lead=lead)
    window_size = data.choice([None, 3, WINDOW])
    with Speculation([cache]) as speculation:
        (view,) = tree_views(speculation.caches, rows)
        mask = view.make_mask(lead + nodes, window_size=window_size, return_array=True)
        assert view
        assert view.offset == offset
        keys = written(view, [100 + row for row in range(lead + nodes)])[0]
        seen = np.array(mask)
        columns = np.array(keys[0, 0, :, 0])
    window = min(window_size or 99, 99 if kind == "KVCache" else WINDOW)
    for row in range(lead + nodes):
        path = [*range(min(row + 1, lead))]
        if row >= lead:
            path += [lead + node for node in path_to(parents, row - lead)]
        text = [*range(offset), *(100 + each for each in path)]
        assert rows.depths[row].item() == len(path) - 1
        assert columns[seen[row]].tolist() == text[-window:]


def test_what_is_no_path_of_the_round_is_refused_and_nothing_moved() -> None:
    caches = [KVCache()]
    written(caches[0], [0, 1])
    with Speculation(caches) as speculation:
        written(speculation.caches[0], [2, 3, 4])
        for rows in ([0, 3], [1, 0], [1, 1], [-1]):
            with pytest.raises(InvalidRequestError, match="below 3, the number"):
                speculation.move(rows)
        speculation.commit(3)
    assert shown(caches)[0] == [0, 1, 2, 3, 4, -1]
    with Speculation(caches, isolated=True) as speculation:
        written(speculation.caches[0], [5, 6])
        with pytest.raises(InvalidRequestError, match="isolated"):
            speculation.move([1])
    caches = [KVCache(), KVCache()]
    with Speculation(caches) as speculation:
        for cache, rows in zip(speculation.caches, ([0, 1], [0, 1, 2]), strict=True):
            written(cache, rows)
        with pytest.raises(InvalidRequestError, match="have written the same number"):
            speculation.move([1])


@pytest.mark.parametrize("cache", [ArraysCache(2), RotatingKVCache(6, keep=2)])
def test_caches_that_hold_no_trees_are_refused(cache: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="cannot hold a draft tree"):
        check_trees([KVCache(), cache])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moves", range(6))
def test_a_move_that_is_interrupted_is_rolled_back(
    kind: str, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, moved = [KINDS[kind]() for _ in range(3)], tree_view._move
    for cache in caches:
        written(cache, [*range(8)])
    left = moves

    def interrupted(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        moved(*arguments)

    monkeypatch.setattr(tree_view, "_move", interrupted)
    with Speculation(caches) as speculation:
        for cache in speculation.caches:
            written(cache, [50, 51, 52, 53])
        with pytest.raises(KeyboardInterrupt):
            speculation.move([0, 2, 3])
    for cache in caches:
        assert cache.offset == 8
        for rows, more in zip(shown(cache), (0, 0.25), strict=True):
            assert sorted(rows)[1 - WINDOW :] == [row + more for row in range(3, 8)]


@pytest.mark.parametrize("kind", ["KVCache", "SlidingKVCache"])
@pytest.mark.parametrize("kept_rows", [0, 3, 5, 40])
def test_keys_in_whole_steps_have_masks_of_trees(
    kind: str, kept_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the number of keys is a multiple of a step; unwritten rows are masked."""
    for module in (padded_kv, sliding_kv):
        monkeypatch.setattr(module, "asks_cudnn", lambda dtype: True)
    cache = KVCache() if kind == "KVCache" else SlidingKVCache(6, 600)
    if kept_rows:
        written(cache, [*range(kept_rows)])
    rows = tree_rows(mx.array([-1, 0, 0, 1]), levels=3)
    with Speculation([cache], key_steps=True) as speculation:
        (view,) = tree_views(speculation.caches, rows)
        for _ in range(2):  # again, as for the next level of a head's tree
            mask = np.array(view.make_mask(5, return_array=True))
            keys = np.array(written(view, [100, 101, 102, 103, 104])[0][0, 0, :, 0])
            assert mask.shape == (5, len(keys))
        assert len(keys) == padded_kv.STEP or kind != "KVCache"
        before = [*range(kept_rows), *range(100, 105)]
        text = [*before, 100, 101, 102, 104]
        window = 6 if kind == "SlidingKVCache" else 99
        assert keys[mask[4]].tolist() == text[-window:]
    assert cache.offset == kept_rows
