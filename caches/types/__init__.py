"""Cache classes of this project, and conversions from and to mlx-lm's.

    sliding_kv    a sliding window with its rows in order, not a ring
    ragged_kv     a batch whose sequences end at different columns
    ragged_quantized_kv   such a batch, with quantized keys and values
    padded_kv     keys padded to one of few lengths, for cuDNN
    fixed_view    keys in views of fixed sizes, for exact mode
    tree_view     caches as a model sees them while it is fed a tree
    buffers       the arrays with the rows of a cache
    leaves        the leaf caches in a list, and how many positions they hold
    convert       conversions of whole lists of caches from one class to another

The cache classes here are cheaper to roll back or to batch than mlx-lm's.
"""

from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

__all__ = ["RaggedKVCache", "SlidingKVCache"]
