"""Cache classes of this project, and conversions from and to mlx-lm's.

    sliding_kv    a sliding window in order, with slack, in place of mlx-lm's ring
    ragged_kv     a batch whose rows end at different columns
    ragged_quantized_kv   such a batch with quantized rows
    padded_kv     keys padded to whole steps of rows, for cuDNN
    fixed_view    keys in views of fixed sizes, for exact mode
    tree_view     caches as a model sees them while it is fed a tree
    buffers       the arrays with the rows of a cache
    leaves        the leaf caches in a list of caches, and the positions they hold
    convert       whole lists of caches from one class to another

Their layouts are cheaper to roll back or to batch. `caches.journals` rolls them back.
"""

from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

__all__ = ["RaggedKVCache", "SlidingKVCache"]
