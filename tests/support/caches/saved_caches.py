"""Caches of every kind that a file can hold, written as models write to them.

Writes are random bits, NaNs among them. Two caches are equal if later equal writes to
both return the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import Compressor, LayerCache

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
Random = np.random.Generator


def bits(array: mx.array) -> Any:
    flat = mx.contiguous(array).reshape(-1).view(UNSIGNED[array.dtype.size])
    return np.array(flat).tobytes(), tuple(array.shape), str(array.dtype)


def plain(value: Any) -> Any:
    """Return nested data with arrays as their bits, and tuples as lists."""
    if isinstance(value, mx.array):
        return bits(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def random_array(rng: Random, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    raw = rng.integers(0, 256, size=int(np.prod(shape)) * dtype.size, dtype=np.uint8)
    unsigned = mx.array(raw.view(f"u{dtype.size}"))
    return unsigned.view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of cache; `write` writes rows, and returns what a model then sees."""

    name: str
    make: Callable[[], Any]
    write: Callable[[Any, int, Random], Any]


def attend(cache: Any, width: int, rng: Random, dtype: mx.Dtype, dim: int = 4) -> Any:
    """Write to a cache of keys and values; values are one number narrower than keys."""
    batch = cache.left_padding.size if hasattr(cache, "left_padding") else 1
    mask = None
    if hasattr(cache, "make_mask"):
        mask = cache.make_mask(width, return_array=True, window_size=None)
    keys = random_array(rng, (batch, 2, width, dim), dtype)
    values = random_array(rng, (batch, 2, width, dim - 1), dtype)
    shown = cache.update_and_fetch(keys, values)
    return plain([mask, list(shown)])


def _kv(dtype: mx.Dtype) -> Case:
    return Case("KVCache", KVCache, lambda c, n, r: attend(c, n, r, dtype))


def _concatenate(dtype: mx.Dtype) -> Case:
    write = lambda c, n, r: attend(c, n, r, dtype)  # noqa: E731
    return Case("ConcatenateKVCache", ConcatenateKVCache, write)


def _ring(dtype: mx.Dtype, size: int, keep: int) -> Case:
    make = lambda: RotatingKVCache(size, keep=min(keep, size - 1))  # noqa: E731
    return Case("RotatingKVCache", make, lambda c, n, r: attend(c, n, r, dtype))


def _quantized(dtype: mx.Dtype, bits: int) -> Case:
    def write(cache: Any, width: int, rng: Random) -> Any:
        mask = cache.make_mask(width, return_array=True, window_size=None)
        keys = mx.array(rng.normal(size=(1, 2, width, 32))).astype(dtype)
        shown = cache.update_and_fetch(keys, -keys)
        return plain([mask, shown])

    return Case("QuantizedKVCache", lambda: QuantizedKVCache(32, bits), write)


def _chunked(dtype: mx.Dtype, size: int) -> Case:
    def write(cache: Any, width: int, rng: Random) -> Any:
        cache.maybe_trim_front()
        return [cache.start_position, attend(cache, width, rng, dtype)]

    return Case("ChunkedKVCache", lambda: ChunkedKVCache(size), write)


def _arrays(dtype: mx.Dtype, unused: bool, lengths: bool) -> Case:
    def make() -> Any:
        cache: Any = ArraysCache(3)
        if lengths:
            cache.lengths, cache.left_padding = mx.array([9]), mx.array([2])
        return cache

    def write(cache: Any, width: int, rng: Random) -> Any:
        mask = cache.make_mask(width)
        before = plain([mask, cache.cache])
        cache[0] = random_array(rng, (1, 3, 2), dtype)
        if not unused:
            cache[1] = random_array(rng, (1, 2, 2, 2), mx.float32)
        cache[2] = random_array(rng, (1, 3), mx.int32)
        cache.advance(width)
        return before

    return Case("ArraysCache", make, write)


def _batch(dtype: mx.Dtype, padding: list[int]) -> Case:
    make = lambda: BatchKVCache(padding)  # noqa: E731
    return Case("BatchKVCache", make, lambda c, n, r: attend(c, n, r, dtype))


def _batch_ring(dtype: mx.Dtype, size: int, padding: list[int]) -> Case:
    make = lambda: BatchRotatingKVCache(size, padding)  # noqa: E731
    return Case("BatchRotatingKVCache", make, lambda c, n, r: attend(c, n, r, dtype))


def _layer(dtype: mx.Dtype, window: int, ratio: int) -> Case:
    """A layer of DeepSeek V4.1 with a real compressor; ratio 0: no compressor."""
    args: Any = SimpleNamespace(
        compress_ratios=[ratio], hidden_size=4, head_dim=4, rms_norm_eps=1e-6
    )
    compress = Compressor(args, 0) if ratio else None

    def write(cache: Any, width: int, rng: Random) -> Any:
        start = cache.offset
        shown = [cache.update_window(random_array(rng, (1, width, 4), dtype))]
        if compress is not None:
            x = mx.array(rng.normal(size=(1, width, 4))).astype(dtype)
            latent, _ = compress(x, start, cache)
            if latent is not None:
                for name in ("compress_kv", "index_k"):
                    written = getattr(cache, name)
                    both = [latent] if written is None else [written, latent]
                    setattr(cache, name, mx.concatenate(both, axis=1))
        return plain([start, *shown, *cache.state])

    return Case("LayerCache", lambda: LayerCache(window), write)


def members(*cases: Case) -> Case:
    return Case(
        "CacheList",
        lambda: CacheList(*(case.make() for case in cases)),
        lambda cache, width, rng: [
            case.write(member, width, rng)
            for case, member in zip(cases, cache.caches, strict=True)
        ],
    )


def single_cases(rng: Random) -> list[Case]:
    """Return a case of every leaf kind for one sequence, with random settings."""
    dtype = DTYPES[rng.integers(3)]
    size = int(rng.integers(1, 9))
    return [
        _kv(dtype),
        _concatenate(dtype),
        _ring(dtype, size, int(rng.integers(3))),
        _quantized(dtype, int(rng.choice([2, 4, 8]))),
        _chunked(dtype, size),
        _arrays(dtype, bool(rng.integers(2)), bool(rng.integers(2))),
        _batch(dtype, [0]),
        _batch_ring(dtype, size, [0]),
        _layer(dtype, size, int(rng.integers(5))),
    ]


def batch_cases(rng: Random, padding: list[int]) -> list[Case]:
    dtype = DTYPES[rng.integers(3)]
    return [
        _batch(dtype, padding),
        _batch_ring(dtype, int(rng.integers(1, 9)), padding),
    ]


def drawn_case(rng: Random, depth: int = 0) -> Case:
    """Return a random case for one sequence; one in five is a list, perhaps nested."""
    if depth < 3 and rng.random() < 0.2:
        count = int(rng.integers(1, 4))
        return members(*(drawn_case(rng, depth + 1) for _ in range(count)))
    cases = single_cases(rng)
    return cases[rng.integers(len(cases))]


def filled(case: Case, widths: list[int], rng: Random) -> Any:
    cache = case.make()
    for width in widths:
        case.write(cache, width, rng)
    return cache


def fields(cache: Any) -> Iterator[Any]:
    for name, value in sorted(vars(cache).items()):
        yield name
        if name == "caches":
            yield [list(fields(member)) for member in value]
        else:
            yield plain(value)


def content(caches: list[Any]) -> list[Any]:
    return [list(fields(cache)) for cache in caches]
