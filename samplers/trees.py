"""Drafts that are trees: how they are verified, and which path is accepted.

Node 0 is the root, the last committed token; every other node is a drafted token that
continues its parent. One forward verifies all nodes, and the target chooses a token
after each, with the noise of that position (keyed choice) or without any (greedy). The
walk starts at the root and descends while the target's own choice is a child. What is
emitted is always the target's own choice, so a tree changes the text as little as a
chain: however its nodes were picked, the same noise included.

A chain is the tree with the parents -1, 0, 1, ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_speculation.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """What a forward over the nodes of a tree needs, from `tree_layout`.

    With the tokens a, b, c below a root r, b and c both continuing a, the parents are
    -1, 0, 1, 1, the depths 0, 1, 2, 2, and row c of the mask shows r, a and c.

    Attributes:
        parents: int32 [nodes], -1 for the root.
        positions: int32 [nodes], of the nodes' own tokens; siblings share theirs. The
            target's choice after a node stands at the next position.
        mask: bool [nodes, nodes], whether row i sees column j: i and what leads to it.
        depth: how many tokens below the root the deepest node is.
    """

    parents: mx.array
    positions: mx.array
    mask: mx.array
    depth: int

    @property
    def depths(self) -> mx.array:
        """How many tokens below the root each node is, int32 [nodes]."""
        return self.positions - self.positions[0]

    def attention_mask(self, cached: int) -> mx.array:
        """Return the mask beside `cached` columns that every node sees.

        Returns:
            bool [nodes, cached + nodes].
        """
        seen = mx.ones((self.mask.shape[0], cached), dtype=mx.bool_)
        return mx.concatenate([seen, self.mask], axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class TreeVerdict:
    """Which path of a tree is accepted.

    Attributes:
        accepted: how many drafted tokens are accepted, int32 [...].
        path: the nodes of the path, int32 [..., depth + 1]: the root, the accepted
            nodes, and the last of them again up to the end.
        emitted: the target's choice after each node of the path, [..., depth + 1]:
            the first accepted + 1 are the accepted tokens and the correction or bonus.
    """

    accepted: mx.array
    path: mx.array
    emitted: mx.array


def tree_layout(
    parents: Sequence[int],
    root_position: int,
    *,
    tokens: Sequence[int] | None = None,
) -> TreeLayout:
    """Lay out a tree for one forward.

    Args:
        parents: the parent of each node; -1 for node 0, the root, and a lower index
            than the node's own for all others.
        root_position: the position of the root's token in the whole sequence.
        tokens: the token of each node, the root's included, to check that no two
            siblings are the same. Leave it out where the tokens are still on the
            device; of equal siblings `descend` follows the first.

    Raises:
        InvalidRequestError: this is not one tree in this order, or has equal siblings.
    """
    _check_parents(parents)
    if root_position < 0:
        raise InvalidRequestError(
            f"root_position is {root_position}. Positions count all tokens from 0."
        )
    if tokens is not None:
        _check_siblings(parents, tokens)
    sees = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents[1:], start=1):
        sees[node] |= sees[parent]
    depths = sees.sum(axis=-1) - 1
    return TreeLayout(
        parents=mx.array(list(parents), dtype=mx.int32),
        positions=mx.array(root_position + depths, dtype=mx.int32),
        mask=mx.array(sees),
        depth=int(depths.max()),
    )


def descend(layout: TreeLayout, tokens: mx.array, choices: mx.array) -> TreeVerdict:
    """Walk from the root while the target's own choice is a child.

    Nothing is read on the host; batch axes share one layout.

    Args:
        layout: of n nodes, from `tree_layout`.
        tokens: integer [..., nodes], the root's own included and not looked at.
        choices: integer [..., nodes], the target's choice after each node.

    Raises:
        InvalidRequestError: `tokens` or `choices` are not one per node.
    """
    nodes = layout.mask.shape[0]
    for name, array in (("tokens", tokens), ("choices", choices)):
        if array.ndim == 0 or array.shape[-1] != nodes:
            raise InvalidRequestError(
                f"{name} has the shape {array.shape}, and the tree has {nodes} nodes. "
                "Give one per node, the root's included, on the last axis."
            )
    tokens, choices = mx.broadcast_arrays(tokens, choices)
    agrees = _agreeing(layout, tokens, choices)
    # A node is on the path when it and all that leads to it agree.
    on_path = (agrees[..., None, :] | ~layout.mask).all(axis=-1)  # [..., nodes]
    accepted = on_path.sum(axis=-1).astype(mx.int32) - 1
    wanted = mx.minimum(mx.arange(layout.depth + 1), accepted[..., None])
    here = on_path[..., None, :] & (layout.depths == wanted[..., None])
    path = mx.argmax(here, axis=-1).astype(mx.int32)  # [..., depth + 1]
    return TreeVerdict(accepted, path, mx.take_along_axis(choices, path, axis=-1))


def _agreeing(layout: TreeLayout, tokens: mx.array, choices: mx.array) -> mx.array:
    """Tell which nodes are the target's choice after their parent; the root is.

    Of equal siblings only the first, so that at most one path agrees.
    """
    nodes = mx.arange(layout.mask.shape[0])
    parents = mx.maximum(layout.parents, 0)
    index = mx.broadcast_to(parents, choices.shape)
    agrees = tokens == mx.take_along_axis(choices, index, axis=-1)
    siblings = layout.parents[:, None] == layout.parents
    earlier = siblings & (nodes < nodes[:, None])  # [nodes, nodes]
    repeated = (earlier & (tokens[..., None, :] == tokens[..., None])).any(axis=-1)
    return (agrees & ~repeated) | (nodes == 0)


def _check_parents(parents: Sequence[int]) -> None:
    if not parents:
        raise InvalidRequestError(
            "The tree has no nodes. Node 0 is the root, the last committed token."
        )
    if parents[0] != -1:
        raise InvalidRequestError(
            f"The parent of node 0 is {parents[0]}, and -1 is needed: node 0 is the "
            "root."
        )
    for node, parent in enumerate(parents[1:], start=1):
        if parent == -1:
            raise InvalidRequestError(
                f"The nodes 0 and {node} both have the parent -1, and a tree has one "
                "root. Let the first tokens continue node 0."
            )
        if not 0 <= parent < node:
            raise InvalidRequestError(
                f"The parent of node {node} is {parent}. Order the nodes so that it "
                f"is from 0 to {node - 1}."
            )


def _check_siblings(parents: Sequence[int], tokens: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise InvalidRequestError(
            f"There are {len(tokens)} tokens and {len(parents)} parents. Give one "
            "token per node, the root's included."
        )
    first: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        other = first.setdefault(edge, node)
        if other != node:
            raise InvalidRequestError(
                f"The nodes {other} and {node} both continue node {edge[0]} with "
                f"token {edge[1]}. Draft each continuation once."
            )
