"""The prefix cache: cache contents of earlier requests, reused by later ones.

    prefix_cache     the object that a generator holds
    radix_tree       the compressed tree of token runs and of their cache contents
    roles            the target, draft model and heads whose cache contents are kept
    restore_points   the snapshots of running requests
    bounded_tree     the tree, kept within a byte limit; `budget` evicts nodes
    persistence      writes nodes to files and reads them; the module `segment_folder`
                     manages the files, `segment` converts nodes to arrays and back

The package knows tokens and snapshots, but no models, streams or text.
"""

from mlx_speculation.caches.prefix.prefix_cache import PrefixCache
from mlx_speculation.caches.prefix.restore_points import Left, Point

__all__ = ["Left", "Point", "PrefixCache"]
