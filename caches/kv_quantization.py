"""Quantizing key-value caches once they hold `start` positions, as mlx-lm does.

After every forward, mlx-lm replaces each quantizable cache of at least `start`
positions by a quantized copy. Each token of a round must see the same keys as in plain
decoding, so a round must not write rows on both sides of position `start`:

    start = 8, the caches hold 5      rows 5, 6 and 7 see plain keys: feed at most 3
    the caches hold 8                 they are replaced; later rows see quantized keys

The old cache objects do not change. To undo a round after the replacement, put the old
objects back and roll them back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

Replaced = list[tuple[int, Any]]  # places of replaced caches, and the old caches


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Options of quantized caches."""

    bits: int  # per number
    group_size: int = 64  # numbers that share a scale, along the last axis
    start: int = 0  # a cache is quantized once it holds this many positions

    def room(self, caches: Sequence[Any]) -> int | None:
        """Return how many rows the next forward may write; None: any number."""
        offsets = [
            cache.offset
            for cache in caches
            if hasattr(cache, "to_quantized") and cache.offset < self.start
        ]
        return self.start - max(offsets) if offsets else None

    def replace(self, caches: list[Any]) -> Replaced:
        """Quantize caches of `start` positions or more; return what was replaced."""
        before = list(caches)
        maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        places = range(len(before))
        return [(i, before[i]) for i in places if caches[i] is not before[i]]

    @staticmethod
    def unable(caches: Sequence[Any]) -> Any | None:
        """Return the first sliding-window cache, which mlx-lm cannot quantize, or None.

        Members of a `CacheList` are ignored: mlx-lm never quantizes them.
        """
        windows = (RotatingKVCache, SlidingKVCache)
        return next((cache for cache in caches if isinstance(cache, windows)), None)
