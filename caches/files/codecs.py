"""Codecs: conversion of each kind of cache to fields and back.

A class name in a file is looked up only in the table `KINDS`. Other kinds are refused,
and so are subclasses, since they may have more fields than their parents. A
`SlidingKVCache` is saved as a ring, and a ring can be loaded into a `SlidingKVCache`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as native
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files import field_checks
from mlx_speculation.caches.files.fields import Leaf, check_numbers, need
from mlx_speculation.caches.files.safetensors_reader import shown
from mlx_speculation.caches.types.shared_rows import native_type
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

MAX_DEPTH = 8
MEMBERS = "CacheList"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of cache."""

    cls: type
    numbers: tuple[str, ...]  # its fields that are integers or booleans
    arrays: tuple[str, ...]  # its fields that are arrays, sequences of arrays or None
    # Refuses fields that do not fit each other; cuts unused rows off.
    check: Callable[[Leaf], Leaf]
    settings: tuple[str, ...] = ()  # numbers that never change in a cache
    # Numbers that mlx-lm 0.32's `state` lacks. It has the other numbers after the
    # arrays; the `state` of 0.31 has only arrays.
    unsaved: tuple[str, ...] = ()
    # Fields that are None except between `prepare` and `finalize`.
    pending: tuple[str, ...] = ()
    # The most items of each array field that is a sequence.
    sequences: dict[str, int] = field(default_factory=dict)

    @property
    def layout(self) -> tuple[str, ...]:
        """Its fields in the order of mlx-lm 0.32's `state`."""
        numbers = (name for name in self.numbers if name not in self.unsaved)
        return (*self.arrays, *numbers)


_KV = ("keys", "values")
_BATCH = (*_KV, "offset", "left_padding")
_LAYER = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

KINDS = {
    kind.cls.__name__: kind
    for kind in (
        Kind(native.KVCache, ("offset",), _KV, field_checks.check_kv),
        Kind(
            native.ConcatenateKVCache,
            ("offset",),
            _KV,
            field_checks.check_concatenate,
            unsaved=("offset",),
        ),
        Kind(
            native.QuantizedKVCache,
            ("offset", "group_size", "bits"),
            _KV,
            field_checks.check_quantized,
            settings=("group_size", "bits"),
            sequences={"keys": 3, "values": 3},
        ),
        Kind(
            native.ChunkedKVCache,
            ("offset", "chunk_size", "start_position"),
            _KV,
            field_checks.check_chunked,
            settings=("chunk_size",),
        ),
        Kind(
            native.RotatingKVCache,
            ("offset", "keep", "max_size", "_idx"),
            _KV,
            field_checks.check_ring,
            settings=("keep", "max_size"),
        ),
        Kind(
            native.ArraysCache,
            ("slots",),
            ("cache", "left_padding", "lengths"),
            field_checks.check_arrays,
            settings=("slots",),
            unsaved=("slots",),
            sequences={"cache": field_checks.MAX_SLOTS},
        ),
        Kind(
            native.BatchKVCache,
            ("_idx",),
            _BATCH,
            field_checks.check_batch_kv,
            pending=("_right_padding",),
        ),
        Kind(
            native.BatchRotatingKVCache,
            ("max_size", "_offset", "_idx", "rotated"),
            _BATCH,
            field_checks.check_batch_ring,
            settings=("max_size",),
            pending=("_lengths",),
        ),
        Kind(
            LayerCache,
            ("offset", "window_size"),
            _LAYER,
            field_checks.check_layer,
            settings=("window_size",),
            unsaved=("window_size",),
        ),
    )
}


KNOWN_KINDS = (*KINDS, MEMBERS)


def is_known(cache: Any) -> bool:
    """Return whether the class of a live leaf is one of the kinds, not a subclass."""
    kind = KINDS.get(type(cache).__name__)
    return type(cache) is SlidingKVCache or (
        kind is not None and native_type(cache) is kind.cls
    )


def read_leaf(cache: Any) -> Leaf:
    """Return the fields of a live cache of a known kind, unchecked.

    For a `SlidingKVCache`, these are the fields of the ring with the same rows.
    """
    if type(cache) is SlidingKVCache:
        cache = cache.to_native()
    name = type(cache).__name__
    kind, fields = KINDS[name], vars(cache)
    numbers = {key: fields[key] for key in kind.numbers if key != "slots"}
    if "slots" in kind.numbers:
        numbers["slots"] = len(fields["cache"])
    arrays = {}
    for key in kind.arrays:
        for part, value in _parts(key, fields[key]):
            need(isinstance(value, mx.array), f"{part} is a {type(value).__name__}")
            arrays[part] = value
    return Leaf(name, numbers, arrays)


def check_at_rest(cache: Any) -> None:
    """Refuse a live cache that is between `prepare` and `finalize`."""
    kind = KINDS.get(type(cache).__name__)
    for pending in () if kind is None else kind.pending:
        need(
            vars(cache).get(pending) is None,
            f"it is between prepare and finalize: {pending} is set",
        )


def _parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        named = [(f"{key}.{i}", item) for i, item in enumerate(value)]
    else:
        named = [(key, value)]
    yield from ((part, item) for part, item in named if item is not None)


def checked(leaf: Leaf) -> Leaf:
    """Check a leaf of a known kind; return it without unused rows."""
    kind = KINDS[leaf.name]
    check_numbers(leaf, kind.numbers)
    for name in leaf.arrays:
        need(_has_array(kind, name), f"a {leaf.name} has no array {shown(name)}")
    return kind.check(leaf)


def _has_array(kind: Kind, name: str) -> bool:
    key, dot, index = name.partition(".")
    limit = kind.sequences.get(key)
    if limit is None or not dot:
        return name in kind.arrays and limit is None
    return index.isdecimal() and index == str(int(index)) and int(index) < limit


def attributes(leaf: Leaf) -> dict[str, Any]:
    """Return the attributes of a cache with these checked fields."""
    kind = KINDS[leaf.name]
    fields: dict[str, Any] = {k: leaf.arrays.get(k) for k in kind.arrays}
    fields |= {k: v for k, v in leaf.numbers.items() if k != "slots"}
    fields |= dict.fromkeys(kind.pending)
    if leaf.name == "ArraysCache":
        slots = leaf.numbers["slots"]
        fields["cache"] = [leaf.arrays.get(f"cache.{i}") for i in range(slots)]
    elif leaf.name == "QuantizedKVCache" and leaf.arrays:
        for key in _KV:
            fields[key] = tuple(leaf.arrays[f"{key}.{i}"] for i in range(3))
    return fields


def build(leaf: Leaf) -> Any:
    """Return a new cache with these checked fields."""
    cache: Any = object.__new__(KINDS[leaf.name].cls)
    vars(cache).update(attributes(leaf))
    return cache


def attributes_for(live: Any, leaf: Leaf) -> dict[str, Any]:
    """Return the new attributes of a live cache, whose kind fits the leaf."""
    if type(live) is SlidingKVCache:
        return {**vars(SlidingKVCache.from_native(build(leaf), live.slack))}
    return attributes(leaf)
