"""The prefix cache: what earlier requests left, for requests that begin alike.

`prefix_cache` is what a generator holds, `radix_tree` the compressed tree of token runs
with what the caches of target, draft model and heads held for each (`roles`), and
`restore_points` the snapshots of requests still running. `bounded_tree` adds to the
tree what `budget` has room for. `persistence` moves nodes to
and from files: `segment` is one as arrays, `segment_folder` the files and their key. It
knows tokens and snapshots; it does not know models, streams or text.
"""

from mlx_speculation.caches.prefix.prefix_cache import PrefixCache
from mlx_speculation.caches.prefix.restore_points import Left, Point

__all__ = ["Left", "Point", "PrefixCache"]
