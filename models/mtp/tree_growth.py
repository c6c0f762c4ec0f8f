"""Growing a draft tree by the head's probabilities, as EAGLE-2 does (arXiv 2406.16858).

At each level the head runs the likeliest nodes, and each of them gets its likeliest
children. The probability of a node is the product along its path. The tree consists of
the likeliest nodes of all levels. The tree is connected, since a node is never likelier
than its parent:

    level 1     a .6   b .3                  children of the root
    level 2     ac .5  ad .1   be .2  bf .1  children of a and b; ac and be are run
    level 3     ...                          children of ac and be
    4 nodes     a .6   ac .5   b .3   be .2

Nothing is read back to the host. The path of first choices (at each level the likeliest
child) comes first in the tree: if it is accepted, no rows move in the caches.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

BEAM = 8  # the largest number of nodes that are run at a level
CHILDREN = 4  # children of each node that is run
_LESS = 1e-4  # the least difference of log-probability between a parent and a child


class Level(NamedTuple):
    """The nodes of one level that the head is to run."""

    tokens: mx.array  # uint32 [1, nodes]
    # int32 [nodes], the index of each node's parent in the previous level (0 if this is
    # the first level)
    above: mx.array
    # bool [nodes, columns], whether a column is the node or an ancestor; there is a
    # column for each node run so far, these nodes included
    seen: mx.array


# Takes a count. Returns the likeliest children of each node that was run last: their
# ids, uint32, and log-probabilities, float32, both [nodes, count]
Children = Callable[[int], tuple[mx.array, mx.array]]


def grow(
    children: Children, run: Callable[[Level], None], nodes: int, levels: int
) -> tuple[mx.array, mx.array]:
    """Grow a tree of `nodes` nodes, at least 2, and at most `levels` levels.

    `children` is called for the root, and after each level that `run` has run. The
    result has the tokens, uint32 [nodes] (fewer if the levels have fewer candidates),
    and for each node the index of its parent, int32, smaller than the node's own; -1
    means the root.
    """
    beam = min(BEAM, nodes)
    tokens, values = (each[0] for each in children(nodes if levels == 1 else beam))
    values = mx.minimum(values, 0.0) - _LESS
    width = len(tokens)
    first = mx.arange(width) == 0  # whether nodes are on the path of first choices
    parents = mx.full(width, -1, mx.int32)
    every = [(tokens, values, parents, first)]
    place = mx.arange(width, dtype=mx.int32)  # the beam's places among all candidates
    above = mx.zeros(width, mx.int32)
    seen = mx.eye(width, dtype=mx.bool_)
    count = width
    for _ in range(1, levels):
        run(Level(tokens[None], above, seen))
        ids, likely = children(CHILDREN)
        likely = values[:, None] + mx.minimum(likely, 0.0) - _LESS
        here = first[:, None] & (mx.arange(ids.shape[1]) == 0)[None]
        from_beam = mx.broadcast_to(place[:, None], ids.shape)
        level = [each.flatten() for each in (ids, likely, from_beam, here)]
        every.append(tuple(level))  # type: ignore[arg-type]
        best = mx.argsort(-level[1])[:beam].astype(mx.int32)
        tokens, values, _, first = (each[best] for each in level)
        above, place = best // ids.shape[1], best + count
        seen = mx.concatenate([seen[above], mx.eye(len(best), dtype=mx.bool_)], axis=1)
        count += ids.size
    tokens, values, parents, first = (
        mx.concatenate([*each]) for each in zip(*every, strict=True)
    )
    # Ordered by level, but with the path of first choices in front.
    chosen = mx.sort(mx.argsort(-values)[:nodes].astype(mx.int32))
    key = mx.where(first[chosen], chosen - count, chosen)
    chosen = chosen[mx.argsort(key)]
    new = mx.full(count, -1, mx.int32)
    new[chosen] = mx.arange(len(chosen), dtype=mx.int32)
    above = parents[chosen]
    above = mx.where(above < 0, -1, new[mx.maximum(above, 0)])
    return tokens[chosen], above
