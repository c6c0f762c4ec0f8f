"""Trees at random, and a drafter that proposes those with a known text in them."""

import random
from collections.abc import Sequence as SequenceOf

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Branches, Choose, Proposal
from mlx_speculation.engine.prompt import Sequence


def random_parents(draw: random.Random, nodes: int) -> list[int]:
    """Return the parents of a tree of any shape, -1 for its root's children."""
    return [draw.randrange(-1, node) for node in range(nodes)]


def path_to(parents: SequenceOf[int], node: int) -> list[int]:
    """Return the nodes from the root's child down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class TreeDrafter:
    """Proposes random trees, in which a random path follows a known text.

    Args:
        text: prompt and continuation, as token ids.
        right: the chance that the text goes on at one more node of the path; 1: all of
            it is right, and 0: no node is.
        seed: decides the trees.

    Attributes:
        trees: that it proposes them.
        proposed: how many trees it has proposed.
        chains: how often it was asked for a chain.
        settled: of each tree how many tokens were accepted, and how many were right.
    """

    trees = True

    def __init__(self, text: list[int], right: float, seed: int = 0) -> None:
        self._text, self._right = text, right
        self._random = random.Random(seed)
        self.proposed = self.chains = self._deepest = 0
        self.settled: list[tuple[int, int]] = []

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose a tree of at most `limit` levels, or the text as a chain."""
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
        for node in range(nodes):  # siblings differ, and none else is right
            depth = len(path_to(parents, node)) - 1
            said = {tokens[i] for i in range(nodes) if parents[i] == parents[node]}
            said.add(known[min(depth, limit)])
            if node not in right:
                tokens[node] = draw.choice([*({*range(256)} - said)])
        self._deepest = len(right)
        branches = Branches(mx.array(parents, mx.int32), limit)
        return Proposal(mx.array(tokens, mx.uint32), branches=branches)

    def settle(self, accepted: int) -> None:
        """Note what was accepted, and what is right."""
        self.settled.append((accepted, self._deepest))

    def discard(self) -> None:
        """Do nothing."""
