"""A compressed tree of token runs, with what each role's caches held for them.

    A [0, 40)   target: rows, state at 40     draft: rows     head: rows [0, 38)
    ├── B [40, 90)   target: rows             draft: rows     head: rows [38, 88)
    │   ├── C [90, 120)   ...                 requests parted at 90
    │   └── D [90, 97)    ...
    └── E [40, 64)   target: rows, state at 64

A node holds the rows of the tokens on the edge above it, and perhaps the states at its
end, of the target and of what drafts for it: the roles. Row m of a role with lag L
follows from the tokens [0, m + L], so of the edge [a, b) it holds rows [a - L, b - L).
The target's rows are in every node, and go last; those of another role may be missing,
and what it can use ends there.

A role of rows alone is resumed at any token. Where a layer has a state, it is resumed
at the end of a node that holds it: a restore point.

No two nodes share an array, so the tree's bytes are the sum of its nodes'. Its price:
an edge is copied once when it is stored, and once more when requests part inside it.
It knows nothing of locks and of how many bytes are allowed.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mlx_speculation.caches.prefix.restore_points import Point
from mlx_speculation.caches.snapshots.snapshot import Snapshot, merge, split

Tokens = Sequence[int]


class Role(NamedTuple):
    """The target, a draft model or a head. The target's index is 0."""

    owner: weakref.ref[Any]  # the model
    empty: Snapshot  # of new caches
    lag: int = 0  # how many tokens after its own position a row follows from

    @property
    def stateful(self) -> bool:
        """True where it is resumed at restore points only."""
        return any(leaf.whole for leaf in self.empty.leaves)

    def rows(self, stop: int) -> int:
        """Return how many rows follow from so many tokens."""
        return max(0, stop - self.lag)

    def part(self, held: Snapshot, start: int, stop: int) -> Snapshot:
        """Return the rows that belong to the tokens [start, stop)."""
        return split(split(held, self.rows(stop))[0], self.rows(start))[1]


class Node:
    """The end of a run of tokens.

    Attributes:
        tokens: the tokens of the edge above; empty at the root.
        parent: the node where the edge begins; None at the root.
        stop: how many tokens lead here.
        rows: by role, what the caches' rows held for the edge, without states.
        points: by role, the states after them, if this is a restore point of it.
        children: by the first token of their edges.
        used: when it was used last; larger is later.
        level: what it had cost until then to read again what was let go.
    """

    __slots__ = (
        *("children", "level", "parent", "points"),
        *("rows", "stop", "tokens", "used"),
    )

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens, self.parent = tuple(tokens), parent
        self.stop: int = len(tokens) + (0 if parent is None else parent.stop)
        self.rows: dict[int, Snapshot] = {}
        self.points: dict[int, Point] = {}
        self.children: dict[int, Node] = {}
        self.used, self.level = 0, 0.0

    @property
    def start(self) -> int:
        """The first token of the edge above."""
        return self.stop - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and states."""
        held: list[Snapshot | Point] = [*self.rows.values(), *self.points.values()]
        return sum(each.nbytes for each in held)

    def hang(self) -> None:
        """Take its place below its parent."""
        assert self.parent is not None
        self.parent.children[self.tokens[0]] = self


class PrefixTree:
    """The runs of a target; `roles` may grow."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = roles
        self._root = Node((), None)

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def cheapest(self, before: float) -> tuple[float, Node] | None:
        """Return the node that costs least to lose, with what that is.

        A leaf used before a time costs the tokens that lead to it, since texts are
        resumed behind it. The restore points of a node on the way to one other node
        cost the tokens after the previous ones. Both count from the node's last use:
        what is let go meanwhile has to cost as much before it is its turn.
        """
        costs = (
            (node.level + cost, node.used, node.stop, node)
            for node in self.nodes()
            if (cost := self._cost(node, before)) is not None
        )
        least = min(costs, key=lambda each: each[:3], default=None)
        return None if least is None else (least[0], least[-1])

    def _cost(self, node: Node, before: float) -> int | None:
        """Return the tokens to read again without a node; None: it stays."""
        if not node.children:
            return node.stop if node.used < before else None
        if not node.points or len(node.children) > 1:
            return None
        previous = node.parent
        while previous is not None and previous.parent and not previous.points:
            previous = previous.parent
        return node.stop - (previous.stop if previous else 0)

    def path(self, tokens: Tokens) -> tuple[list[Node], int]:
        """Return the nodes along `tokens` and how many of these they match.

        The last node may be matched in part; the first is the root.
        """
        found, matched = [self._root], 0
        while matched < len(tokens):
            child = found[-1].children.get(tokens[matched])
            if child is None:
                break
            run = child.tokens
            common = _common(run, tokens[matched : matched + len(run)])
            found.append(child)
            matched += common
            if common < len(run):
                break
        return found, matched

    def longest(
        self, which: int, tokens: Tokens, back: int = 0
    ) -> tuple[Snapshot | None, list[Node]]:
        """Return what a role can use for `tokens`, and the nodes it is of.

        Where it is resumed at any token, it is so `back` tokens before the known end.
        """
        role = self._roles[which]
        nodes, matched = self.path(tokens)
        whole = [which in node.rows for node in nodes[1:]]
        if False in whole:
            del nodes[whole.index(False) + 1 :]
            matched = nodes[-1].stop
        if role.stateful:
            while nodes and (nodes[-1].stop > matched or which not in nodes[-1].points):
                nodes.pop()
            matched, back = nodes[-1].stop if nodes else 0, 0
        if matched - back <= role.lag:
            return None, []
        merged = role.empty.ranges
        for node in nodes[1:]:
            merged = merge(merged, node.rows[which])
        merged = split(merged, role.rows(matched - back))[0]
        if role.stateful:
            merged = merge(merged, nodes[-1].points[which].states)
        return merged, nodes

    def reach(self, tokens: Tokens) -> list[Node]:
        """Return the nodes that `tokens` match; an edge is cut where they part."""
        nodes, matched = self.path(tokens)
        if nodes[-1].stop > matched:
            nodes[-1] = self._cut(nodes[-1], matched)
        return nodes

    def _cut(self, node: Node, at: int) -> Node:
        """Put a node into the edge above `node`, and return it."""
        middle = Node(node.tokens[: at - node.start], node.parent)
        middle.used, middle.level = node.used, node.level
        rest = {}
        for which, rows in node.rows.items():
            parts = split(rows, self._roles[which].rows(at))
            middle.rows[which], rest[which] = (part.copied() for part in parts)
        middle.hang()
        node.tokens = node.tokens[len(middle.tokens) :]
        node.rows, node.parent = rest, middle
        node.hang()
        return middle

    def remove(self, node: Node, before: float) -> int:
        """Remove a leaf and prune above, or a node's points; return the bytes."""
        if not node.children:
            return node.rows.pop(0).nbytes + self.prune(node, before)
        freed = sum(point.nbytes for point in node.points.values())
        node.points = {}
        return freed

    def prune(self, node: Node, before: float = math.inf) -> int:
        """Remove what leads nowhere, from a node upwards; return the bytes.

        That is what has no rows of the target, or none that it can be resumed behind.
        Nodes used at `before` or later stay.
        """
        freed, stateful = 0, self._roles[0].stateful
        while node.parent is not None and not node.children and node.used < before:
            if 0 in node.rows and (0 in node.points or not stateful):
                break
            freed += node.nbytes
            node.rows, node.points = {}, {}
            del node.parent.children[node.tokens[0]]
            node = node.parent
        return freed


def _common(run: Tokens, other: Tokens) -> int:
    """Return how many tokens the two have in common at their beginning."""
    if tuple(run) == tuple(other):
        return len(run)
    pairs = zip(run, other, strict=False)
    return next(
        (i for i, (one, two) in enumerate(pairs) if one != two),
        min(len(run), len(other)),
    )
