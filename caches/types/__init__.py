"""Cache classes of our own, and conversions from and to mlx-lm's.

    sliding_kv    a sliding window in order, with slack, in place of mlx-lm's ring
    ragged_kv     a batch whose rows end at different columns
    ragged_quantized_kv   the same of quantized rows
    padded_kv     keys shown in blocks of fixed size
    shared_rows   live caches whose rows a snapshot shares
    leaves        the leaf caches in a list of caches, and the positions they hold
    convert       whole lists of caches from one class to another

They hold keys and values in a layout that is cheaper to roll back or to batch. How a
round on them is undone is in `caches.journals`; models and drafters are not known.
"""

from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

__all__ = ["RaggedKVCache", "SlidingKVCache"]
