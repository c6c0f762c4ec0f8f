"""What earlier requests left in the caches, kept for requests that begin alike.

    prefixes = PrefixCache(max_bytes=4 << 30)
    generator = SpeculativeGenerator(model, tokenizer, prefix_cache=prefixes)

It keeps one `PrefixTree` for the target and one for the draft model, inside one
budget of bytes. Leaves that were used longest ago go first; the budget is kept at
every time but inside a cut of an edge, which copies that edge, and while a state is
taken. Restore points of running streams count, until they are stored or the stream is
gone. Streams of several threads may use it together: nothing in it is lazy or changes,
and a lock guards the rest. It belongs to one pair of models. Whoever changes their
weights calls `clear`.

It knows token ids and caches, and no text.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree, Tokens
from mlx_speculation.caches.prefix.restore_points import Point, RunningPoints
from mlx_speculation.caches.snapshots.snapshot import Snapshot, merge, split
from mlx_speculation.caches.snapshots.take import snapshot
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.caches.types.leaves import check_single
from mlx_speculation.errors import InvalidRequestError


class PrefixCache:
    """Rows and states of earlier requests, at most `max_bytes` of them.

    Args:
        max_bytes: bytes of the arrays that are kept, target's and draft's together.
        every: models with rings or recurrent layers are resumed at restore points
            only; these are at most so many tokens apart. A resumed request reads at
            most that many known tokens again. Each costs the bytes of all states,
            and no chunk of a prompt is longer.

    Raises:
        InvalidRequestError: a number is out of range.
    """

    def __init__(self, max_bytes: int, *, every: int = 512) -> None:
        if max_bytes < 0 or every < 1:
            raise InvalidRequestError(
                f"max_bytes is {max_bytes} and every is {every}. Pass at least 0 bytes "
                "and at least 1 token."
            )
        self._max_bytes, self._every = max_bytes, every
        self._lock = threading.RLock()
        self._clock = itertools.count(1)
        self._owners: tuple[weakref.ref[Any], ...] | None = None
        self._heads: list[weakref.ref[Any]] = []
        self._shape: FixedShape | None = None
        self._empty: list[Snapshot] = []
        self._trees: list[PrefixTree] = []
        self._stored = 0  # bytes in the trees
        self._changing = False
        self._running: weakref.WeakSet[RunningPoints] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int:
        """The budget."""
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

    def clear(self) -> None:
        """Forget everything, as after a change of the models' weights."""
        with self._alone():
            self._trees = [PrefixTree(each) for each in self._empty]
            self._stored = 0

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
        for each in caches:
            check_single(each)
        empty = [snapshot(each, 0, 0) for each in caches]
        with self._lock:
            if self._owners is None:
                self._owners = tuple(weakref.ref(owner) for owner in owners)
                self._shape = shape
                self._empty = empty
                self.clear()
            mine = [ref() for ref in self._owners]
            same = len(mine) == len(owners) and all(
                one is other for one, other in zip(mine, owners, strict=True)
            )
        if not same:
            raise InvalidRequestError(
                f"The prefix cache belongs to {_named(mine)}, and {_named(owners)} was "
                "asked for. Make a PrefixCache for each pair of target and draft."
            )
        if self._shape != shape:
            raise InvalidRequestError(
                f"The prefix cache holds what forwards with exact={_rows(self._shape)} "
                f"have computed, and exact={_rows(shape)} was asked for. Make a "
                "PrefixCache for each."
            )
        for own, other in zip(self._empty[: len(empty)], empty, strict=True):
            merge(own, other)  # refuses caches of other kinds and settings

    def bind_head(self, owner: Any, caches: Sequence[Any]) -> int:
        """Keep the rows of a head on the first model too, and return its index.

        Args:
            owner: the head, compared by identity.
            caches: new empty caches of it.
        """
        empty = snapshot(caches, 0, 0)
        with self._lock:
            assert self._owners is not None
            known = [ref() for ref in self._heads]
            if not any(one is owner for one in known):
                self._heads.append(weakref.ref(owner))
                self._empty.append(empty)
                self._trees.append(PrefixTree(empty))
                known.append(owner)
            return len(self._owners) + [one is owner for one in known].index(True)

    def stateful(self, which: int) -> bool:
        """Whether the model `which` needs restore points."""
        return self._trees[which].stateful

    def running_points(self) -> RunningPoints:
        """Return the restore points of a new stream, none yet."""
        with self._lock:
            points = RunningPoints()
            self._running.add(points)
            return points

    def stamp(self) -> int:
        """Return a new time of use, for all that one request reads or leaves.

        What has one time is removed together: the rows of a target and those of its
        drafts are of no use without each other.
        """
        return next(self._clock)

    def hidden(self, tokens: Tokens) -> mx.array | None:
        """Return the hidden states that the target's restore point at the end has."""
        with self._alone():
            nodes, matched = self._trees[0].path(tokens)
            exact = matched == len(tokens) == nodes[-1].stop
            return nodes[-1].hidden if exact else None

    def take(self, points: RunningPoints, point: Point) -> None:
        """Add a restore point to those of a stream.

        Leaves that were used longest ago make room, then points of the stream.
        """
        with self._alone():
            points.taken.append(point)
            while points.taken and not self._room(0):
                points.thin_out()

    def lookup(
        self, which: int, tokens: Tokens, used: int | None = None
    ) -> Snapshot | None:
        """Return what is held for the longest reusable beginning of `tokens`.

        Args:
            which: the index of the model in `bind`.
            tokens: what its caches are to hold, from the first token on.
            used: the request's time, see `stamp`; None: a new one.
        """
        with self._alone():
            held, nodes = self._trees[which].longest(tokens)
            self._touch(nodes, used)
        return held

    def store(
        self,
        which: int,
        tokens: Tokens,
        caches: Sequence[Any],
        points: RunningPoints | None = None,
        *,
        hidden: mx.array | None = None,
        used: int | None = None,
    ) -> None:
        """Keep what the caches of model `which` hold, as far as there is room.

        Args:
            which: the index of the model in `bind`.
            tokens: what the caches hold, from the first token on.
            caches: its live caches.
            points: restore points taken on the way. They are the cache's now, or go
                for lack of room, the last ones first.
            hidden: the last hidden states of the target, if a head reads them again.
            used: the request's time, see `stamp`; None: a new one.
        """
        taken = [] if points is None else points.taken
        with self._alone() as again:
            if tokens and not again:
                used = self.stamp() if used is None else used
                self._store(self._trees[which], tokens, caches, taken, hidden, used)
            taken.clear()

    def _store(
        self,
        tree: PrefixTree,
        tokens: Tokens,
        caches: Sequence[Any],
        points: list[Point],
        hidden: mx.array | None,
        used: int,
    ) -> None:
        nodes, matched = tree.path(tokens)
        self._touch(nodes, used)
        points[:] = [point for point in points if 0 < point.stop < len(tokens)]
        complete = matched == len(tokens) and nodes[-1].stop == matched
        live = None
        if not complete or (tree.stateful and not nodes[-1].states):
            live = snapshot(caches, matched, len(tokens))
        while points:
            point = points[0]
            if not self._reach(tree, tokens[: point.stop], live, points, used):
                return
            del points[0]  # its bytes are free for its node
            self._hang(tree, tree.at(tokens[: point.stop]), point)
        if live is not None and self._reach(tree, tokens, live, points, used):
            node = tree.at(tokens)
            if tree.stateful:
                self._hang(tree, node, Point(len(tokens), live.states, hidden))

    def _reach(
        self,
        tree: PrefixTree,
        tokens: Tokens,
        live: Snapshot | None,
        points: list[Point],
        used: int,
    ) -> bool:
        """Add the rows that the tree lacks of `tokens`; return whether it has all.

        Points after the first give way to the rows.
        """
        matched = tree.path(tokens)[1]
        # Rows before the live ones may have had to go since, to make room.
        if live is not None and live.start <= matched < len(tokens):
            parent = tree.at(tokens[:matched])
            rows = split(split(live.ranges, len(tokens))[0], matched)[1]
            room = self._room(rows.size, keep=parent)
            while len(points) > 1 and not room:
                points.pop()
                room = self._room(rows.size, keep=parent)
            if room:
                node = tree.add(parent, tokens[matched:], rows.copied())
                self._stored += node.nbytes
                self._touch([node], used)
            else:
                self._prune(tree, parent)
        return tree.path(tokens)[1] == len(tokens)

    def _hang(self, tree: PrefixTree, node: Node, point: Point) -> None:
        """Make a node a restore point, if there is room for the states."""
        if node.states is not None:
            return
        if self._room(point.size, keep=node):
            node.states, node.hidden = point.states, point.hidden
            self._stored += point.nbytes
        else:
            self._prune(tree, node)

    def _prune(self, tree: PrefixTree, node: Node) -> None:
        """Remove rows that lead to no restore point, for lack of room."""
        useless = tree.stateful and node.states is None and not node.children
        if useless and node.parent is not None:
            self._stored -= tree.remove(node)

    def _room(self, size: int, keep: Node | None = None) -> bool:
        """Remove leaves other than `keep` until `size` bytes fit in the budget."""
        while self.nbytes + size > self._max_bytes:
            leaves = [
                (node.used, number, tree, node)
                for number, tree in enumerate(self._trees)
                for node in tree.nodes()
                if not node.children and node is not keep
            ]
            if not leaves:
                return False
            oldest = min(used for used, _, _, _ in leaves)
            for used, _, tree, node in leaves:
                if used == oldest:
                    self._stored -= tree.remove(node, keep)
        return True

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Change the trees; yield whether this very thread is about it already.

        It may be: the collector drops a stream in the middle of anything.
        """
        with self._lock:
            again, self._changing = self._changing, True
            try:
                yield again
            finally:
                self._changing = again

    def _touch(self, nodes: Sequence[Node], used: int | None) -> None:
        now = self.stamp() if used is None else used
        for node in nodes:
            node.used = now


def _rows(shape: FixedShape | None) -> int | None:
    return None if shape is None else shape.rows


def _named(owners: Sequence[Any]) -> str:
    return " and ".join("none" if x is None else type(x).__name__ for x in owners)
