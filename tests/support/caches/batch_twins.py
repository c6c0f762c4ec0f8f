"""Compares batch caches with single native caches, one for each row.

Keys and values contain a token's position and serial number, as in `cache_twins`.
Padding has negative positions and serial number 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches import RaggedKVCache, Speculation
from mlx_speculation.caches.types.ragged_quantized_kv import RaggedQuantizedKVCache
from support.caches.cache_twins import Mixers, Rows, Visible, detached, tagged

_EMBEDDINGS = mx.random.normal((97, 64), key=mx.random.key(5))
_PROBES = 10**6


def batch_copy(cache: Any) -> Any:
    """Copy a batch cache; later writes to the original do not change the copy."""
    twin = object.__new__(type(cache))
    twin.__dict__ = {
        name: detached(value) if isinstance(value, mx.array | tuple) else value
        for name, value in vars(cache).items()
    }
    if isinstance(cache, ArraysCache):
        twin.cache = list(cache.cache)
    return twin


def together(rows: Sequence[Rows]) -> tuple[mx.array, mx.array]:
    """Return keys and values of one write: row i of the batch holds `rows[i]`."""
    pairs = [tagged(each) for each in rows]
    keys = mx.concatenate([keys for keys, _ in pairs])
    return keys, mx.concatenate([values for _, values in pairs])


class BatchKind(Protocol):
    @property
    def any_width(self) -> bool:
        """Return whether a single cache is independent of how writes are grouped."""
        ...

    def single(self) -> Any: ...

    def batch(self, left_padding: list[int]) -> Any: ...

    def merge(self, caches: list[Any]) -> Any: ...

    def write(self, cache: Any, rows: Sequence[Rows]) -> list[Any]:
        """Write `rows` to a batch or single cache; return what each row sees."""
        ...

    def fields(self, cache: Any) -> list[Any]:
        """Return the whole state of a batch cache, to compare after a roll-back."""
        ...

    def cached(self, cache: Any, row: int | None) -> list[Any]:
        """Return state that `write` does not show; `row` is None for a single cache."""
        ...


def sees(kind: BatchKind, cache: Any, starts: Sequence[int], width: int) -> list[Any]:
    """Write `width` more tokens to a copy; return what each row sees."""
    first = [Rows(at, tuple(range(_PROBES, _PROBES + width))) for at in starts]
    with Speculation([batch_copy(cache)], whole=True) as speculation:
        return kind.write(speculation.caches[0], first)


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A `BatchKVCache`, or with a window a `BatchRotatingKVCache`."""

    window: int | None = None
    narrow: int | None = None  # model window, smaller than the ring
    step: int = 256
    any_width: bool = True

    def single(self) -> Any:
        if self.window is not None:
            return RotatingKVCache(max_size=self.window)
        return KVCache()

    def batch(self, left_padding: list[int]) -> Any:
        cache: Any
        if self.window is not None:
            cache = BatchRotatingKVCache(self.window, left_padding)
        else:
            cache = BatchKVCache(left_padding)
        cache.step = self.step
        return cache

    def merge(self, caches: list[Any]) -> Any:
        cache = type(caches[0]).merge(caches)
        cache.step = self.step
        return cache

    def write(self, cache: Any, rows: Sequence[Rows]) -> list[Any]:
        width = rows[0].width
        options = {"return_array": False, "window_size": self.narrow}
        mask = cache.make_mask(width, **options)
        shown = cache.update_and_fetch(*self.arrays(rows))
        keys, values = (detached(self.read(cache, x)) for x in shown)

        def masked(row: int) -> Any:
            if not isinstance(mask, mx.array):
                return mask
            return mask[row, 0] if mask.ndim == 4 else mask[...]

        return [
            Visible(keys[row, 0], values[row, 0], masked(row), width)
            for row in range(len(rows))
        ]

    def arrays(self, rows: Sequence[Rows]) -> tuple[mx.array, mx.array]:
        return together(rows)

    def read(self, cache: Any, shown: Any) -> mx.array:
        """Return shown keys or values, dequantized if need be."""
        result: mx.array = shown
        return result

    def fields(self, cache: Any) -> list[Any]:
        rest = [cache.offset[...], cache.left_padding[...], cache._idx]
        if self.window is not None:
            rest += [cache._offset, cache.rotated, cache._lengths]
        return [*rest, None if cache.empty() else detached(cache.keys_and_values())]

    def cached(self, cache: Any, row: int | None) -> list[Any]:
        if row is None:
            return [mx.array(cache.offset)]
        return [cache.offset[row]]


@dataclass(frozen=True, slots=True)
class RaggedKind(AttentionKind):
    def merge(self, caches: list[Any]) -> Any:
        cache = RaggedKVCache.merge(caches)
        cache.step = self.step
        return cache

    def fields(self, cache: Any) -> list[Any]:
        rows = []  # the buffer after a row's end is not compared
        for row, length in enumerate(cache.lengths):
            if cache.keys is not None:
                keys, values = (
                    cache.keys[row, :, :length],
                    cache.values[row, :, :length],
                )
                rows += [detached(keys), detached(values)]
        return [cache.offset[...], list(cache.lengths), cache.empty(), *rows]


@dataclass(frozen=True, slots=True)
class RaggedQuantizedKind(RaggedKind):
    bits: int = 8

    def single(self) -> Any:
        return QuantizedKVCache(group_size=32, bits=self.bits)

    def merge(self, caches: list[Any]) -> Any:
        cache = RaggedQuantizedKVCache.merge(caches)
        cache.step = self.step
        return cache

    def arrays(self, rows: Sequence[Rows]) -> tuple[mx.array, mx.array]:
        """Repeat each (position, serial) in keys of 32 and values of 64 numbers."""
        pairs, _ = together(rows)
        return mx.tile(pairs, (1, 1, 1, 16)), -mx.tile(pairs, (1, 1, 1, 32))

    def read(self, cache: Any, shown: Any) -> mx.array:
        codes, scales, biases = shown
        form = {"group_size": cache.group_size, "bits": cache.bits}
        return mx.dequantize(codes, scales, biases, **form)[..., :2]

    def fields(self, cache: Any) -> list[Any]:
        rows = []
        for row, length in enumerate(cache.lengths):
            for part in () if cache.keys is None else (*cache.keys, *cache.values):
                rows.append(detached(part[row, :, :length]))
        return [cache.offset[...], list(cache.lengths), cache.empty(), *rows]


@dataclass(frozen=True, slots=True)
class BatchArraysKind:
    """A batched `ArraysCache` that real mixers write to."""

    mixers: Mixers
    any_width: bool = False

    def single(self) -> ArraysCache:
        return ArraysCache(self.mixers.slots)

    def batch(self, left_padding: list[int]) -> ArraysCache:
        return ArraysCache(self.mixers.slots, left_padding)

    def merge(self, caches: list[Any]) -> Any:
        return ArraysCache.merge(caches)

    def write(self, cache: Any, rows: Sequence[Rows]) -> list[Any]:
        ids = mx.array([[serial % 97 for serial in each.serials] for each in rows])
        shown = self.mixers(_EMBEDDINGS[ids, : self.mixers.hidden], cache)
        return [[y[row] for y in shown] for row in range(len(rows))]

    def fields(self, cache: Any) -> list[Any]:
        extents = [detached(cache.left_padding), detached(cache.lengths)]
        return [*cache.cache, *extents]

    def cached(self, cache: Any, row: int | None) -> list[Any]:
        return [
            None if slot is None else slot[0 if row is None else row]
            for slot in cache.cache
        ]
