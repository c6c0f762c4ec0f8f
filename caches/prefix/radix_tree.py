"""A compressed tree of token runs, with the rows and states of each.

    A [0, 40)  rows, state at 40
    ├── B [40, 90)   rows                 requests parted at 90
    │   ├── C [90, 120)  rows, state at 120
    │   └── D [90, 97)   rows, state at 97
    └── E [40, 64)   rows, state at 64

A node holds the rows of the tokens on the edge above it, and perhaps the states at
its end. Where every layer has rows, a request is resumed at any token. Where a layer
has a state, it is resumed at the end of a node that holds it: a restore point.

No two nodes share an array, so the tree's bytes are the sum of its nodes'. Its price:
an edge is copied once when it is stored, and once more when requests part inside it.
It knows nothing of locks and of how many bytes are allowed.
"""

from collections.abc import Hashable, Iterator, Sequence

import mlx.core as mx

from mlx_speculation.caches.snapshots.snapshot import Snapshot, merge, split

# Of a head, what its row of a position depends on, see `engine.prefix_reuse`.
Tokens = Sequence[Hashable]


class Node:
    """The end of a run of tokens.

    Attributes:
        tokens: the tokens of the edge above; empty at the root.
        rows: what the caches' rows held for them, without states.
        states: the states after them, if this is a restore point.
        hidden: the last hidden states before it, where a head reads them again.
        parent: the node where the edge begins; None at the root.
        children: by the first token of their edges.
        used: when it was used last; larger is later.
    """

    __slots__ = ("children", "hidden", "parent", "rows", "states", "tokens", "used")

    def __init__(self, tokens: Tokens, rows: Snapshot, parent: "Node | None") -> None:
        self.tokens = tuple(tokens)
        self.rows = rows
        self.states: Snapshot | None = None
        self.hidden: mx.array | None = None
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.used = 0

    @property
    def stop(self) -> int:
        """How many tokens lead here."""
        return self.rows.stop

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and states."""
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return self.rows.nbytes + (self.states.nbytes if self.states else 0) + hidden


class PrefixTree:
    """The runs of one model."""

    def __init__(self, empty: Snapshot) -> None:
        self._root = Node((), empty.ranges, None)
        # Whether requests are resumed at restore points only
        self.stateful = any(leaf.whole for leaf in empty.leaves)

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

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

    def longest(self, tokens: Tokens) -> tuple[Snapshot | None, list[Node]]:
        """Return the longest reusable beginning of `tokens`, and the nodes it is of."""
        nodes, matched = self.path(tokens)
        if self.stateful:
            while nodes and (nodes[-1].stop > matched or nodes[-1].states is None):
                nodes.pop()
        if matched == 0 or not nodes:
            return None, []
        held = nodes[0].rows
        for node in nodes[1:]:
            rows = node.rows
            held = merge(held, split(rows, matched)[0] if rows.stop > matched else rows)
        states = nodes[-1].states
        return (merge(held, states) if states else held), nodes

    def at(self, tokens: Tokens) -> Node:
        """Return the node at the end of `tokens`, all of which the tree has.

        Where it is inside an edge, the edge is cut in two.
        """
        nodes, matched = self.path(tokens)
        assert matched == len(tokens)
        node = nodes[-1]
        return node if node.stop == matched else _cut(node, matched)

    def add(self, parent: Node, tokens: Tokens, rows: Snapshot) -> Node:
        """Hang an edge of `tokens` below a node, none of whose edges begins alike."""
        node = Node(tokens, rows, parent)
        parent.children[node.tokens[0]] = node
        return node

    def remove(self, leaf: Node, keep: Node | None = None) -> int:
        """Remove a leaf, and what above it can be resumed no more, but not `keep`.

        Returns:
            The bytes that the removed nodes held.
        """
        freed, node = 0, leaf
        while node.parent is not None:
            parent = node.parent
            del parent.children[node.tokens[0]]
            freed += node.nbytes
            useful = not self.stateful or parent.states is not None or parent.children
            if useful or parent is keep:
                break
            node = parent
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


def _cut(node: Node, at: int) -> Node:
    """Put a node into the edge above `node`, and return it."""
    parent = node.parent
    assert parent is not None
    head, tail = (part.copied() for part in split(node.rows, at))
    length = at - parent.stop
    middle = Node(node.tokens[:length], head, parent)
    middle.used = node.used
    parent.children[middle.tokens[0]] = middle
    node.tokens, node.rows, node.parent = node.tokens[length:], tail, middle
    middle.children[node.tokens[0]] = node
    return middle
