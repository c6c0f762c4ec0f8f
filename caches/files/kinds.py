"""The kinds of caches that a file can hold, with their fields and checks.

A class name in a file is looked up only in the table `KINDS`. Subclasses are refused,
since they can have more fields than their parents. A `SlidingKVCache` is saved as a
`RotatingKVCache` (a ring); `with_slack` converts loaded rings back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as native
from mlx_lm.models.cache import CacheList
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files import field_checks
from mlx_speculation.caches.files.safetensors_reader import FlawError, need, shown
from mlx_speculation.caches.types.leaves import flat
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of cache."""

    cls: type
    numbers: tuple[str, ...]  # the fields that are integers or booleans
    arrays: tuple[str, ...]  # the fields that are arrays, sequences of arrays or None
    # Returns the number of rows in use, or None if the fields do not fit each other.
    used: Callable[[Any], int | None]
    settings: tuple[str, ...] = ()  # those of `numbers` that never change
    # Numbers that `state` lacks in mlx-lm 0.32. There, `state` has the arrays and then
    # the other numbers; in 0.31, `state` has only arrays.
    unsaved: tuple[str, ...] = ()
    # Fields that are None except between `prepare` and `finalize`.
    pending: tuple[str, ...] = ()

    @property
    def layout(self) -> tuple[str, ...]:
        """The fields in the order of `state` in mlx-lm 0.32."""
        numbers = (name for name in self.numbers if name not in self.unsaved)
        return (*self.arrays, *numbers)


_KV = ("keys", "values")
_BATCH = (*_KV, "offset", "left_padding")

KINDS = {
    kind.cls.__name__: kind
    for kind in (
        Kind(native.KVCache, ("offset",), _KV, field_checks.kv),
        Kind(
            native.ConcatenateKVCache,
            ("offset",),
            _KV,
            field_checks.concatenate,
            unsaved=("offset",),
        ),
        Kind(
            native.QuantizedKVCache,
            ("offset", "group_size", "bits"),
            _KV,
            field_checks.quantized,
            settings=("group_size", "bits"),
        ),
        Kind(
            native.ChunkedKVCache,
            ("offset", "chunk_size", "start_position"),
            _KV,
            field_checks.chunked,
            settings=("chunk_size",),
        ),
        Kind(
            native.RotatingKVCache,
            ("offset", "keep", "max_size", "_idx"),
            _KV,
            field_checks.ring,
            settings=("keep", "max_size"),
        ),
        Kind(
            native.ArraysCache,
            (),
            ("cache", "left_padding", "lengths"),
            field_checks.arrays,
        ),
        Kind(
            native.BatchKVCache,
            ("_idx",),
            _BATCH,
            field_checks.batch_kv,
            pending=("_right_padding",),
        ),
        Kind(
            native.BatchRotatingKVCache,
            ("max_size", "_offset", "_idx", "rotated"),
            _BATCH,
            field_checks.batch_ring,
            settings=("max_size",),
            pending=("_lengths",),
        ),
        Kind(
            LayerCache,
            ("offset", "window_size"),
            field_checks.LAYER,
            field_checks.layer,
            settings=("window_size",),
            unsaved=("window_size",),
        ),
    )
}
KNOWN_KINDS = (*KINDS, CacheList.__name__)


def kind_of(cache: Any) -> Kind:
    """Return the kind of a cache of a known class."""
    return KINDS[type(cache).__name__]


def is_known(cache: Any) -> bool:
    """Return whether a leaf (any cache but a `CacheList`) can be saved.

    A subclass of a known class cannot.
    """
    kind = KINDS.get(type(cache).__name__)
    known = kind is not None and type(cache) is kind.cls
    return known or type(cache) is SlidingKVCache


def built(name: str, fields: dict[str, Any]) -> Any:
    """Return a new cache of a known class with these fields, unchecked."""
    kind = KINDS[name]
    cache: Any = object.__new__(kind.cls)
    vars(cache).update(dict.fromkeys(kind.pending) | fields)
    return cache


def copies(caches: Sequence[Any]) -> list[Any]:
    """Return new objects for `caches`; each `SlidingKVCache` becomes a ring."""
    return [
        CacheList(*copies(cache.caches))
        if type(cache) is CacheList
        else as_saved(cache)
        for cache in caches
    ]


def as_saved(cache: Any) -> Any:
    """Return a new object for a leaf; a `SlidingKVCache` becomes a ring."""
    if type(cache) is SlidingKVCache:
        return cache.to_native()
    return built(type(cache).__name__, vars(cache))


def check(caches: Sequence[Any], what: str = "cache ") -> None:
    """Check every leaf and the batch sizes, which must agree; cut off unused rows."""
    for i, cache in enumerate(caches):
        _check(cache, f"{what}{i}")
    sizes = {size for leaf in flat(caches) if (size := batch(leaf)) is not None}
    need(len(sizes) < 2, f"the caches have different batch sizes: {sorted(sizes)}")


def _check(cache: Any, place: str) -> None:
    if isinstance(cache, CacheList):
        need(bool(cache.caches), f"{place} is a CacheList without members")
        for i, member in enumerate(cache.caches):
            _check(member, f"{place}.{i}")
        return
    try:
        check_leaf(cache)
    except FlawError as error:
        raise FlawError(f"{place}, a {type(cache).__name__}: {error}") from error


def check_leaf(cache: Any) -> None:
    """Check a leaf of a known kind, and cut off its unused rows."""
    kind = kind_of(cache)
    for name in kind.pending:
        pending = getattr(cache, name)
        need(pending is None, f"it still needs a call of finalize(): {name} is set")
    sound = all(_is_count(name, getattr(cache, name)) for name in kind.numbers)
    used = kind.used(cache) if sound else None
    if used is None:
        raise FlawError(f"its fields do not fit each other: {_said(cache)}")
    if "keys" in kind.arrays:
        cache.keys, cache.values = (
            tree_map(lambda x: x[..., :used, :], _as_in_mlx_lm(rows)) if used else None
            for rows in (cache.keys, cache.values)
        )


def _as_in_mlx_lm(rows: Any) -> Any:
    # Quantized rows of a file are a list.
    return tuple(rows) if isinstance(rows, list) else rows


def _is_count(name: str, value: Any) -> bool:
    kind = bool if name == "rotated" else int
    return type(value) is kind and 0 <= value <= field_checks.MAX_COUNT


def _said(cache: Any) -> str:
    fields: Any = tree_flatten(vars(cache))
    texts = (
        f"{name} {value.shape} {value.dtype}"
        if isinstance(value, mx.array)
        else f"{name} {shown(value)}"
        for name, value in fields
    )
    return ", ".join(texts)[:400]


def arrays_of(cache: Any) -> dict[str, mx.array]:
    """Return the arrays of a leaf; those of a sequence have names such as `cache.0`."""
    fields = {name: getattr(cache, name) for name in kind_of(cache).arrays}
    named: Any = tree_flatten(fields)
    return {name: array for name, array in named if array is not None}


def batch(leaf: Any) -> int | None:
    """Return the batch size of a leaf; None: it is empty, so its size is unknown."""
    return next((int(array.shape[0]) for array in arrays_of(leaf).values()), None)


def positions(leaf: Any) -> list[int] | None:
    """Return how many tokens each request has; None: not known, or an empty leaf."""
    offset: Any = getattr(leaf, "offset", 0)
    if isinstance(offset, mx.array):
        each: Any = offset.tolist()
        return None if leaf.keys is None else list(each)
    # Offset 0 means "not known": it stays 0 in a leaf that the model does not use.
    return [offset] * (batch(leaf) or 1) if offset else None


def check_tokens(caches: Sequence[Any], counts: list[int], whose: str) -> None:
    """Require that every leaf holds `counts[row]` tokens of each row of the batch."""
    for leaf in flat(caches):
        stored, size = positions(leaf), batch(leaf)
        need(
            size in (None, len(counts)),
            f"the {whose} caches are for a batch of {size}, but the tokens are for a "
            f"batch of {len(counts)}",
        )
        if stored is None or stored == counts:
            continue
        need(
            len(stored) == len(counts),
            f"the {whose} caches hold {len(stored)} requests, but the tokens are of "
            f"{len(counts)} requests",
        )
        row = next(i for i, count in enumerate(counts) if stored[i] != count)
        raise FlawError(
            f"a {type(leaf).__name__} of the {whose} holds {stored[row]} tokens in row "
            f"{row} of the batch, but that row has {counts[row]} tokens"
        )
