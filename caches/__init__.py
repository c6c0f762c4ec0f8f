"""Caches: roll back, snapshot and save the caches of a model.

    journal       the protocol of a journal, the undo log of one cache
    speculation   the transaction over all caches of a model
    registry      the supported cache classes, and the journal of each
    types         this project's cache classes, conversions, functions on leaf caches
    journals      one journal for each cache class
    snapshots     the contents of caches: take, restore, merge, split
    prefix        the prefix cache: snapshots of earlier requests, found by tokens
    files         prompt-cache files in mlx-lm's layout

The package knows mlx-lm's caches, but no models, samplers or text. Only `prefix` and
`files` know tokens.
"""

from mlx_speculation.caches.files import (
    LoadedCaches,
    load_caches,
    save_caches,
)
from mlx_speculation.caches.journal import Journal, Keep
from mlx_speculation.caches.journals.arrays import RecordingArraysCache
from mlx_speculation.caches.journals.deepseek_v41 import RecordingLayerCache
from mlx_speculation.caches.kv_quantization import KVQuantization
from mlx_speculation.caches.nbytes import array_bytes, arrays_in, bytes_beside
from mlx_speculation.caches.prefix import Left, Point, PrefixCache
from mlx_speculation.caches.registry import check_fixed, check_supported
from mlx_speculation.caches.snapshots.read_rows import check_readable, read_rows
from mlx_speculation.caches.snapshots.snapshot import (
    Snapshot,
    merge,
    split,
)
from mlx_speculation.caches.snapshots.take import restore, snapshot
from mlx_speculation.caches.speculation import Speculation
from mlx_speculation.caches.types import RaggedKVCache, SlidingKVCache
from mlx_speculation.caches.types.convert import (
    as_native,
    columns_shown,
    extend_all,
    has_states,
    meets_plans,
    merged,
    others_are_longer,
    with_slack,
)
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.caches.types.leaves import (
    check_single,
    leaves,
    position,
    states,
)
from mlx_speculation.caches.types.padded_kv import asks_cudnn, whole_steps, with_room
from mlx_speculation.caches.types.tree_view import (
    TreeRows,
    check_trees,
    holds_trees,
    tree_views,
)

__all__ = [
    "FixedShape",
    "Journal",
    "KVQuantization",
    "Keep",
    "Left",
    "LoadedCaches",
    "Point",
    "PrefixCache",
    "RaggedKVCache",
    "RecordingArraysCache",
    "RecordingLayerCache",
    "SlidingKVCache",
    "Snapshot",
    "Speculation",
    "TreeRows",
    "array_bytes",
    "arrays_in",
    "as_native",
    "asks_cudnn",
    "bytes_beside",
    "check_fixed",
    "check_readable",
    "check_single",
    "check_supported",
    "check_trees",
    "columns_shown",
    "extend_all",
    "has_states",
    "holds_trees",
    "leaves",
    "load_caches",
    "meets_plans",
    "merge",
    "merged",
    "others_are_longer",
    "position",
    "read_rows",
    "restore",
    "save_caches",
    "snapshot",
    "split",
    "states",
    "tree_views",
    "whole_steps",
    "with_room",
    "with_slack",
]
