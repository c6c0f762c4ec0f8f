"""A cache is refused if one of its fields does not fit the others."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files.kinds import as_saved, check_leaf
from mlx_speculation.caches.files.safetensors_reader import FlawError
from support.caches.saved_caches import attend, plain

RNG = np.random.default_rng(0)


def written(cache: Any, *widths: int) -> Any:
    for width in widths:
        attend(cache, width, RNG, mx.float16)
    return cache


def _quantized() -> Any:
    cache = QuantizedKVCache(32, 4)
    cache.update_and_fetch(mx.ones((1, 2, 5, 64)), mx.ones((1, 2, 5, 32)))
    return cache


def _arrays() -> Any:
    cache: Any = ArraysCache(3)
    cache[0], cache[2] = mx.ones((2, 3)), mx.ones((2, 1, 4))
    cache.lengths, cache.left_padding = mx.array([3, -1]), mx.array([0, 1])
    return cache


def _layer(window: int = 4) -> Any:
    cache: Any = LayerCache(window)
    cache.update_window(mx.ones((1, 7, 4)))
    cache.compress_kv, cache.index_k = mx.ones((1, 2, 4)), mx.ones((1, 2, 2))
    cache.pending_kv = cache.pending_gate = mx.ones((1, 1, 4))
    return cache


def _layer_of_one_group() -> Any:
    cache: Any = LayerCache(4)
    cache.update_window(mx.ones((1, 2, 4)))
    cache.pending_kv = cache.pending_gate = mx.ones((1, 2, 4))
    return cache


CACHES: dict[str, Any] = {
    "kv": written(KVCache(), 5),
    "empty": KVCache(),
    "concatenate": written(ConcatenateKVCache(), 5),
    "quantized": _quantized(),
    "chunked": written(ChunkedKVCache(8), 5),
    "filling": written(RotatingKVCache(8, keep=2), 1, 1, 1),
    "ordered": written(RotatingKVCache(8, keep=2), 8, 5),
    "long": written(RotatingKVCache(8, keep=2), 12),
    "wrapped": written(RotatingKVCache(8, keep=2), 8, 1, 1),
    "arrays": _arrays(),
    "batch": written(BatchKVCache([0, 2]), 5),
    "batch filling": written(BatchRotatingKVCache(8, [0, 2]), 1, 1, 1),
    "batch ordered": written(BatchRotatingKVCache(8, [0, 2]), 8, 5),
    "batch rotated": written(BatchRotatingKVCache(8, [0, 2]), 8, 1, 1),
    "layer": _layer(),
    "group": _layer_of_one_group(),
}


def rows(count: int, batch: int = 1, heads: int = 2, dim: int = 4) -> mx.array:
    return mx.ones((batch, heads, count, dim), mx.float16)


FLAWS: list[tuple[str, dict[str, Any]]] = [
    ("kv", {"offset": 257}),
    ("kv", {"offset": -1}),
    ("kv", {"offset": 2**30 + 1}),
    ("kv", {"offset": True}),
    ("kv", {"offset": 5.0}),
    ("kv", {"offset": None}),
    ("kv", {"keys": None}),
    ("kv", {"values": rows(255, dim=3)}),
    ("kv", {"values": rows(256, heads=1)}),
    ("kv", {"keys": rows(256, dim=0)}),
    ("kv", {"keys": rows(256)[0]}),
    ("kv", {"keys": rows(256).astype(mx.int32)}),
    ("kv", {"keys": rows(256).astype(mx.uint16)}),
    ("empty", {"offset": 1}),
    ("concatenate", {"offset": 4}),
    ("quantized", {"offset": 257}),
    ("quantized", {"bits": 8}),
    ("quantized", {"bits": 2}),
    ("quantized", {"group_size": 64}),
    ("quantized", {"bits": 7}),
    ("quantized", {"group_size": 16}),
    ("quantized", {"keys.1": None}),
    ("quantized", {"keys.2": rows(256, dim=1)}),
    ("quantized", {"values.0": rows(256)}),
    ("quantized", {"keys.3": rows(256)}),
    ("quantized", {"keys": rows(256)}),
    ("chunked", {"start_position": 6}),
    ("chunked", {"offset": 257}),
    ("chunked", {"chunk_size": 0}),
    ("filling", {"_idx": 2}),
    ("filling", {"offset": 2}),
    ("filling", {"offset": 8}),
    ("filling", {"keep": 8}),
    ("filling", {"max_size": 7}),
    ("ordered", {"_idx": 13}),
    ("ordered", {"_idx": 10}),
    ("ordered", {"max_size": 13}),
    ("long", {"offset": 11}),
    ("long", {"_idx": 8}),
    ("wrapped", {"_idx": 2}),
    ("wrapped", {"offset": 8}),
    ("wrapped", {"max_size": 9}),
    ("wrapped", {"keep": 4}),
    ("arrays", {"cache.1": mx.ones((3, 1))}),
    ("arrays", {"cache.1": mx.ones((0, 1))}),
    ("arrays", {"cache.1": mx.array(1.0)}),
    ("arrays", {"lengths": mx.array([3])}),
    ("arrays", {"lengths": mx.array([1.0, 2.0])}),
    ("arrays", {"lengths": mx.array([1, 2**31 - 1])}),
    ("batch", {"_idx": 4}),
    ("batch", {"_idx": 257}),
    ("batch", {"offset": mx.array([5, 4])}),
    ("batch", {"offset": mx.array([5])}),
    ("batch", {"offset": None}),
    ("batch", {"left_padding": mx.array([0, -2])}),
    ("batch", {"left_padding": mx.array([[0, 2]])}),
    ("batch", {"keys": rows(256, 3), "values": rows(256, 3)}),
    ("batch filling", {"rotated": True}),
    ("batch filling", {"rotated": 0}),
    ("batch filling", {"_offset": 2}),
    ("batch filling", {"_idx": 2}),
    ("batch filling", {"max_size": 0}),
    ("batch filling", {"offset": mx.array([2, 1])}),
    ("batch ordered", {"_idx": 8}),
    ("batch ordered", {"rotated": True}),
    ("batch ordered", {"left_padding": mx.array([-14, 2])}),
    ("batch rotated", {"rotated": False}),
    ("batch rotated", {"_offset": 8}),
    ("batch rotated", {"_idx": 0}),
    ("batch rotated", {"_idx": 9}),
    ("batch rotated", {"max_size": 9}),
    ("layer", {"offset": 3}),
    ("layer", {"window_size": 5}),
    ("layer", {"window_size": 0}),
    ("layer", {"offset": 8}),
    ("layer", {"window": None}),
    ("layer", {"pending_gate": None}),
    ("layer", {"index_k": mx.ones((1, 1, 2))}),
    ("layer", {"compress_kv": None}),
    ("layer", {"compress_kv": None, "index_k": None}),
    ("layer", {"window": mx.ones((2, 4, 4))}),
    ("layer", {"window": mx.ones((1, 4, 5))}),
    ("layer", {"window": mx.ones((1, 4))}),
    ("layer", {"pending_kv": mx.ones((1, 5, 4)), "pending_gate": mx.ones((1, 5, 4))}),
    ("group", {"offset": 0}),
    ("group", {"offset": 3, "window": mx.ones((1, 3, 4))}),
    ("arrays", {"cache": []}),
    ("arrays", {"cache": [None] * 65}),
    ("arrays", {"cache": None}),
    ("kv", {"keys": "text", "values": "text"}),
]


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_mlx_lm_made_is_sound(name: str) -> None:
    once = as_saved(CACHES[name])
    check_leaf(once)
    again = as_saved(once)
    check_leaf(again)
    assert plain([*vars(once).values()]) == plain([*vars(again).values()])


@pytest.mark.parametrize(("name", "change"), FLAWS)
def test_one_field_that_does_not_fit_is_refused(
    name: str, change: dict[str, Any]
) -> None:
    cache = as_saved(CACHES[name])
    for field, value in change.items():
        key, _, index = field.partition(".")
        if index:
            parts = [*getattr(cache, key)]
            parts[int(index) :] = [value, *parts[int(index) + 1 :]]
            value = parts
        setattr(cache, key, value)
    with pytest.raises(FlawError, match="its fields do not fit each other: "):
        check_leaf(cache)
