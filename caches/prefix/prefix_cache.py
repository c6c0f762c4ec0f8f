"""Caches of earlier requests, kept for requests that begin alike.

    prefixes = PrefixCache(max_bytes=4 << 30)
    generator = SpeculativeGenerator(model, tokenizer, prefix_cache=prefixes)

It keeps one `BoundedTree` with the rows of the target, of the draft model and of heads,
inside one budget of bytes. Restore points of running streams count, until they are
stored or the stream is gone. Streams of several threads may use it together: nothing in
it is lazy or changes, and a lock guards the rest. Whoever changes the models' weights
calls `clear`.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.prefix.bounded_tree import BoundedTree
from mlx_speculation.caches.prefix.budget import Budget
from mlx_speculation.caches.prefix.persistence import Persistence
from mlx_speculation.caches.prefix.radix_tree import Tokens
from mlx_speculation.caches.prefix.restore_points import Left, Point, RunningPoints
from mlx_speculation.caches.prefix.roles import Roles
from mlx_speculation.caches.prefix.segment_folder import SegmentFolder
from mlx_speculation.caches.snapshots.snapshot import Snapshot
from mlx_speculation.caches.types.fixed_view import FixedShape
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
        self._every, self._budget = every, Budget(max_bytes)
        self._folder: SegmentFolder | None = None
        if folder is not None:
            self._folder = SegmentFolder(folder, disk_gigabytes)
        self._disk: Persistence | None = None
        self._lock, self._changing = threading.RLock(), False
        self._roles = Roles(marked=self._folder is not None)
        self._tree = BoundedTree(self._roles, self._budget, every)

    @property
    def max_bytes(self) -> int:
        """The budget, from the first use on."""
        return self._budget.max_bytes

    @property
    def evictions(self) -> int:
        """Number of removals from memory for lack of room."""
        return self._budget.evictions

    @property
    def every(self) -> int:
        """The largest distance of restore points, in tokens."""
        return self._every

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are held now, restore points of streams included."""
        with self._lock:
            return self._budget.nbytes

    @property
    def restore_points(self) -> int:
        """Number of restore points of all texts."""
        with self._lock:
            stored = sum(bool(node.points) for node in self._tree.nodes())
            return stored + sum(len(each.taken) for each in self._budget.running)

    def clear(self) -> None:
        """Forget everything, as after a change of the models' weights."""
        with self._alone():
            self._roles = self._roles.again()
            self._begin()

    def _begin(self) -> None:
        """Begin a tree of what the folder has."""
        self._tree = BoundedTree(self._roles, self._budget, self._every)
        self._budget.stored = 0
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
            self._budget.running.add(points)
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
            self._tree.add_point(points, point)

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
            while disk is not None and tokens:
                tokens = self._read(disk, tokens)
        return usable

    def _read(self, disk: Persistence, tokens: Tokens) -> Tokens:
        """Read the segments that help.

        Returns:
            The tokens to try next: the same where a file was damaged, fewer where there
            is no room, none where all is done.
        """
        segments, claim = disk.missing(tokens), self._tree.claim(tokens)
        for segment, nodes in segments:
            if (parts := disk.read(segment)) is None:
                return tokens
            for node in nodes:
                end = node is segments[-1][1][-1]
                if not self._tree.fill(node, parts, claim, end=end):
                    self._tree.release(self._tree.path(tokens)[0][-1], node.start)
                    return tokens[: node.start]
            del parts  # or the next ones would be a second chunk
        self._tree.release(self._tree.path(tokens)[0][-1])
        return ()

    def lookup(self, which: int, tokens: Tokens, back: int = 0) -> Snapshot | None:
        """Return what is held for the longest reusable beginning of `tokens`.

        Args:
            which: the index of the role.
            tokens: what is known of the text, from the first token on.
            back: a role of rows alone is resumed so many tokens before their end.
        """
        with self._alone():
            return self._tree.lookup(which, tokens, back)

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
                self._tree.store(tokens, [each for each in left if each.stop], given)
            for each in left:
                each.points.clear()
            if self._disk is not None:
                self._disk.write_later()

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
