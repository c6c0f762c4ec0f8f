"""Quantized keys and values of a batch, each row from column 0 on.

mlx-lm has quantized caches of one sequence alone. This one holds rows of them as
`RaggedKVCache` holds plain ones, and is undone and kept by the same journal. A
position is quantized by itself, along its last axis, so a row has the codes, scales
and biases, bit for bit, that a `QuantizedKVCache` of its sequence has:

    keys      codes [rows, heads, columns, dim * bits / 32], uint32
              scales and biases [rows, heads, columns, dim / group_size]
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlx_speculation.caches.types.ragged_kv import RaggedKVCache, places_of, taken
from mlx_speculation.errors import InvalidRequestError

Parts = tuple[mx.array, ...]  # codes, scales and biases


class RaggedQuantizedKVCache(RaggedKVCache):
    """Quantized keys and values of several sequences, each from column 0 on.

    Args:
        rows: how many sequences.
        group_size: numbers that share a scale.
        bits: of a number.
    """

    def __init__(self, rows: int, group_size: int = 64, bits: int = 8) -> None:
        super().__init__(rows)
        # Models look at `bits` to know that keys are quantized.
        self.group_size, self.bits = group_size, bits

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "RaggedQuantizedKVCache":
        """Return a batch that holds copies of what these quantized caches do.

        Raises:
            InvalidRequestError: they are quantized in different ways.
        """
        first, *others = caches
        merged = cls(len(caches), first.group_size, first.bits)
        for other in others:
            merged._check_form(other)
        merged.lengths = [int(cache.offset) for cache in caches]
        columns = merged._whole(merged.columns)
        for row, cache in enumerate(caches):
            stop = cache.offset
            for name in ("keys", "values") if stop else ():
                new = getattr(cache, name)
                parts = merged._widened(getattr(merged, name), new, columns)
                for part, one in zip(parts, new, strict=True):
                    part[row : row + 1, :, :stop] = one[..., :stop, :]
                setattr(merged, name, parts)
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Quantize, and write behind each row's last position; show all columns.

        Args:
            keys: [rows, heads, positions, dim].
            values: likewise.
        """
        width = keys.shape[2]
        columns = self._whole(self.columns + width)
        self.keys = self._written(self.keys, keys, columns)
        self.values = self._written(self.values, values, columns)
        self.lengths = [length + width for length in self.lengths]
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        """Return the columns up to the longest row's end, of each part."""
        stop = self.columns
        keys = tuple(part[..., :stop, :] for part in self.keys)
        return keys, tuple(part[..., :stop, :] for part in self.values)

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, in this order, and no more columns than they show."""
        places, order = mx.array(batch_indices), batch_indices
        if isinstance(order, mx.array):
            order = order.tolist()
        self.lengths = [self.lengths[index] for index in order]
        stop = self._whole(self.columns)
        self._replace(lambda part: taken(part, places)[..., :stop, :])

    def extend(self, other: Any) -> None:
        """Let the rows of another batch stand behind these.

        Raises:
            InvalidRequestError: they are quantized in another way.
        """
        self._check_form(other)
        some: Any = self if self.keys is not None else other
        if some.keys is not None:
            stop = max(self._columns_held, other._columns_held)
            for name in ("keys", "values"):
                like = getattr(some, name)
                both = [x._widened(getattr(x, name), like, stop) for x in (self, other)]
                pairs = zip(*both, strict=True)
                setattr(self, name, tuple(mx.concatenate([*pair]) for pair in pairs))
        self.lengths = self.lengths + other.lengths

    def extract(self, idx: int) -> Any:
        """Return a copy of one row as a cache of its own."""
        cache: Any = QuantizedKVCache(self.group_size, self.bits)
        stop = self.lengths[idx]
        if self.keys is not None and stop:
            for name in ("keys", "values"):
                parts = [part[idx : idx + 1, :, :stop] for part in getattr(self, name)]
                setattr(cache, name, tuple(map(mx.contiguous, parts)))
            cache.offset = stop
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as allocated."""
        parts = () if self.keys is None else (*self.keys, *self.values)
        return sum(part.nbytes for part in parts)

    @property
    def _columns_held(self) -> int:
        return 0 if self.keys is None else int(self.keys[0].shape[2])

    def _written(self, old: Parts | None, new: mx.array, columns: int) -> Parts:
        """Return what is held, with so many columns and new positions of each row."""
        coded = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        parts, width = self._widened(old, coded, columns), new.shape[2]
        if len(set(self.lengths)) > 1:
            places = places_of(tuple(self.lengths), width)
            pairs = zip(parts, coded, strict=True)
            return tuple(
                mx.put_along_axis(part, places, one, axis=2) for part, one in pairs
            )
        start = self.lengths[0]
        for part, one in zip(parts, coded, strict=True):
            part[..., start : start + width, :] = one
        return parts

    def _widened(self, old: Parts | None, like: Parts, columns: int) -> Parts:
        """Return parts of these rows with so many columns at least, or zeros."""
        each = old or (None,) * len(like)
        pairs = zip(each, like, strict=True)
        return tuple(self._padded(part, one, columns) for part, one in pairs)

    def _replace(self, change: Callable[[mx.array], mx.array]) -> None:
        """Put other arrays in the place of all parts."""
        if self.keys is not None:
            self.keys = tuple(map(change, self.keys))
            self.values = tuple(map(change, self.values))

    def _check_form(self, other: Any) -> None:
        """Refuse rows of another number of bits, or of other groups."""
        if (self.group_size, self.bits) != (other.group_size, other.bits):
            raise InvalidRequestError(
                f"Rows of {other.bits} bits in groups of {other.group_size} were to be "
                f"put beside rows of {self.bits} in groups of {self.group_size}. Put "
                "those together that are quantized alike."
            )
