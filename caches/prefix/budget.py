"""The bytes of a prefix cache, and what goes where there are too few.

What costs least to read again goes first, counted from its last use (GreedyDual, Young
1994): for a request no leaf goes that costs more than the request, until as many tokens
went for lack of room. Small requests between the turns of a long text would amount to
that, so against those a text counts as often as it was used.
"""

import math
import weakref
from typing import NamedTuple

from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree
from mlx_speculation.caches.prefix.restore_points import RunningPoints
from mlx_speculation.environment import free_memory

SMALL = 8  # a request is small beside a text of so many times its tokens
MOST_USES = 4  # that count


class Claim(NamedTuple):
    """A request that needs room."""

    tokens: int  # of its text
    cost: float  # what goes for it costs less
    now: float = math.inf  # leaves used then or later stay


class Budget:
    """Bytes of a tree and of the restore points of running streams.

    Attributes:
        stored: bytes in the tree.
        running: restore points of streams.
        evictions: how often something was removed for lack of room.
        level: what it costs to read again what was let go, the dearest of it counted.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self.stored, self.evictions, self.level = 0, 0, 0.0
        self.running: weakref.WeakSet[RunningPoints] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int:
        """The most there may be, from the first use on."""
        if self._max_bytes is None:
            self._max_bytes = (free_memory() or 8 * 10**9) // 4
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that there are."""
        return self.stored + sum(points.nbytes for points in self.running)

    def claim(self, tokens: int, now: float = math.inf) -> Claim:
        """Return the claim of a request of so many tokens."""
        return Claim(tokens, self.level + tokens, now)

    def room(self, tree: PrefixTree, size: int, claim: Claim) -> bool:
        """Remove what costs less until `size` more bytes fit, and say if they do."""
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
    """Return the tokens to read again without a node; None: it stays.

    A leaf costs those that lead to it, since texts are resumed behind it. The restore
    points of a node on the way to one other node cost the tokens after the previous
    ones.
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
