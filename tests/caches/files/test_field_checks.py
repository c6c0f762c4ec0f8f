"""A cache is refused if one of its fields does not fit the others.

Each line has a valid cache, one change to its fields, and a part of the error.
"""

from dataclasses import replace
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

from mlx_speculation.caches.files.codecs import checked, read_leaf
from mlx_speculation.caches.files.fields import Leaf
from mlx_speculation.caches.files.safetensors_reader import FlawError
from support.caches.saved_caches import attend

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


LEAVES: dict[str, Leaf] = {
    name: read_leaf(cache)
    for name, cache in {
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
    }.items()
}


def rows(count: int, batch: int = 1, heads: int = 2, dim: int = 4) -> mx.array:
    return mx.ones((batch, heads, count, dim), mx.float16)


FLAWS: list[tuple[str, dict[str, Any], str]] = [
    ("kv", {"offset": 257}, "offset is 257 and it has 256 rows"),
    ("kv", {"offset": -1}, "offset is -1, and it is from 0"),
    ("kv", {"offset": 2**30 + 1}, "offset is 1073741825, and it is from 0"),
    ("kv", {"offset": True}, "offset is no int"),
    ("kv", {"offset": 5.0}, "offset is no int"),
    ("kv", {"offset": None}, "has the numbers"),
    ("kv", {"step": 256}, "has the numbers"),
    ("kv", {"keys": None}, "one and not the other"),
    ("kv", {"values": rows(255, dim=3)}, r"keys has the shape .* and values"),
    ("kv", {"values": rows(256, heads=1)}, r"keys has the shape .* and values"),
    ("kv", {"keys": rows(256, dim=0)}, "no head dimension"),
    ("kv", {"keys": rows(256)[0]}, "and not 4 axes"),
    ("kv", {"keys": rows(256).astype(mx.int32)}, "not a float"),
    ("kv", {"keys": rows(256).astype(mx.uint16)}, "not a float"),
    ("kv", {"keys.0": rows(256)}, "has no array 'keys.0'"),
    ("kv", {"lengths": mx.array([1])}, "has no array 'lengths'"),
    ("empty", {"offset": 1}, "offset is 1 and it has 0 rows"),
    ("concatenate", {"offset": 4}, "offset is 4 and it has 5 rows"),
    ("quantized", {"offset": 257}, "offset is 257 and it has 256 rows"),
    ("quantized", {"bits": 8}, "do not fit groups of 32 with 8 bits"),
    ("quantized", {"bits": 2}, "do not fit groups of 32 with 2 bits"),
    ("quantized", {"group_size": 64}, "do not fit groups of 64"),
    ("quantized", {"bits": 7}, "are none that mlx quantizes to"),
    ("quantized", {"group_size": 16}, "are none that mlx quantizes to"),
    ("quantized", {"keys.1": None}, "lacks some of the packed"),
    ("quantized", {"keys.2": rows(256, dim=1)}, "scales of keys are"),
    ("quantized", {"values.0": rows(256)}, "packed values are mlx.core.float16"),
    ("quantized", {"keys.3": rows(256)}, "has no array 'keys.3'"),
    ("quantized", {"keys.00": rows(256)}, "has no array 'keys.00'"),
    ("quantized", {"keys": rows(256)}, "has no array 'keys'"),
    ("chunked", {"start_position": 6}, r"positions are \[6, 5\)"),
    ("chunked", {"offset": 257}, r"positions are \[0, 257\)"),
    ("chunked", {"chunk_size": 0}, "chunk_size is 0"),
    ("filling", {"_idx": 2}, "offset is 3, its index 2"),
    ("filling", {"offset": 2}, "offset is 2, its index 3"),
    ("filling", {"offset": 8}, "offset is 8, its index 3, its window 8"),
    ("filling", {"keep": 8}, "keeps 8 rows of a window of 8"),
    ("filling", {"max_size": 7}, "window 7 and it has 8 rows"),
    ("ordered", {"_idx": 13}, "index 13, its window 8 and it has 12 rows"),
    ("ordered", {"_idx": 10}, "index 10, its window 8 and it has 12 rows"),
    ("ordered", {"max_size": 13}, "window 13 and it has 12 rows"),
    ("long", {"offset": 11}, "offset is 11, its index 12"),
    ("long", {"_idx": 8}, "index 8, its window 8 and it has 12 rows"),
    ("wrapped", {"_idx": 2}, "offset is 10, its index 2"),
    ("wrapped", {"offset": 8}, "offset is 8, its index 4"),
    ("wrapped", {"max_size": 9}, "window 9 and it has 8 rows"),
    ("wrapped", {"keep": 4}, "offset is 10, its index 4"),
    ("arrays", {"slots": 2}, "it has cache.2 and 2 slots"),
    ("arrays", {"slots": 65}, "has 65 slots of 1 to 64"),
    ("arrays", {"slots": 0}, "has 0 slots"),
    ("arrays", {"cache.1": mx.ones((3, 1))}, r"batches of \[2, 3\]"),
    ("arrays", {"cache.1": mx.ones((0, 1))}, r"cache.1 is \(0, 1\)"),
    ("arrays", {"cache.1": mx.array(1.0)}, r"cache.1 is \(\)"),
    ("arrays", {"lengths": mx.array([3])}, r"batches of \[1, 2\]"),
    ("arrays", {"lengths": mx.array([1.0, 2.0])}, "not one int32 for each row"),
    ("arrays", {"lengths": mx.array([1, 2**31 - 1])}, "goes from 1 to 2147483647"),
    ("batch", {"_idx": 4}, "row 0 has offset 5, padding 0 and the index is 4"),
    ("batch", {"_idx": 257}, "index is 257 and it has 256 rows"),
    ("batch", {"offset": mx.array([5, 4])}, "row 1 has offset 4, padding 2"),
    ("batch", {"offset": mx.array([5])}, "offset, left_padding differ"),
    ("batch", {"offset": None}, "has no offset"),
    ("batch", {"left_padding": mx.array([0, -2])}, "left_padding is -2"),
    ("batch", {"left_padding": mx.array([[0, 2]])}, "not one int32 for each row"),
    ("batch", {"keys": rows(256, 3), "values": rows(256, 3)}, "a batch of 3"),
    ("batch filling", {"rotated": True}, "rotated, with 8 rows of 8, index 3 after 3"),
    ("batch filling", {"rotated": 0}, "rotated is no bool"),
    ("batch filling", {"_offset": 2}, "offset is 2, its index 3"),
    ("batch filling", {"_idx": 2}, "offset is 3, its index 2"),
    ("batch filling", {"max_size": 0}, "max_size is 0"),
    ("batch filling", {"offset": mx.array([2, 1])}, "row 0 has offset 2 and padding 0"),
    ("batch ordered", {"_idx": 8}, "index 8, its window 8 and it has 12 rows"),
    ("batch ordered", {"rotated": True}, "rotated, with 12 rows of 8"),
    ("batch ordered", {"left_padding": mx.array([-14, 2])}, "padding -14"),
    ("batch rotated", {"rotated": False}, "offset is 10, its index 2"),
    ("batch rotated", {"_offset": 8}, "index 2 after 8"),
    ("batch rotated", {"_idx": 0}, "index 0 after 10"),
    ("batch rotated", {"_idx": 9}, "index 9 after 10"),
    ("batch rotated", {"max_size": 9}, "rotated, with 8 rows of 9"),
    ("layer", {"offset": 3}, "window has 4 rows of 4 at offset 3"),
    ("layer", {"window_size": 5}, "window has 4 rows of 5 at offset 7"),
    ("layer", {"window_size": 0}, "window_size is 0"),
    ("layer", {"offset": 8}, "do not make 8 tokens"),
    ("layer", {"window": None}, "has no window"),
    ("layer", {"pending_gate": None}, "pending rows differ"),
    ("layer", {"index_k": mx.ones((1, 1, 2))}, "index keys and groups differ"),
    ("layer", {"compress_kv": None}, "index keys and groups differ"),
    ("layer", {"compress_kv": None, "index_k": None}, "None groups and 1 pending"),
    ("layer", {"window": mx.ones((2, 4, 4))}, r"batches of \[1, 2\]"),
    ("layer", {"window": mx.ones((1, 4, 5))}, r"dims of \[4, 5\]"),
    ("layer", {"window": mx.ones((1, 4))}, "and not 3 axes"),
    (
        "layer",
        {"pending_kv": mx.ones((1, 5, 4)), "pending_gate": mx.ones((1, 5, 4))},
        "2 groups and 5 pending rows",
    ),
    ("group", {"offset": 0}, "offset is 0, arrays 3"),
    ("group", {"offset": 3, "window": mx.ones((1, 3, 4))}, "None groups and 2 pending"),
]


@pytest.mark.parametrize("name", LEAVES)
def test_a_cache_that_mlx_lm_made_is_sound(name: str) -> None:
    once = checked(LEAVES[name])
    again = checked(once)
    assert again.numbers == once.numbers == LEAVES[name].numbers
    assert {k: a.shape for k, a in again.arrays.items()} == {
        k: a.shape for k, a in once.arrays.items()
    }


@pytest.mark.parametrize(("name", "change", "says"), FLAWS)
def test_one_field_that_does_not_fit_is_refused(
    name: str, change: dict[str, Any], says: str
) -> None:
    leaf = LEAVES[name]
    numbers: dict[str, Any] = {**leaf.numbers}
    arrays = {**leaf.arrays}
    for field, value in change.items():
        fields: dict[str, Any] = arrays if field in arrays else numbers
        if value is None:
            del fields[field]
        else:
            (arrays if isinstance(value, mx.array) else numbers)[field] = value
    with pytest.raises(FlawError, match=says):
        checked(replace(leaf, numbers=numbers, arrays=arrays))
