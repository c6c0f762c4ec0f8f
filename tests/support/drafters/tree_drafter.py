"""Random trees, and a drafter that proposes them with a known text on one path."""

import random
from collections.abc import Sequence as SequenceOf

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Branches, Choose, Proposal
from mlx_speculation.engine.prompt import Sequence


def random_parents(draw: random.Random, nodes: int) -> list[int]:
    """Return the parents of a random tree; children of its root have -1."""
    return [draw.randrange(-1, node) for node in range(nodes)]


def path_to(parents: SequenceOf[int], node: int) -> list[int]:
    """Return the nodes from the root's child down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class TreeDrafter:
    """Proposes random trees, in which a random path follows a known text.

    The higher `right`, the more nodes of the path follow the text: all at 1, none at 0.
    """

    trees = True

    def __init__(self, text: list[int], right: float, seed: int = 0) -> None:
        self._text, self._right = text, right
        self._random = random.Random(seed)
        self.proposed = self.chains = self._deepest = 0
        self.settled: list[tuple[int, int]] = []  # counts by tree: accepted, right

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose a tree; if `choose` allows none, `limit` tokens of the known text."""
        start, draw = len(sequence.tokens), self._random
        known = [*self._text[start : start + limit], *[0] * limit]
        nodes = getattr(choose, "tree", 0)
        if not nodes:
            self.chains += 1
            self._deepest = limit
            return Proposal(mx.array(known[:limit], mx.uint32))
        self.proposed += 1
        nodes = draw.randint(2, nodes)
        parents = random_parents(draw, nodes)
        right = path_to(parents, draw.randrange(nodes))[:limit]
        while right and draw.random() >= self._right:
            right.pop()
        tokens = [256] * nodes
        for depth, node in enumerate(right):
            tokens[node] = known[depth]
        for node in range(nodes):  # siblings differ, and nodes off the path are wrong
            depth = len(path_to(parents, node)) - 1
            said = {tokens[i] for i in range(nodes) if parents[i] == parents[node]}
            said.add(known[min(depth, limit)])
            if node not in right:
                tokens[node] = draw.choice([*({*range(256)} - said)])
        self._deepest = len(right)
        branches = Branches(mx.array(parents, mx.int32), limit)
        return Proposal(mx.array(tokens, mx.uint32), branches=branches)

    def settle(self, accepted: int) -> None:
        self.settled.append((accepted, self._deepest))

    def discard(self) -> None:
        """Do nothing."""
