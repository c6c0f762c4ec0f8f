"""A compressed tree of token runs, with the cache contents of each role.

    A [0, 40)   target: rows, state at 40     draft: rows     head: rows [0, 38)
    ├── B [40, 90)   target: rows             draft: rows     head: rows [38, 88)
    │   ├── C [90, 120)   ...                 requests diverged at 90
    │   └── D [90, 97)    ...
    └── E [40, 64)   target: rows, state at 64

For each role (the target, a draft model, heads) a node holds the rows of the tokens on
the edge above it, and perhaps the states at the end of the edge. For the edge [a, b)
and a role with lag L (`Role.lag`), these are the rows [a - L, b - L), from row 0 on. If
a node lacks a role's rows, that role can use only the nodes above it. A node without
the target's rows in memory is bare. All nodes below a bare node are bare too.

A role whose caches have only rows can be resumed at any token. A role with states can
be resumed only at a restore point: the end of a node that holds its states.

No two nodes share an array, so the tree's bytes are the sum of its nodes' bytes. In
return, an edge's rows are copied when stored, and again if requests diverge inside it.
"""

import math
from collections.abc import Iterator, Sequence

from mlx_speculation.caches.prefix.restore_points import Point
from mlx_speculation.caches.prefix.roles import Role
from mlx_speculation.caches.prefix.segment_folder import Segment
from mlx_speculation.caches.snapshots.snapshot import Snapshot, merge, split

Tokens = Sequence[int]


class Node:
    """The end of a run of tokens.

    Attributes:
        tokens: the tokens of the edge above; empty at the root.
        parent: the node where the edge begins; None at the root.
        stop: number of tokens from the root to here.
        rows: by role, the caches' rows for the edge, without states.
        points: by role, the restore point at the end of the edge, if there is one.
        children: by the first token of their edges.
        used: the number of the last use, counted by `BoundedTree`.
        uses: number of stored requests that contain the node's tokens; a new node
            begins with its parent's number.
        level: `Budget.level` at the last use; a part of the node's eviction cost.
        seen: the time of the last use, in seconds.
        file: the file that holds this node, and perhaps others; None: no file does.
        written: whether the target generated the node's tokens.
    """

    __slots__ = (
        *("children", "file", "level", "parent", "points", "rows", "seen", "stop"),
        *("tokens", "used", "uses", "written"),
    )

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens, self.parent = tuple(tokens), parent
        self.stop: int = len(tokens) + (0 if parent is None else parent.stop)
        self.rows: dict[int, Snapshot] = {}
        self.points: dict[int, Point] = {}
        self.children: dict[int, Node] = {}
        self.used: float = 0
        self.uses: int = 1 if parent is None else max(1, parent.uses)
        self.level, self.seen = 0.0, 0.0
        self.file: Segment | None = None
        self.written = False

    @property
    def start(self) -> int:
        """Number of tokens before the edge above."""
        return self.stop - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the node's rows and states."""
        kept: list[Snapshot | Point] = [*self.rows.values(), *self.points.values()]
        return sum(each.nbytes for each in kept)

    @property
    def resident(self) -> bool:
        """True if rows of the target are in memory."""
        return 0 in self.rows

    @property
    def ways(self) -> int:
        """Number of children in memory."""
        return sum(child.resident for child in self.children.values())

    @property
    def text(self) -> list[int]:
        """All tokens from the root to here."""
        runs, node = [], self
        while node.parent is not None:
            runs.append(node.tokens)
            node = node.parent
        return [token for run in reversed(runs) for token in run]

    def hang(self) -> None:
        """Become a child of `parent`."""
        assert self.parent is not None
        self.parent.children[self.tokens[0]] = self


class PrefixTree:
    """The token runs of a target. The caller may append to `roles` later."""

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

    def path(self, tokens: Tokens, start: Node | None = None) -> tuple[list[Node], int]:
        """Return the nodes along `tokens` and the number of tokens that they match.

        The first node is `start`, or the root. Perhaps only a part of the last node's
        edge matches.
        """
        result, matched = [start or self._root], 0
        while matched < len(tokens):
            child = result[-1].children.get(tokens[matched])
            if child is None:
                break
            run = child.tokens
            common = _common(run, tokens[matched : matched + len(run)])
            result.append(child)
            matched += common
            if common < len(run):
                break
        return result, matched

    def answers(self, tokens: Tokens) -> tuple[int, list[list[int]]]:
        """Return stored answers of the target if `tokens` end or differ inside one.

        The results are the number of tokens before that answer, and all answers that
        begin there, the longest first. For each node inside an answer, the part up to
        the node is listed too. If `tokens` differ elsewhere, or end at any node, the
        results are 0 and an empty list.
        """
        nodes, matched = self.path(tokens)
        last = nodes[-1]
        if last.stop == matched:  # answers can begin here, or go on
            more = [child for child in last.children.values() if child.written]
            if not more or matched == len(tokens):
                return 0, []
        elif not last.written:
            return 0, []
        while last.parent is not None and last.written:
            last = last.parent
        waiting = [child for child in last.children.values() if child.written]
        result: list[Node] = []
        while waiting:
            node = waiting.pop()
            result.append(node)
            waiting += [child for child in node.children.values() if child.written]
        result.sort(key=lambda node: (node.stop, node.used), reverse=True)
        return last.stop, [node.text[last.stop :] for node in result]

    def usable(self, which: int, tokens: Tokens) -> tuple[list[Node], int]:
        """Return the nodes and the number of leading `tokens` that a role can use.

        For a role with states, the last node returned has the role's restore point.
        """
        nodes, matched = self.path(tokens)
        whole = [which in node.rows for node in nodes[1:]]
        if False in whole:
            del nodes[whole.index(False) + 1 :]
            matched = nodes[-1].stop
        if self._roles[which].stateful:
            while nodes and (nodes[-1].stop > matched or which not in nodes[-1].points):
                nodes.pop()
            matched = nodes[-1].stop if nodes else 0
        return nodes, matched

    def longest(
        self, which: int, tokens: Tokens, back: int = 0
    ) -> tuple[Snapshot | None, list[Node]]:
        """Return a role's snapshot for `tokens`, and its nodes; None: nothing usable.

        If the role has no states, the snapshot lacks the last `back` usable tokens.
        """
        role = self._roles[which]
        nodes, matched = self.usable(which, tokens)
        if role.stateful:
            back = 0
        if matched - back <= role.lag:
            return None, []
        merged = role.empty.ranges
        for node in nodes[1:]:
            merged = merge(merged, node.rows[which])
        merged = split(merged, role.rows(matched - back))[0]
        if role.stateful:
            merged = merge(merged, nodes[-1].points[which].states)
        return merged, nodes

    def reach(self, tokens: Tokens, start: Node | None = None) -> list[Node]:
        """Return the nodes that `tokens` match; an edge matched in part is cut."""
        nodes, matched = self.path(tokens, start)
        if nodes[-1].stop > (place := nodes[0].stop + matched):
            nodes[-1] = self._cut(nodes[-1], place)
        return nodes

    def _cut(self, node: Node, at: int) -> Node:
        """Cut the edge above `node` at token `at`; return the new node there."""
        middle = Node(node.tokens[: at - node.start], node.parent)
        middle.used, middle.level, middle.seen = node.used, node.level, node.seen
        middle.file, middle.written, middle.uses = node.file, node.written, node.uses
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
        """Evict a leaf, or drop an inner node's points; return the bytes freed."""
        if not node.ways:
            return node.rows.pop(0).nbytes + self.prune(node, before)
        freed = sum(point.nbytes for point in node.points.values())
        node.points = {}
        return freed

    def prune(self, node: Node, before: float = math.inf, start: int = 0) -> int:
        """Free the useless nodes from `node` upwards; return the bytes freed.

        A node without children in memory is useless if the target cannot be resumed
        after it. Nodes stay if their `used` is `before` or more, or if they begin
        before the token `start`.
        """
        freed, stateful = 0, self._roles[0].stateful
        while (
            node.parent is not None
            and not node.ways
            and node.used < before
            and node.start >= start
        ):
            if node.resident and (0 in node.points or not stateful):
                break
            freed += node.nbytes
            node.rows, node.points = {}, {}
            parent = node.parent
            if node.file is None and not node.children:
                self._cut_off(node)
            node = parent
        return freed

    def forget_file(self, file: Segment) -> None:
        """Remove a file from its nodes; remove nodes left without rows and children."""
        nodes = [node for node in self.nodes() if node.file is file]
        for node in nodes:
            node.file = None
        # A node with children stays: the children's files are usable again once a
        # prefill has made the node's rows again.
        for lost in nodes:
            while lost.parent and not (lost.resident or lost.file or lost.children):
                parent = lost.parent
                self._cut_off(lost)
                lost = parent

    def _cut_off(self, node: Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.tokens[0]]
            node.parent = None


def _common(run: Tokens, other: Tokens) -> int:
    if tuple(run) == tuple(other):
        return len(run)
    pairs = zip(run, other, strict=False)
    return next(
        (i for i, (one, two) in enumerate(pairs) if one != two),
        min(len(run), len(other)),
    )
