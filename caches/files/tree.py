"""Lists of caches as fields: live, described in JSON, and built again.

A node is a `Leaf`, or a tuple of nodes for a `CacheList`. Its description is what the
header of a file says of it, and its arrays are tensors named by group and place:

    {"class": "KVCache", "offset": 5}           target.0.keys, target.0.values
    {"class": "CacheList", "members": [...]}    target.1.0.cache.0, target.1.1.keys
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_speculation.caches.files.codecs import (
    KINDS,
    KNOWN_KINDS,
    MAX_DEPTH,
    MEMBERS,
    build,
    check_at_rest,
    checked,
    read_leaf,
)
from mlx_speculation.caches.files.fields import Leaf, need
from mlx_speculation.caches.files.safetensors_reader import FlawError, shown

Node = Leaf | tuple["Node", ...]
Rows = tuple[tuple[int, ...], ...]
Fields = dict[str, dict[str, mx.array]]

_NAME = re.compile(r"([a-z]+(?:\.[0-9]{1,6})+)\.([a-z_]+(?:\.[0-9]{1,4})?)")


def read(cache: Any) -> Node:
    """Return the checked fields of a live cache whose leaves are of known kinds."""
    if type(cache) is CacheList:
        return tuple(read(member) for member in cache.caches)
    check_at_rest(cache)
    return checked(read_leaf(cache))


def describe(node: Node, place: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """Return the description of a node, and add its arrays to `arrays`."""
    if isinstance(node, tuple):
        members = [describe(m, f"{place}.{i}", arrays) for i, m in enumerate(node)]
        return {"class": MEMBERS, "members": members}
    arrays |= {f"{place}.{name}": array for name, array in node.arrays.items()}
    return {"class": node.name, **node.numbers}


def by_place(arrays: dict[str, mx.array]) -> Fields:
    """Return the arrays of a file by the place of their cache and by their field."""
    found: Fields = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise FlawError(f"it has the tensor {shown(name)}, which belongs nowhere")
        found.setdefault(match[1], {})[match[2]] = array
    return found


def undescribe(description: Any, place: str, fields: Fields, depth: int = 0) -> Node:
    """Return the unchecked node of a description, taking its arrays out of `fields`."""
    need(isinstance(description, dict), f"cache {place} is {shown(description)}")
    numbers = {**description}
    name = numbers.pop("class", None)
    if name == MEMBERS:
        need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")
        members = numbers.pop("members", None)
        need(isinstance(members, list) and not numbers, f"cache {place} is no list")
        return tuple(
            undescribe(member, f"{place}.{i}", fields, depth + 1)
            for i, member in enumerate(members)
        )
    need_known(name, place)
    return Leaf(name, numbers, fields.pop(place, {}))


def need_known(name: Any, place: str) -> None:
    """Refuse a class name that is not in the table."""
    need(
        isinstance(name, str) and name in KINDS,
        f"cache {place} is of the class {shown(name)}; known are "
        f"{', '.join(KNOWN_KINDS)}",
    )


def check(nodes: Sequence[Node], what: str = "cache ") -> tuple[Node, ...]:
    """Check every leaf and that all are for one batch; return them cut."""
    found = tuple(_check(node, f"{what}{i}") for i, node in enumerate(nodes))
    sizes = {size for leaf in leaves(found) if (size := batch(leaf)) is not None}
    need(len(sizes) < 2, f"its caches are for batches of {sorted(sizes)}")
    return found


def _check(node: Node, place: str) -> Node:
    if isinstance(node, tuple):
        need(bool(node), f"{place} is a {MEMBERS} without members")
        return tuple(_check(member, f"{place}.{i}") for i, member in enumerate(node))
    try:
        return checked(node)
    except FlawError as error:
        raise FlawError(f"{place}, a {node.name}: {error}") from error


def leaves(nodes: Sequence[Node]) -> Iterator[Leaf]:
    """Yield every leaf."""
    for node in nodes:
        if isinstance(node, tuple):
            yield from leaves(node)
        else:
            yield node


def build_all(nodes: Sequence[Node]) -> list[Any]:
    """Return new caches of checked nodes."""
    return [
        CacheList(*build_all(node)) if isinstance(node, tuple) else build(node)
        for node in nodes
    ]


def batch(leaf: Leaf) -> int | None:
    """Return for how many rows the leaf is; None when it is empty and cannot say."""
    for array in leaf.arrays.values():
        return int(array.shape[0])
    return None


def positions(leaf: Leaf) -> list[int] | None:
    """Return how many tokens each row holds; None when the leaf cannot say.

    A leaf that the model does not use is empty, and cannot say either.
    """
    if "offset" in leaf.arrays:
        if "keys" not in leaf.arrays:
            return None
        found: Any = leaf.arrays["offset"].tolist()
        return [int(offset) for offset in found]
    if leaf.numbers.get("offset", 0) == 0:
        return None
    return [leaf.numbers["offset"]] * (batch(leaf) or 1)


def check_tokens(nodes: Sequence[Node], counts: list[int], whose: str) -> None:
    """Require that every leaf holds as many tokens as there are, in every row."""
    for leaf in leaves(nodes):
        held, size = positions(leaf), batch(leaf)
        need(
            size in (None, len(counts)),
            f"the {whose} caches are for a batch of {size} and the tokens for one of "
            f"{len(counts)}",
        )
        if held is None or held == counts:
            continue
        need(len(held) == len(counts), f"the {whose} has {len(held)} rows in a batch")
        row = next(i for i, count in enumerate(counts) if held[i] != count)
        raise FlawError(
            f"a {leaf.name} of the {whose} holds {held[row]} tokens in row {row} and "
            f"{counts[row]} are given"
        )
