"""Caches of earlier requests, kept for requests that begin alike.

    prefixes = PrefixCache(max_bytes=4 << 30)
    generator = SpeculativeGenerator(model, tokenizer, prefix_cache=prefixes)

It keeps one `PrefixTree` with the rows of the target, of the draft model and of heads,
inside one budget of bytes. What costs least to read again goes first, counted from its
last use (GreedyDual, Young 1994): for a request no leaf goes that costs more than the
request, until as many tokens went for lack of room. The budget is kept at every time
but for one edge, of at most `every` tokens, that is cut or copied, and while a state is
taken. Restore points of running streams count, until they are stored or the stream is
gone. Streams of several threads may use it together: nothing in it is lazy or changes,
and a lock guards the rest. Whoever changes the models' weights calls `clear`.
"""

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.prefix.persistence import Persistence
from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree, Tokens
from mlx_speculation.caches.prefix.restore_points import Left, Point, RunningPoints
from mlx_speculation.caches.prefix.roles import Roles
from mlx_speculation.caches.prefix.segment import Held
from mlx_speculation.caches.prefix.segment_folder import SegmentFolder
from mlx_speculation.caches.snapshots.snapshot import Snapshot
from mlx_speculation.caches.snapshots.take import snapshot
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.environment import free_memory
from mlx_speculation.errors import InvalidRequestError


class PrefixCache:
    """Rows and states of earlier requests, at most `max_bytes` of them.

    Args:
        max_bytes: bytes of the arrays that are kept, target's and draft's together.
            None: a quarter of the memory that is free once the models are loaded, or
            2 GB where that is not known.
        every: models with rings or recurrent layers are resumed at restore points
            only; these are at most so many tokens apart. A resumed request reads at
            most that many known tokens again. Each costs the bytes of all states,
            and no chunk of a prompt is longer. No edge is longer either.
        folder: keeps it for later processes too, of this model and draft alone; several
            may share it. It is made for its owner alone. None: memory only.
        disk_gigabytes: the most that all files in the folder have.

    Attributes:
        evictions: how often something was removed from memory for lack of room.

    Raises:
        InvalidRequestError: a number or the folder cannot be used.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        every: int = 512,
        folder: str | os.PathLike[str] | None = None,
        disk_gigabytes: float = 20.0,
    ) -> None:
        if (max_bytes or 0) < 0 or every < 1:
            raise InvalidRequestError(
                f"max_bytes is {max_bytes} and every is {every}. Pass at least 0 bytes "
                "and at least 1 token."
            )
        self._max_bytes, self._every = max_bytes, every
        self._folder: SegmentFolder | None = None
        if folder is not None:
            self._folder = SegmentFolder(folder, disk_gigabytes)
        self._disk: Persistence | None = None
        self._lock, self._clock = threading.RLock(), itertools.count(1)
        self._roles = Roles(marked=self._folder is not None)
        self._tree = PrefixTree(self._roles)
        self._stored = 0  # bytes in the tree
        self.evictions = 0
        # What it costs to read again what was let go, the dearest of it counted
        self._level = 0.0
        self._changing = False
        self._running: weakref.WeakSet[RunningPoints] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int:
        """The budget, from the first use on."""
        if self._max_bytes is None:
            self._max_bytes = (free_memory() or 8 * 10**9) // 4
        return self._max_bytes

    @property
    def every(self) -> int:
        """The largest distance of restore points, in tokens."""
        return self._every

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are held now, restore points of streams included."""
        with self._lock:
            return self._stored + sum(points.nbytes for points in self._running)

    @property
    def restore_points(self) -> int:
        """Number of restore points of all texts."""
        with self._lock:
            stored = sum(bool(node.points) for node in self._tree.nodes())
            return stored + sum(len(points.taken) for points in self._running)

    def clear(self) -> None:
        """Forget everything, as after a change of the models' weights."""
        with self._alone():
            self._roles = self._roles.again()
            self._begin()

    def _begin(self) -> None:
        """Begin a tree of what the folder has."""
        self._tree = PrefixTree(self._roles)
        self._stored = 0
        if self._folder is not None and self._roles:
            self._disk = Persistence(self._folder, self._tree, self._roles, self._lock)

    def flush(self) -> None:
        """Wait until the folder has what requests have left."""
        if self._disk is not None:
            self._disk.flush()

    def bind(
        self,
        owners: Sequence[Any],
        caches: Sequence[Sequence[Any]],
        shape: FixedShape | None = None,
    ) -> None:
        """Belong to these models from now on, and to no others.

        Args:
            owners: the models, compared by identity.
            caches: new empty caches of each.
            shape: of the first model's forwards in exact mode; None: rows were computed
                in any company, and are not for a model in exact mode.

        Raises:
            InvalidRequestError: it belongs to others, or to forwards of another shape.
            UnsupportedCacheError: a cache holds a batch, or is of a kind that no
                snapshot can hold.
        """
        with self._lock:
            if self._roles.bind(owners, caches, shape):
                self._begin()

    def bind_head(self, owner: Any, caches: Sequence[Any], lag: int) -> int:
        """Keep the rows of a head on the first model too, and return its index.

        Args:
            owner: the head, compared by identity.
            caches: new empty caches of it.
            lag: how many tokens after its own position a row follows from.
        """
        with self._lock:
            return self._roles.bind_head(owner, caches, lag)

    def stateful(self, which: int) -> bool:
        """True if the model `which` needs restore points."""
        return self._roles[which].stateful

    def running_points(self) -> RunningPoints:
        """Return the restore points of a new stream, none yet."""
        with self._lock:
            points = RunningPoints()
            self._running.add(points)
            return points

    def hidden(self, tokens: Tokens) -> mx.array | None:
        """Return the hidden states that the target's restore point at the end has."""
        with self._alone():
            nodes, matched = self._tree.path(tokens)
            exact = matched == len(tokens) == nodes[-1].stop
            point = nodes[-1].points.get(0) if exact else None
        return None if point is None else point.hidden

    def take(self, points: RunningPoints, point: Point) -> None:
        """Add a restore point to those of a stream.

        What costs less to read again makes room, then points of the stream.
        """
        with self._alone():
            points.taken.append(point)
            while points.taken and not self._room(0, self._level + point.stop):
                points.thin_out()

    def answers(self, tokens: Tokens) -> tuple[int, list[list[int]]]:
        """Return the answers from which `tokens` part; see `PrefixTree.answers`."""
        with self._alone():
            if self._disk is not None:
                self._disk.link()
            return self._tree.answers(tokens)

    def border(self, tokens: Tokens) -> int:
        """Return how many tokens are known from earlier requests, held or not."""
        with self._alone():
            return self._tree.path(tokens)[1]

    def fetch(self, tokens: Tokens) -> int:
        """Read from the folder what a request can use, and memory has not.

        Returns:
            How many tokens the target could use from memory before.
        """
        with self._alone() as again:
            disk = None if again else self._disk
            if disk is not None:
                disk.link()
            usable = self._tree.usable(0, tokens)[1]
            now, cost = next(self._clock), self._level + len(tokens)
            while disk is not None and self._read(disk, tokens, now, cost):
                pass  # a file was damaged: others lead to less
        return usable

    def _read(self, disk: Persistence, tokens: Tokens, now: int, cost: float) -> bool:
        """Read the segments that help; return True if one of them was damaged."""
        segments = disk.missing(tokens)
        if segments:
            self._touch(self._tree.path(tokens)[0], now)
            last = segments[-1][1][-1]
        for segment, nodes in segments:
            if (parts := disk.read(segment)) is None:
                self._stored -= self._tree.prune(nodes[-1])
                return True
            for node in nodes:
                if not self._fill(node, parts, now, cost, end=node is last):
                    return False
        return False

    def _fill(
        self,
        node: Node,
        kept: Mapping[int, Held],
        now: int,
        cost: float,
        *,
        end: bool,
    ) -> bool:
        """Let a node have what a file has, and at the `end` the points.

        Returns:
            False if it has no rows of the target: there is no room.
        """
        for which, (rows, point) in kept.items():
            part = self._roles[which].part(rows, node.start, node.stop)
            if which not in node.rows and self._room(part.size, cost, now):
                node.rows[which] = part.copied()
                self._stored += node.rows[which].nbytes
            if end and point is not None:
                self._hang(node, which, point, cost)
        if end or not node.resident:
            self._stored -= self._tree.prune(node)
        return node.resident

    def lookup(self, which: int, tokens: Tokens, back: int = 0) -> Snapshot | None:
        """Return what is held for the longest reusable beginning of `tokens`.

        Args:
            which: the index of the role.
            tokens: what is known of the text, from the first token on.
            back: a role of rows alone is resumed so many tokens before their end.
        """
        with self._alone():
            kept, nodes = self._tree.longest(which, tokens, back)
            self._touch(nodes, next(self._clock))
        return kept

    def store(
        self, tokens: Tokens, left: Sequence[Left], prompt: int | None = None
    ) -> None:
        """Keep what the caches of a request hold, as far as there is room.

        Args:
            tokens: what the target's caches hold, from the first token on.
            left: what there is of each role, the target among them.
            prompt: how many of the tokens the target did not write; None: all.
        """
        with self._alone() as again:
            if tokens and not again:
                given = len(tokens) if prompt is None else prompt
                self._store(tokens, [each for each in left if each.stop], given)
            for each in left:
                each.points.clear()
            if self._disk is not None:
                self._disk.write_later()

    def _store(self, tokens: Tokens, left: Sequence[Left], prompt: int) -> None:
        path = self._tree.reach(tokens)
        self._touch(path, now := next(self._clock))
        cost = self._level + len(tokens)
        kept: dict[int, Snapshot] = {}
        ends: dict[int, int] = {}
        places: set[int] = set()
        for which, caches, stop, points, _ in left:
            kept[which] = snapshot(caches, 0, self._roles[which].rows(stop))
            end = ends[which] = min(stop, len(tokens))
            points[:] = [point for point in points if 0 < point.stop <= end]
            places |= {end, *(point.stop for point in points)}
        known, every = path[-1].stop, self._every
        last = max(ends.values(), default=0)
        places.update(range((known // every + 1) * every, last, every))
        places |= {prompt} if known < prompt < last else set()
        for place in sorted(places):
            there = {which: kept[which] for which in kept if place <= ends[which]}
            taken = [each.points for each in left]
            node = self._reach(tokens[:place], there, taken, now, cost)
            if node is None:
                self._level = max(self._level, cost)
                return
            node.written |= node.start >= max(known, prompt)
            for which, _, stop, points, hidden in left:
                if points and points[0].stop == place:
                    self._hang(node, which, points.pop(0), cost)
                elif stop == place and self.stateful(which):
                    states = kept[which].states
                    self._hang(node, which, Point(stop, states, hidden), cost)

    def _reach(
        self,
        tokens: Tokens,
        kept: Mapping[int, Snapshot],
        taken: Sequence[list[Point]],
        now: int,
        cost: float,
    ) -> Node | None:
        """Let the nodes along `tokens` have the rows of the roles in `kept`.

        What costs less gives way, and later points, among those `taken`. None: there
        is no room.
        """
        nodes = self._tree.reach(tokens)
        known = nodes[-1]
        if known.stop < len(tokens):
            nodes.append(Node(tokens[known.stop :], known))
        self._touch(nodes, now)
        lacking = [
            (node, which, self._roles[which].part(rows.ranges, node.start, node.stop))
            for node in nodes[1:]
            for which, rows in kept.items()
            if which not in node.rows
        ]
        size = sum(rows.size for _, _, rows in lacking)
        while not self._room(size, cost, now):
            later = [each for each in taken if each and each[-1].stop > len(tokens)]
            if not later:
                self._stored -= self._tree.prune(known)
                return None
            max(later, key=lambda points: points[-1].stop).pop()
        for node, which, rows in [(n, w, rows.copied()) for n, w, rows in lacking]:
            node.rows[which] = rows
            self._stored += rows.nbytes
        nodes[-1].hang()
        return nodes[-1]

    def _hang(self, node: Node, which: int, point: Point, cost: float) -> None:
        """Make a node a restore point, if there is room for the states."""
        if which in node.points or which not in node.rows:
            return
        if self._room(point.size, cost, node.used):
            node.points[which] = point
            self._stored += point.nbytes
        else:
            self._stored -= self._tree.prune(node)

    def _room(self, size: int, cost: float, before: float = math.inf) -> bool:
        """Remove what costs less until `size` bytes fit in the budget.

        Args:
            size: how many a request needs.
            cost: of that request.
            before: leaves used then or later stay.
        """
        while self.nbytes + size > self.max_bytes:
            least = self._tree.cheapest(before)
            if least is None or least[0] >= cost:
                return False
            self._level = max(self._level, least[0])
            self._stored -= self._tree.remove(least[1], before)
            self.evictions += 1
        return True

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Change the tree; yield whether this very thread is about it already.

        It may be: the collector drops a stream in the middle of anything.
        """
        with self._lock:
            again, self._changing = self._changing, True
            try:
                yield again
            finally:
                self._changing = again

    def _touch(self, nodes: Sequence[Node], now: int) -> None:
        seconds = time.time()
        for node in nodes:
            node.used, node.level, node.seen = now, self._level, seconds
