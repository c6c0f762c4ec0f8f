"""Quantizing key-value caches once they hold enough, as mlx-lm does.

mlx-lm looks after every forward: a cache of at least `start` positions that can be
quantized is replaced in the list by its quantized twin. A row of a round must see what
its own step would have seen, so no round may reach across that point:

    start = 8, the caches hold 5      rows 5, 6 and 7 see plain keys: at most 3 of them
    the caches hold 8                 replaced; every later row sees quantized keys

The old cache objects stay as they are, so a round is undone by putting them back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

Replaced = list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Options of quantized caches: bits, group size, and the position to begin at."""

    bits: int  # of a number
    group_size: int = 64  # numbers that share a scale, along the last axis
    start: int = 0  # positions that a cache holds when it is quantized

    def room(self, caches: Sequence[Any]) -> int | None:
        """Return how many rows a forward may write; None: as many as it likes."""
        offsets = [
            cache.offset
            for cache in caches
            if hasattr(cache, "to_quantized") and cache.offset < self.start
        ]
        return self.start - max(offsets) if offsets else None

    def replace(self, caches: list[Any]) -> Replaced:
        """Replace what is due; return the places and the old objects."""
        before = list(caches)
        maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        places = range(len(before))
        return [(i, before[i]) for i in places if caches[i] is not before[i]]

    @staticmethod
    def unable(caches: Sequence[Any]) -> Any | None:
        """Return a cache that holds a window, which mlx-lm cannot quantize; or None.

        Those inside of a `CacheList` count for nothing: mlx-lm leaves them as they are.
        """
        windows = (RotatingKVCache, SlidingKVCache)
        return next((cache for cache in caches if isinstance(cache, windows)), None)
