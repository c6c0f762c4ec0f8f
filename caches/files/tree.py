"""Lists of caches as trees of fields: reading, checking and building them.

A node is a `Leaf`, or a tuple of nodes for a `CacheList`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from mlx_speculation.caches.files.codecs import (
    KINDS,
    KNOWN_KINDS,
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


def read(cache: Any) -> Node:
    """Return the checked fields of a live cache whose leaves are of known kinds."""
    if type(cache) is CacheList:
        return tuple(read(member) for member in cache.caches)
    check_at_rest(cache)
    return checked(read_leaf(cache))


def need_known(name: Any, place: str) -> None:
    """Refuse a class name that is not in `KINDS`."""
    need(
        isinstance(name, str) and name in KINDS,
        f"cache {place} is of the class {shown(name)}; known are "
        f"{', '.join(KNOWN_KINDS)}",
    )


def check(nodes: Sequence[Node], what: str = "cache ") -> tuple[Node, ...]:
    """Check every leaf, and that batch sizes agree; return them without unused rows."""
    result = tuple(_check(node, f"{what}{i}") for i, node in enumerate(nodes))
    sizes = {size for leaf in leaves(result) if (size := batch(leaf)) is not None}
    need(len(sizes) < 2, f"its caches are for batches of {sorted(sizes)}")
    return result


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
    """Return new caches with the fields of checked nodes."""
    return [
        CacheList(*build_all(node)) if isinstance(node, tuple) else build(node)
        for node in nodes
    ]


def batch(leaf: Leaf) -> int | None:
    """Return the batch size of a leaf; None: it is empty, so its size is unknown."""
    for array in leaf.arrays.values():
        return int(array.shape[0])
    return None


def positions(leaf: Leaf) -> list[int] | None:
    """Return how many tokens each row holds; None: the leaf does not count them.

    An empty leaf is None too, since the model may not use it.
    """
    if "offset" in leaf.arrays:
        if "keys" not in leaf.arrays:
            return None
        result: Any = leaf.arrays["offset"].tolist()
        return [int(offset) for offset in result]
    if leaf.numbers.get("offset", 0) == 0:
        return None
    return [leaf.numbers["offset"]] * (batch(leaf) or 1)


def check_tokens(nodes: Sequence[Node], counts: list[int], whose: str) -> None:
    """Require that every leaf holds `counts[row]` tokens in each row."""
    for leaf in leaves(nodes):
        stored, size = positions(leaf), batch(leaf)
        need(
            size in (None, len(counts)),
            f"the {whose} caches are for a batch of {size} and the tokens for one of "
            f"{len(counts)}",
        )
        if stored is None or stored == counts:
            continue
        need(
            len(stored) == len(counts), f"the {whose} has {len(stored)} rows in a batch"
        )
        row = next(i for i, count in enumerate(counts) if stored[i] != count)
        raise FlawError(
            f"a {leaf.name} of the {whose} holds {stored[row]} tokens in row {row} and "
            f"{counts[row]} are given"
        )
