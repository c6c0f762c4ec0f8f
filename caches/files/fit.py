"""Checks whether the content of a cache file fits the live caches it is loaded into."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_speculation.caches.files.codecs import KINDS, read_leaf
from mlx_speculation.caches.files.extension import Content
from mlx_speculation.caches.files.fields import INTEGERS, Leaf, need
from mlx_speculation.caches.files.safetensors_reader import FlawError
from mlx_speculation.caches.files.tree import Node


def check_like(
    content: Content, like: Sequence[Any] | None, draft_like: Sequence[Any] | None
) -> None:
    """Refuse content that does not fit the live caches.

    Args:
        content: the content of a file.
        like: live caches of the target; None: do not check them.
        draft_like: live caches of the drafter; None: do not check them.

    Raises:
        FlawError: a leaf does not fit; the message names it.
    """
    for whose, nodes, caches in (
        ("target", content.target, like),
        ("drafter", content.drafter, draft_like),
    ):
        if caches is None:
            continue
        if nodes is None:
            raise FlawError(f"it holds no caches of the {whose}")
        for i, (leaf, live) in enumerate(pairs_of(nodes, caches)):
            try:
                check_fits(leaf, live)
            except FlawError as error:
                raise FlawError(
                    f"leaf {i} of the {whose} does not fit: {error}"
                ) from error


def cast_to(caches: Sequence[Any], nodes: Sequence[Node]) -> None:
    """Convert floating point arrays of a file to the dtypes of the live caches."""
    for leaf, live in pairs_of(nodes, caches):
        arrays = read_leaf(live).arrays
        for key, there in leaf.arrays.items():
            here = arrays.get(key, there)
            if all(mx.issubdtype(a.dtype, mx.floating) for a in (here, there)):
                leaf.arrays[key] = there.astype(here.dtype)


def pairs_of(
    nodes: Sequence[Node], caches: Sequence[Any]
) -> Iterator[tuple[Leaf, Any]]:
    """Yield every leaf of the file with the live cache at the same place."""
    need(
        len(nodes) == len(caches),
        f"it holds {len(nodes)} caches in a list where {len(caches)} are due",
    )
    for node, live in zip(nodes, caches, strict=True):
        listed = type(live) is CacheList
        need(
            isinstance(node, tuple) == listed,
            "a list of caches stands where a cache is due, or the other way round",
        )
        if isinstance(node, tuple):
            yield from pairs_of(node, live.caches)
        else:
            yield node, live


def check_fits(leaf: Leaf, live: Any) -> None:
    """Refuse a leaf whose kind, settings, dtypes or shapes differ from a live cache's.

    An empty live cache has settings, but no arrays: shapes and dtypes are not compared.
    """
    present = read_leaf(live)
    name = present.name
    need(leaf.name == name, f"the file has a {leaf.name} and the live cache is {name}")
    for key in KINDS[name].settings:
        ours, theirs = present.numbers[key], leaf.numbers[key]
        need(ours == theirs, f"{key} is {theirs} in the file and {ours} here")
    for key, there in leaf.arrays.items():
        here = present.arrays.get(key, there)
        need(
            here.dtype == there.dtype and _alike(name, here, there),
            f"{key} is {there.shape} {there.dtype} in the file and {here.shape} "
            f"{here.dtype} here",
        )


def _alike(name: str, here: mx.array, there: mx.array) -> bool:
    """Return whether two arrays have the same shape, except for the number of rows."""
    if here.ndim != there.ndim:
        return False
    free: Sequence[int] = ()
    if name == "LayerCache":
        free = (1,)
    elif here.ndim == 4 and name != "ArraysCache":
        free = (2,)
    elif name == "ArraysCache" and here.dtype in INTEGERS and here.ndim == 2:
        free = (1,)  # ids of the last tokens, fewer at the start of a text
    axes = [axis for axis in range(here.ndim) if axis not in free]
    return all(here.shape[axis] == there.shape[axis] for axis in axes)
