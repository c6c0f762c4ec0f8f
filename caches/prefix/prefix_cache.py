"""Cache contents of earlier requests, for requests that begin with the same tokens.

    prefixes = PrefixCache(max_bytes=4 << 30)
    generator = SpeculativeGenerator(model, tokenizer, prefix_cache=prefixes)

The byte budget includes the restore points of running streams. Streams of several
threads can share a prefix cache: its arrays are evaluated and never change, and a lock
guards the tree.
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
    """Rows and states of earlier requests, in at most `max_bytes` of memory.

    A role is a model or a head whose caches are kept; role 0 is the target. After a
    change of the models' weights, call `clear`.

    Args:
        max_bytes: limit of the bytes of all kept arrays. None: a quarter of the memory
            that is free at the first use, or 2 GB if that is unknown.
        every: largest distance of two restore points, in tokens. Also the largest
            number of tokens in a chunk of a prompt, and in a new node. A model with
            rings or recurrent layers can be resumed only at restore points, so a
            resumed request reads at most `every` known tokens again. Each point costs
            the bytes of all states.
        folder: directory that keeps the contents for later processes with the same
            models. Several processes can share it. It is created with mode 0700.
            None: memory only.
        disk_gigabytes: limit of all files in the folder.

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
        """The budget in bytes, which is fixed at the first use."""
        return self._budget.max_bytes

    @property
    def evictions(self) -> int:
        """Number of evictions from memory."""
        return self._budget.evictions

    @property
    def every(self) -> int:
        """The largest distance of two restore points, in tokens."""
        return self._every

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in memory, with the restore points of running streams."""
        with self._lock:
            return self._budget.nbytes

    @property
    def restore_points(self) -> int:
        """Number of restore points, with those of running streams."""
        with self._lock:
            stored = sum(bool(node.points) for node in self._tree.nodes())
            return stored + sum(len(each.taken) for each in self._budget.running)

    def clear(self) -> None:
        """Forget everything; needed after a change of the models' weights."""
        with self._alone():
            self._roles = self._roles.again()
            self._begin()

    def _begin(self) -> None:
        self._tree = BoundedTree(self._roles, self._budget, self._every)
        self._budget.stored = 0
        if self._folder is not None and self._roles:
            self._disk = Persistence(self._folder, self._tree, self._roles, self._lock)

    def flush(self) -> None:
        """Wait until everything stored so far is in the folder."""
        if self._disk is not None:
            self._disk.flush()

    def bind(
        self,
        owners: Sequence[Any],
        caches: Sequence[Sequence[Any]],
        shape: FixedShape | None = None,
    ) -> None:
        """Bind the prefix cache to models for good.

        `owners` are the models, the target first; `caches` are new empty caches of
        each. Models are compared by identity. `shape` is the shape of the first model's
        forwards in exact mode; None: the model is not in exact mode. Rows computed in
        one shape cannot be used in another.

        Raises:
            InvalidRequestError: the prefix cache is bound to other models or to another
                shape.
            UnsupportedCacheError: a cache holds a batch, or is of a kind that no
                snapshot can hold.
        """
        with self._lock:
            if self._roles.bind(owners, caches, shape):
                self._begin()

    def bind_head(self, owner: Any, caches: Sequence[Any], lag: int) -> int:
        """Return the index of a head's role; add the role if it is new.

        `owner` is a head of the first model, compared by identity. `caches` are new
        empty caches of the head. Row m of the head is computed from the tokens [0, m +
        lag].
        """
        with self._lock:
            return self._roles.bind_head(owner, caches, lag)

    def stateful(self, which: int) -> bool:
        """True if the role `which` can be resumed only at restore points."""
        return self._roles[which].stateful

    def running_points(self) -> RunningPoints:
        """Return an empty collection for the restore points of a new stream."""
        with self._lock:
            points = RunningPoints()
            self._budget.running.add(points)
            return points

    def hidden(self, tokens: Tokens) -> mx.array | None:
        """Return the hidden states in the restore point after `tokens`, or None."""
        with self._alone():
            nodes, matched = self._tree.path(tokens)
            exact = matched == len(tokens) == nodes[-1].stop
            point = nodes[-1].points.get(0) if exact else None
        return None if point is None else point.hidden

    def take(self, points: RunningPoints, point: Point) -> None:
        """Add a restore point to those of a stream.

        To make room, nodes that cost less than the request are evicted, then points of
        this stream are dropped.
        """
        with self._alone():
            self._tree.add_point(points, point)

    def answers(self, tokens: Tokens) -> tuple[int, list[list[int]]]:
        """Return stored answers if `tokens` end or differ in one; see `PrefixTree`."""
        with self._alone():
            if self._disk is not None:
                self._disk.link()
            return self._tree.answers(tokens)

    def border(self, tokens: Tokens) -> int:
        """Return how many of `tokens` are in the tree, with or without rows."""
        with self._alone():
            return self._tree.path(tokens)[1]

    def fetch(self, tokens: Tokens) -> int:
        """Read from the folder into memory the rows that a request can use.

        The result is the number of tokens that the target could reuse from memory
        before this call.
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
        """Read the segments that hold rows for `tokens`; return the tokens to try next.

        These are the same if a file was damaged, fewer if there is no room, and none if
        everything was read.
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
            del parts  # so that only one segment's arrays are in memory beside the tree
        self._tree.release(self._tree.path(tokens)[0][-1])
        return ()

    def lookup(self, which: int, tokens: Tokens, back: int = 0) -> Snapshot | None:
        """Return a snapshot of role `which` for the longest usable prefix of `tokens`.

        None: nothing is usable. A role without states is resumed `back` tokens before
        the prefix ends.
        """
        with self._alone():
            return self._tree.lookup(which, tokens, back)

    def store(
        self, tokens: Tokens, left: Sequence[Left], prompt: int | None = None
    ) -> None:
        """Keep the cache contents of a request, as far as there is room.

        Args:
            tokens: the tokens in the target's caches, from the first one on.
            left: the caches and restore points of each role, the target's included.
            prompt: the number of prompt tokens among `tokens`; None: all of them.
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
        """Lock the tree; yield whether this thread is already changing the tree."""
        with self._lock:
            # `again` is True if the garbage collector ends a stream during a change.
            again, self._changing = self._changing, True
            try:
                yield again
            finally:
                self._changing = again
