"""Caches: a journal per kind, the transaction over all, snapshots, files.

It knows mlx-lm's caches. It does not know models, tokens, samplers or text.
"""

from mlx_speculation.caches.files.load import LoadedCaches, load_caches, load_into
from mlx_speculation.caches.files.save import save_caches
from mlx_speculation.caches.journal import Journal
from mlx_speculation.caches.journals.arrays import RecordedCall, RecordingArraysCache
from mlx_speculation.caches.journals.deepseek_v41 import RecordingLayerCache
from mlx_speculation.caches.kv_quantization import KVQuantization
from mlx_speculation.caches.nbytes import array_bytes, arrays_in, bytes_beside
from mlx_speculation.caches.prefix.prefix_cache import PrefixCache
from mlx_speculation.caches.prefix.restore_points import RunningPoints
from mlx_speculation.caches.registry import check_supported
from mlx_speculation.caches.snapshots.read_rows import check_readable, read_rows
from mlx_speculation.caches.snapshots.snapshot import (
    Snapshot,
    held_bytes,
    merge,
    split,
)
from mlx_speculation.caches.snapshots.take import restore, snapshot
from mlx_speculation.caches.speculation import Speculation
from mlx_speculation.caches.types.convert import (
    as_native,
    columns_shown,
    drop_last,
    extend_all,
    has_states,
    meets_plans,
    merged,
    others_are_longer,
    with_slack,
)
from mlx_speculation.caches.types.leaves import (
    check_single,
    leaves,
    position,
    positions,
    states,
)
from mlx_speculation.caches.types.padded_kv import asks_cudnn, whole_steps, with_room
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

__all__ = [
    "Journal",
    "KVQuantization",
    "LoadedCaches",
    "PrefixCache",
    "RaggedKVCache",
    "RecordedCall",
    "RecordingArraysCache",
    "RecordingLayerCache",
    "RunningPoints",
    "SlidingKVCache",
    "Snapshot",
    "Speculation",
    "array_bytes",
    "arrays_in",
    "as_native",
    "asks_cudnn",
    "bytes_beside",
    "check_readable",
    "check_single",
    "check_supported",
    "columns_shown",
    "drop_last",
    "extend_all",
    "has_states",
    "held_bytes",
    "leaves",
    "load_caches",
    "load_into",
    "meets_plans",
    "merge",
    "merged",
    "others_are_longer",
    "position",
    "positions",
    "read_rows",
    "restore",
    "save_caches",
    "snapshot",
    "split",
    "states",
    "whole_steps",
    "with_room",
    "with_slack",
]
