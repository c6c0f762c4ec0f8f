"""Layers of a ragged batch share offsets; a row is written after its own end."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_speculation.caches import RaggedKVCache, Speculation


def layers(lengths: list[int], count: int = 2) -> list[RaggedKVCache]:
    """Return caches of several layers whose rows have these lengths."""
    caches = []
    for layer in range(count):
        rows = []
        for row, length in enumerate(lengths):
            cache: Any = KVCache()
            cache.update_and_fetch(*tagged(1, length, 100 * layer + 10 * row))
            rows.append(cache)
        caches.append(RaggedKVCache.merge(rows))
    return caches


def tagged(rows: int, width: int, tag: int) -> tuple[mx.array, mx.array]:
    """Return keys that count up from a tag, and their negatives as values."""
    keys = (tag + mx.arange(rows * width)).reshape(rows, 1, width, 1).astype(mx.float32)
    return keys, -keys


def test_layers_share_what_follows_from_lengths() -> None:
    first, second = layers([3, 1])
    assert first.offset is second.offset
    assert first.offset.tolist() == [3, 1]
    assert first.offset.dtype == mx.int32
    for cache in (first, second):
        cache.update_and_fetch(*tagged(2, 2, 50))
    assert first.offset is second.offset
    assert first.offset.tolist() == [5, 3]


@pytest.mark.parametrize("keep", [[2, 0], [0, 1], 2])
def test_offsets_follow_a_commit_and_a_rollback(keep: Any) -> None:
    caches = layers([3, 1])
    with Speculation(caches) as speculation:
        for cache in speculation.caches:
            cache.update_and_fetch(*tagged(2, 2, 50))
        speculation.commit(keep)
    each = [keep, keep] if isinstance(keep, int) else keep
    assert [c.offset.tolist() for c in caches] == [[3 + each[0], 1 + each[1]]] * 2
    with Speculation(caches) as speculation:
        for cache in speculation.caches:
            cache.update_and_fetch(*tagged(2, 2, 70))
    assert [c.offset.tolist() for c in caches] == [[3 + each[0], 1 + each[1]]] * 2


def test_each_row_is_written_after_its_own_end() -> None:
    (cache,) = layers([3, 1], count=1)
    keys, values = cache.update_and_fetch(*tagged(2, 2, 50))
    assert keys[0, 0, :5, 0].tolist() == [0, 1, 2, 50, 51]
    assert keys[1, 0, :3, 0].tolist() == [10, 52, 53]
    assert mx.array_equal(values[:, :, :3], -keys[:, :, :3])
    cache.filter(mx.array([1]))
    assert cache.offset.tolist() == [3]
    cache.filter([0])
    assert cache.keys_and_values()[0][0, 0, :3, 0].tolist() == [10, 52, 53]
