"""Checks whether the caches of a file fit the live caches of a model."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files.field_checks import INTEGERS
from mlx_speculation.caches.files.kinds import arrays_of, as_saved, kind_of
from mlx_speculation.caches.files.safetensors_reader import FlawError, need


def check_like(
    saved: Sequence[Any] | None,
    like: Sequence[Any] | None,
    whose: str,
    *,
    cast: bool = False,
) -> None:
    """Raise `FlawError` if caches of a file do not fit the live caches.

    `whose` names the owner of the caches, "target" or "drafter". If `saved` is None,
    the file has no caches of that owner. If `like` is None, nothing is checked. With
    `cast`, floating point arrays of the file are converted to the dtypes of `like`.
    """
    if like is None:
        return
    if saved is None:
        raise FlawError(f"it holds no caches of the {whose}")
    for i, (leaf, live) in enumerate(_pairs(saved, like)):
        try:
            _check_fits(leaf, live, cast=cast)
        except FlawError as error:
            raise FlawError(f"leaf {i} of the {whose} does not fit: {error}") from error


def _pairs(saved: Sequence[Any], caches: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each cache, or each member of a `CacheList`, with its live counterpart."""
    need(
        len(saved) == len(caches),
        f"it holds {len(saved)} caches in a list, but the live list has {len(caches)}",
    )
    for cache, live in zip(saved, caches, strict=True):
        listed = type(live) is CacheList
        need(
            isinstance(cache, CacheList) == listed,
            "one side has a CacheList where the other has a single cache",
        )
        if listed:
            yield from _pairs(cache.caches, live.caches)
        else:
            yield cache, live


def _check_fits(leaf: Any, live: Any, *, cast: bool) -> None:
    """Raise `FlawError` if a leaf's kind, settings, dtypes or shapes do not fit."""
    present = as_saved(live)
    there, here = type(leaf).__name__, type(present).__name__
    need(there == here, f"the file has a {there}, and the live cache is a {here}")
    ours, theirs = _settings(present), _settings(leaf)
    for name, value in ours.items():
        need(
            theirs[name] == value,
            f"{name} is {theirs[name]} in the file and {value} in the live cache",
        )
    if cast:
        _cast(leaf, present)
    present_arrays = arrays_of(present)
    for name, array in arrays_of(leaf).items():
        # An empty live cache has no arrays to compare.
        other = present_arrays.get(name, array)
        need(
            other.dtype == array.dtype and _alike(leaf, other, array),
            f"{name} is {array.shape} {array.dtype} in the file and {other.shape} "
            f"{other.dtype} in the live cache",
        )


def _settings(cache: Any) -> dict[str, int]:
    values = {name: getattr(cache, name) for name in kind_of(cache).settings}
    if isinstance(cache, ArraysCache):
        values["slots"] = len(cache.cache)
    return values


def _cast(leaf: Any, live: Any) -> None:
    def changed(there: Any, here: Any) -> Any:
        both = [isinstance(x, mx.array) for x in (there, here)]
        if all(both) and all(
            mx.issubdtype(x.dtype, mx.floating) for x in (there, here)
        ):
            return there.astype(here.dtype)
        return there

    for name in kind_of(leaf).arrays:
        there, here = getattr(leaf, name), getattr(live, name)
        if here is not None:
            setattr(leaf, name, tree_map(changed, there, here))


def _alike(leaf: Any, here: mx.array, there: mx.array) -> bool:
    """Return whether two arrays have the same shape, except for the number of rows."""
    if here.ndim != there.ndim:
        return False
    free: Sequence[int] = ()
    if isinstance(leaf, LayerCache):
        free = (1,)
    elif here.ndim == 4 and not isinstance(leaf, ArraysCache):
        free = (2,)
    elif isinstance(leaf, ArraysCache) and here.dtype in INTEGERS and here.ndim == 2:
        # Ids of the last tokens; there are fewer at the start of a text.
        free = (1,)
    axes = [axis for axis in range(here.ndim) if axis not in free]
    return all(here.shape[axis] == there.shape[axis] for axis in axes)
