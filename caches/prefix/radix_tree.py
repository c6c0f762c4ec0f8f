"""A compressed tree of token runs, with what each role's caches held for them.

    A [0, 40)   target: rows, state at 40     draft: rows     head: rows [0, 38)
    ├── B [40, 90)   target: rows             draft: rows     head: rows [38, 88)
    │   ├── C [90, 120)   ...                 requests parted at 90
    │   └── D [90, 97)    ...
    └── E [40, 64)   target: rows, state at 64

A node holds the rows of the tokens on the edge above it, and perhaps the states at its
end, of the target and of what drafts for it: the roles. Row m of a role with lag L
follows from the tokens [0, m + L], so of the edge [a, b) it holds rows [a - L, b - L).
Rows of another role than the target may be missing, and what it can use ends there. A
node whose rows are not in memory is bare; below it all are.

A role of rows alone is resumed at any token. Where a layer has a state, it is resumed
at the end of a node that holds it: a restore point.

No two nodes share an array, so the tree's bytes are the sum of its nodes'. Its price:
an edge is copied once when it is stored, and once more when requests part inside it.
It knows nothing of locks and of how many bytes are allowed.
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
        stop: how many tokens lead here.
        rows: by role, what the caches' rows held for the edge, without states.
        points: by role, the states after them, if this is a restore point of it.
        children: by the first token of their edges.
        used: when it was used last; larger is later.
        uses: how many requests were stored that its tokens are of.
        level: what it had cost until then to read again what was let go.
        seen: when it was used last, in seconds.
        file: which holds it too, and perhaps more tokens; None: none does.
        written: whether the target wrote its tokens in an answer.
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
        """The first token of the edge above."""
        return self.stop - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and states."""
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
        """All tokens that lead here."""
        runs, node = [], self
        while node.parent is not None:
            runs.append(node.tokens)
            node = node.parent
        return [token for run in reversed(runs) for token in run]

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

    def path(self, tokens: Tokens, start: Node | None = None) -> tuple[list[Node], int]:
        """Return the nodes along `tokens` and how many of these they match.

        The last node may be matched in part; the first is the start, or the root.
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
        """Return where `tokens` part from what the target wrote, and what it wrote.

        Returns:
            How many tokens lead to the answer in which they part from the tree; and
            all answers there, and beginnings of these, the longest first.
        """
        nodes, matched = self.path(tokens)
        last = nodes[-1]
        if last.stop == matched:  # answers may begin here, or go on
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
        """Return the nodes along `tokens` that a role can use, and how many of these.

        Where it has states, these are up to its last restore point.
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
        """Return what a role can use for `tokens`, and the nodes it is of.

        Where it is resumed at any token, it is so `back` tokens before the known end.
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
        """Return the nodes that `tokens` match; an edge is cut where they part."""
        nodes, matched = self.path(tokens, start)
        if nodes[-1].stop > (place := nodes[0].stop + matched):
            nodes[-1] = self._cut(nodes[-1], place)
        return nodes

    def _cut(self, node: Node, at: int) -> Node:
        """Put a node into the edge above `node`, and return it."""
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
        """Remove a leaf and prune above, or a node's points; return the bytes."""
        if not node.ways:
            return node.rows.pop(0).nbytes + self.prune(node, before)
        freed = sum(point.nbytes for point in node.points.values())
        node.points = {}
        return freed

    def prune(self, node: Node, before: float = math.inf, start: int = 0) -> int:
        """Remove what leads nowhere, from a node upwards; return the bytes.

        That is what has no rows of the target, or none that it can be resumed behind.
        Nodes used at `before` or later stay, and those that begin before `start`.
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
        """Remove a file from its nodes, and what then leads nowhere.

        What leads to other files stays, and these are of use once its tokens were read.
        """
        nodes = [node for node in self.nodes() if node.file is file]
        for node in nodes:
            node.file = None
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
    """Return how many tokens the two have in common at their beginning."""
    if tuple(run) == tuple(other):
        return len(run)
    pairs = zip(run, other, strict=False)
    return next(
        (i for i, (one, two) in enumerate(pairs) if one != two),
        min(len(run), len(other)),
    )
