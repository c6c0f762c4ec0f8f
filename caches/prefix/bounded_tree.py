"""The tree of a prefix cache, kept within a byte budget.

The budget is exceeded only for a moment: by the rows of at most `every` tokens while
they are cut or copied, or by a state while its snapshot is taken.
"""

import itertools
import time
from collections.abc import Mapping, Sequence

from mlx_speculation.caches.prefix.budget import Budget, Claim
from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree, Tokens
from mlx_speculation.caches.prefix.restore_points import Left, Point, RunningPoints
from mlx_speculation.caches.prefix.roles import Roles
from mlx_speculation.caches.prefix.segment import Held
from mlx_speculation.caches.snapshots.snapshot import Snapshot
from mlx_speculation.caches.snapshots.take import snapshot


class BoundedTree(PrefixTree):
    """A tree whose nodes fit into a budget; a new edge has at most `every` tokens."""

    def __init__(self, roles: Roles, budget: Budget, every: int) -> None:
        super().__init__(roles)
        self._budget, self._every = budget, every
        self._clock = itertools.count(1)

    def claim(self, tokens: Tokens) -> Claim:
        """Return a request's `Claim`, and mark the nodes of its text as used now."""
        claim = self._budget.claim(len(tokens), next(self._clock))
        self._touch(self.path(tokens)[0], claim.now)
        return claim

    def _touch(self, nodes: Sequence[Node], now: float) -> None:
        seconds = time.time()
        for node in nodes:
            node.used, node.level, node.seen = now, self._budget.level, seconds

    def lookup(self, which: int, tokens: Tokens, back: int) -> Snapshot | None:
        """Return the longest snapshot of role `which`; see `PrefixCache.lookup`."""
        kept, nodes = self.longest(which, tokens, back)
        self._touch(nodes, next(self._clock))
        return kept

    def add_point(self, running: RunningPoints, point: Point) -> None:
        """Add a restore point to those of a stream; see `PrefixCache.take`."""
        running.taken.append(point)
        claim = self._budget.claim(point.stop)
        while running.taken and not self._room(0, claim):
            running.thin_out()

    def fill(
        self, node: Node, kept: Mapping[int, Held], claim: Claim, *, end: bool
    ) -> bool:
        """Add to a node the rows in `kept`, and with `end` the restore points there.

        Return False if the target's rows or restore point do not fit.
        """
        for which, (rows, point) in kept.items():
            part = self._roles[which].part(rows, node.start, node.stop)
            if which not in node.rows and self._room(part.nbytes, claim):
                node.rows[which] = part.copied()
                self._budget.stored += node.rows[which].nbytes
            if end and point is not None:
                self._hang(node, which, point, claim)
        return 0 in (node.points if end and self._roles[0].stateful else node.rows)

    def release(self, node: Node, start: int = 0) -> None:
        """Remove useless nodes, from a node upwards; see `PrefixTree.prune`."""
        self._budget.stored -= self.prune(node, start=start)

    def store(self, tokens: Tokens, left: Sequence[Left], prompt: int) -> None:
        """Keep the cache contents of a request; see `PrefixCache.store`."""
        path = self.reach(tokens)
        for node in path[1:]:
            node.uses += 1
        claim = self.claim(tokens)
        kept: dict[int, Snapshot] = {}
        ends: dict[int, int] = {}
        places: set[int] = set()
        for which, caches, stop, points, _ in left:
            kept[which] = snapshot(caches, 0, self._roles[which].rows(stop))
            last = ends[which] = min(stop, len(tokens))
            points[:] = [point for point in points if 0 < point.stop <= last]
            places |= {last, *(point.stop for point in points)}
        end, known, every = path[-1], path[-1].stop, self._every
        last = max(ends.values(), default=0)
        places.update(range((known // every + 1) * every, last, every))
        places |= {prompt} if known < prompt < last else set()
        for place in sorted(places):
            there = {which: kept[which] for which in kept if place <= ends[which]}
            taken = [each.points for each in left]
            reached = self._extend(tokens[:place], there, taken, claim)
            if reached is None:
                self._budget.level = max(self._budget.level, claim.cost)
                break
            end = reached
            end.written |= end.start >= max(known, prompt)
            for which, _, stop, points, hidden in left:
                if points and points[0].stop == place:
                    self._hang(end, which, points.pop(0), claim)
                elif stop == place and self._roles[which].stateful:
                    states = kept[which].states
                    self._hang(end, which, Point(stop, states, hidden), claim)
        self.release(end)

    def _extend(
        self,
        tokens: Tokens,
        kept: Mapping[int, Snapshot],
        taken: Sequence[list[Point]],
        claim: Claim,
    ) -> Node | None:
        """Add the rows in `kept` to the nodes along `tokens`; return the last node.

        If room is lacking, nodes of a cost below `claim.cost` are evicted. If room is
        still lacking, restore points in `taken` that come after the end of `tokens` are
        dropped, the last ones first. None: even then there is no room.
        """
        nodes = self.reach(tokens)
        known = nodes[-1]
        if known.stop < len(tokens):
            nodes.append(Node(tokens[known.stop :], known))
        self._touch(nodes, claim.now)
        lacking = [
            (node, which, self._roles[which].part(rows.ranges, node.start, node.stop))
            for node in nodes[1:]
            for which, rows in kept.items()
            if which not in node.rows
        ]
        size = sum(rows.nbytes for _, _, rows in lacking)
        while not self._room(size, claim):
            later = [each for each in taken if each and each[-1].stop > len(tokens)]
            if not later:
                return None
            max(later, key=lambda points: points[-1].stop).pop()
        for node, which, rows in [(n, w, rows.copied()) for n, w, rows in lacking]:
            node.rows[which] = rows
            self._budget.stored += rows.nbytes
        nodes[-1].hang()
        return nodes[-1]

    def _hang(self, node: Node, which: int, point: Point, claim: Claim) -> None:
        """Make a node a restore point, if there is room for the states."""
        if which in node.points or which not in node.rows:
            return
        if self._room(point.nbytes, claim):
            node.points[which] = point
            self._budget.stored += point.nbytes

    def _room(self, size: int, claim: Claim) -> bool:
        return self._budget.room(self, size, claim)
