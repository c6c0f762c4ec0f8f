"""The byte budget of a prefix cache, and the eviction of its nodes.

Eviction follows GreedyDual (Young 1994). The node that costs least to read again, in
tokens, is evicted first. With each eviction, unused nodes get cheaper relative to used
ones. A request evicts only nodes that cost less than the request itself. Against a
small request the cost of a text is multiplied by the number of its uses, at most 4, so
that many small requests do not evict a long text between two of its turns.
"""

import math
import weakref
from typing import NamedTuple

from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree
from mlx_speculation.caches.prefix.restore_points import RunningPoints
from mlx_speculation.environment import free_memory

SMALL = 8  # a request is small against a text at least 8 times as long
MOST_USES = 4  # the largest number of uses that the cost is multiplied by


class Claim(NamedTuple):
    """A request that needs room."""

    tokens: int  # length of the request's text
    cost: float  # only nodes that cost less are evicted
    now: float = math.inf  # leaves used at this time or later are not evicted


class Budget:
    """Budget of bytes for a tree and the restore points of running streams."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        # `stored` is the bytes in the tree. `level` is the highest cost so far of an
        # evicted node, or of a request that found no room in `BoundedTree.store`. It is
        # added to later costs.
        self.stored, self.evictions, self.level = 0, 0, 0.0
        self.running: weakref.WeakSet[RunningPoints] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int:
        """Limit of bytes; by default a quarter of the free memory at the first use."""
        if self._max_bytes is None:
            self._max_bytes = (free_memory() or 8 * 10**9) // 4
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self.stored + sum(points.nbytes for points in self.running)

    def claim(self, tokens: int, now: float = math.inf) -> Claim:
        """Return the claim of a request of `tokens` tokens."""
        return Claim(tokens, self.level + tokens, now)

    def room(self, tree: PrefixTree, size: int, claim: Claim) -> bool:
        """Evict nodes cheaper than a claim; return whether `size` more bytes fit."""
        while self.nbytes + size > self.max_bytes:
            costs = (
                (node.level + cost, node.used, node.stop, node)
                for node in tree.nodes()
                if (cost := _cost(node, claim)) is not None
            )
            least = min(costs, key=lambda each: each[:3], default=None)
            if least is None or least[0] >= claim.cost:
                return False
            self.level = max(self.level, least[0])
            self.stored -= tree.remove(least[-1], claim.now)
            self.evictions += 1
        return True


def _cost(node: Node, claim: Claim) -> int | None:
    """Return how many tokens would be read again without a node; None: the node stays.

    For a leaf, these are all tokens of the text that ends there, times its uses if the
    request is small. An inner node with one child loses only its restore points: its
    cost is the number of tokens since the nearest restore point above it.
    """
    if not node.resident:
        return None
    if not (ways := node.ways):
        small = claim.tokens * SMALL <= node.stop
        uses = min(node.uses, MOST_USES) if small else 1
        return node.stop * uses if node.used < claim.now else None
    if not node.points or ways > 1:
        return None
    previous = node.parent
    while previous is not None and previous.parent and not previous.points:
        previous = previous.parent
    return node.stop - (previous.stop if previous else 0)
