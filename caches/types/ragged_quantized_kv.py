"""Quantized keys and values of a batch in which each row begins at column 0.

mlx-lm has quantized caches for one sequence only. This cache has the layout of
`RaggedKVCache`. Each position is quantized alone, along its last axis. So a row's
codes, scales and biases are bit for bit those of a `QuantizedKVCache` that holds the
row's sequence:

    keys      codes [rows, heads, columns, dim * bits / 32], uint32
              scales and biases [rows, heads, columns, dim / group_size]
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlx_speculation.caches.types.buffers import buffers
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache, places_of
from mlx_speculation.errors import InvalidRequestError


class RaggedQuantizedKVCache(RaggedKVCache):
    """A `RaggedKVCache` of numbers with `bits` bits, in groups of `group_size`."""

    def __init__(self, rows: int, group_size: int = 64, bits: int = 8) -> None:
        super().__init__(rows)
        # Models recognize a quantized cache by its attribute `bits`.
        self.group_size, self.bits = group_size, bits

    @classmethod
    def _of(cls, caches: Sequence[Any]) -> "RaggedQuantizedKVCache":
        first, *others = caches
        merged = cls(len(caches), first.group_size, first.bits)
        for other in others:
            merged._check_form(other)
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Quantize and write after each row's end; return `keys_and_values()`."""
        width = keys.shape[2]
        form: Any = {"group_size": self.group_size, "bits": self.bits}
        new = tuple(mx.quantize(keys, **form)), tuple(mx.quantize(values, **form))
        self._widen(new, self._whole(self.columns + width))
        if len(set(self.lengths)) > 1:
            places = places_of(tuple(self.lengths), width)
            self._change(lambda x, y: mx.put_along_axis(x, places, y, axis=2), new)
        else:
            start = self.lengths[0]
            for part, one in zip(buffers(self), (*new[0], *new[1]), strict=True):
                part[..., start : start + width, :] = one
        self.lengths = [length + width for length in self.lengths]
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        """Return codes, scales and biases, up to the longest row's end."""
        stop = self.columns
        keys = tuple(part[..., :stop, :] for part in self.keys)
        return keys, tuple(part[..., :stop, :] for part in self.values)

    def extend(self, other: Any) -> None:
        """Append the rows of another batch.

        Raises:
            InvalidRequestError: the two batches' bits or group sizes differ.
        """
        self._check_form(other)
        super().extend(other)

    def _row(self) -> Any:
        return QuantizedKVCache(self.group_size, self.bits)

    def _check_form(self, other: Any) -> None:
        if (self.group_size, self.bits) != (other.group_size, other.bits):
            raise InvalidRequestError(
                f"Rows of bits={other.bits}, group_size={other.group_size} cannot be "
                f"joined with rows of bits={self.bits}, group_size={self.group_size}. "
                "Join only rows that are quantized alike."
            )
