"""Writing the nodes of a prefix cache's tree to its folder, and reading them.

After a request has stored nodes, a separate thread writes them, parents first. Segments
(files) of other and of earlier processes become bare nodes: the tree has the tokens of
such a node, and its rows are read when a request can use them.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files.safetensors_reader import FlawError
from mlx_speculation.caches.prefix.radix_tree import Node, PrefixTree, Tokens
from mlx_speculation.caches.prefix.roles import Role
from mlx_speculation.caches.prefix.segment import Held, decoded, encoded
from mlx_speculation.caches.prefix.segment_folder import (
    Segment,
    SegmentFolder,
    extended,
)

LOG = logging.getLogger("mlx_speculation.caches")


class Persistence:
    """The segments of one tree; the writer thread reads the tree under `lock`."""

    def __init__(
        self,
        folder: SegmentFolder,
        tree: PrefixTree,
        roles: Sequence[Role],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._folder, self._tree, self._roles = folder, tree, roles
        self._lock = lock
        self._writer: threading.Thread | None = None
        self._again = self._failed = False
        self._since = 0.0  # the latest use among the nodes that the writer has seen
        self._noted: dict[str, float] = {}  # file name -> the time of use that it has
        folder.serve(roles[0].mark)
        # By the hash of all tokens up to a node: the node, and the digest object.
        start = folder.digest([])
        self._places = {start.hexdigest(): (tree.reach([])[0], start)}

    def link(self) -> None:
        """Add nodes for the segments that other processes have written meanwhile."""
        segments = self._folder.new_segments()
        if segments:  # forget the places of removed nodes
            places = self._places.items()
            self._places = {key: each for key, each in places if _in_tree(each[0])}
        for segment in segments:
            if (leading := self._leading_to(segment)) is None:
                self._folder.remove(segment.name)
                continue
            start, digest = leading
            known = self._tree.reach(segment.tokens, start)[-1]
            if known.stop < segment.stop:
                known = Node(segment.tokens[known.stop - segment.start :], known)
                known.hang()
            self._saved(known, segment)
            end = extended(digest, segment.tokens)
            self._places[end.hexdigest()] = known, end

    def _leading_to(self, segment: Segment) -> tuple[Node, Any] | None:
        """Return the node before a segment, and the digest of all tokens up to its end.

        None: the tokens before the segment are not in the tree.
        """
        if segment.parent in self._places:
            node, digest = self._places[segment.parent]
            if _in_tree(node):
                return node, digest
        # A segment can begin inside another one, where two texts diverge.
        for node in self._tree.nodes():
            if node.start < segment.start <= node.stop:
                before = node.text[: segment.start]
                digest = self._folder.digest(before) if plain(before) else None
                if digest is not None and digest.hexdigest() == segment.parent:
                    return self._tree.reach(before)[-1], digest
        return None

    def missing(self, tokens: Tokens) -> list[tuple[Segment, list[Node]]]:
        """Return the segments to read for a request, in order, each with its nodes."""
        nodes, matched = self._tree.path(tokens)
        mark, stateful = self._roles[0].mark, self._roles[0].stateful
        usable: list[Node] = []
        last = 0
        for node in nodes[1:]:
            if not node.resident and mark not in self._marks(node):
                break
            usable.append(node)
            points = {0} & node.points.keys() or {mark} & self._ends(node)
            if not stateful or (points and node.stop <= matched):
                last = len(usable)  # the target can be resumed after this node
        result: dict[str, tuple[Segment, list[Node]]] = {}
        for place, node in enumerate(usable[:last], 1):
            lacks = self._marks(node) - {self._roles[which].mark for which in node.rows}
            if place == last:
                lacks |= self._ends(node) - {
                    self._roles[which].mark for which in node.points
                }
            if node.file is not None and lacks & {role.mark for role in self._roles}:
                result.setdefault(node.file.name, (node.file, []))[1].append(node)
        return list(result.values())

    def _marks(self, node: Node) -> frozenset[str]:
        """Return the marks (see `roles`) of the roles with rows in the node's file."""
        return frozenset() if node.file is None else node.file.roles

    def _ends(self, node: Node) -> frozenset[str]:
        """Return the marks of roles whose restore point at `node` is in `node.file`."""
        file = node.file
        whole = file is not None and file.stop == node.stop
        return file.points if file is not None and whole else frozenset()

    def read(self, segment: Segment) -> dict[int, Held] | None:
        """Return a segment's contents; None: the file was unusable, and removed."""
        try:
            arrays, plan = self._folder.read(segment)
            return decoded(arrays, plan, self._roles, segment.start, segment.stop)
        except (FlawError, LookupError, TypeError, ValueError) as error:
            self._folder.drop(segment.name, error)
            self._tree.forget_file(segment)
            return None

    def write_later(self) -> None:
        """Let the writer thread write the nodes that are in no file."""
        with self._lock:
            self._again = True
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="prefix-cache")
                with suppress(RuntimeError):  # the interpreter is shutting down
                    self._writer.start()

    def flush(self) -> None:
        """Wait until everything is written."""
        if (writer := self._writer) is not None:
            writer.join()

    def _write(self) -> None:
        """Write nodes until all are in files; of successive failures, log the first."""
        with mx.stream(mx.new_thread_local_stream(mx.default_device())):
            while True:
                with self._lock:
                    if not self._again:
                        self._writer = None
                        return
                    self._again = False
                self._write_all()

    def _write_all(self) -> None:
        try:
            for node in self._pending():
                if self._write_node(node):
                    self._failed = False
        except Exception as error:  # a failure of the disk or of mlx: decoding goes on
            if not self._failed:
                LOG.warning(
                    "the prefix cache continues in memory only: nothing can be written "
                    "to %s (%s)",
                    self._folder.path,
                    error,
                )
            self._failed = True

    def _pending(self) -> Iterator[Node]:
        """Yield nodes that could be unsaved, parents first; set files' times of use."""
        names = self._folder.names()
        with self._lock:
            nodes = sorted(self._tree.nodes(), key=lambda node: node.stop)
            recent = [
                node
                for node in nodes
                if node.seen > self._since or (node.resident and node.file is None)
            ]
            for node in recent:  # another process may have removed its file
                if node.file is not None and node.file.name not in names:
                    node.file = None
            noted = self._noted.items()
            self._noted = {name: when for name, when in noted if name in names}
            self._since = max((node.seen for node in recent), default=self._since)
        for node in recent:
            file = node.file
            if file is not None and self._noted.get(file.name, 0.0) < node.seen:
                self._folder.touch(file, node.seen)
                self._noted[file.name] = node.seen
            yield node

    def _write_node(self, node: Node) -> bool:
        """Write a node if it has unsaved data; return whether it was written."""
        with self._lock:
            text, start = node.text, node.start
            if not self._unsaved(node) or not plain(text):
                return False
            parts = {
                which: Held(rows, node.points.get(which))
                for which, rows in node.rows.items()
            }
        marks = [role.mark for role in self._roles]
        arrays, plan = encoded(parts, marks)
        segment = self._folder.write(
            text[:start], text[start:], arrays, plan, written=node.written
        )
        self._folder.touch(segment, node.seen)
        with self._lock:
            if node.stop == segment.stop and node.parent is not None:
                self._saved(node, segment)
        return True

    def _unsaved(self, node: Node) -> bool:
        """Return whether a node has unsaved data; False until its parent is saved."""
        parent = node.parent
        if parent is None or not node.resident:
            return False
        if parent.parent is not None and parent.file is None:
            return False  # without the parent's file, no process could use the node's
        rows = {self._roles[which].mark for which in node.rows}
        points = {self._roles[which].mark for which in node.points}
        return not (rows <= self._marks(node) and points <= self._ends(node))

    def _saved(self, node: Node, segment: Segment) -> None:
        """Record the file of a node, and of ancestors whose tokens are in the file."""
        node.written |= segment.written
        node.file = segment
        while node.parent is not None and node.start > segment.start:
            node = node.parent
            node.file = node.file or segment


def _in_tree(node: Node) -> bool:
    """Return whether a node is still in the tree; the root always is."""
    return node.parent is not None or node.stop == 0


def plain(tokens: Sequence[Any]) -> bool:
    """Return whether all are token ids, without placeholders of images."""
    return all(isinstance(token, int) for token in tokens)
