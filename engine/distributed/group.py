"""The ranks of a group, and the exchange that compares their places in the program.

All ranks have to send the same numbers of bytes in the same order, for two purposes:

    exchange    before every forward, each rank sends a line with its place in the
                program and receives all lines; if places differ, all ranks raise errors
    forwards    in the graph of a forward, the model's own layers exchange results, and
                rank 0 sends tokens

An exchange is evaluated before anything else is submitted. No finalizer sends anything,
since the ranks collect garbage at different times.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

from mlx_speculation.engine.distributed.ring_watch import RingWatch, ring_connections
from mlx_speculation.errors import (
    InvalidRequestError,
    RankLostError,
    RankMismatchError,
)
from mlx_speculation.models import Group, gathered

LINE_BYTES = 256
LOST_SECONDS = 2.0  # how long after mlx's error a closed connection may show up
_PACKAGES = ("mlx", "mlx-lm", "mlx-speculation")
_BACKEND = re.compile(r"\[(ring|nccl|jaccl|mpi)\]")

# Groups made so far. A key lists host and process of each rank; None: all ranks.
_met: dict[tuple[Any, ...] | None, "RankGroup"] = {}


class Place(NamedTuple):
    """The place of an exchange in the program; it must be equal on all ranks."""

    kind: str  # "make" (a generator), "begin" (a stream), "round" or "draft"
    number: int  # of the generator or the stream, in the order in which they are made
    step: int  # number of earlier exchanges of the stream

    def __str__(self) -> str:
        if self.kind == "make":
            return f"makes generator {self.number}"
        return f"is at exchange {self.step} ({self.kind}) of stream {self.number}"


class RankGroup:
    """The ranks of one group, seen from this rank; `leads` is true on rank 0.

    `word` is a random text, equal on all ranks and new at each start of the program.
    Methods that wait for other ranks raise RankLostError if a rank is gone.
    """

    def __init__(self, group: Group, names: Sequence[str], word: str) -> None:
        self.group, self.names, self.word = group, names, word
        self.rank, self.size = group.rank(), group.size()
        self.leads = self.rank == 0
        self._count = 0
        self._broken = ""
        connections = ring_connections(self.rank, self.size)
        self._watch = RingWatch(connections, self._gone)

    @classmethod
    def of(cls, group: Group) -> "RankGroup | None":
        """Return the ranks of a group, after waiting for all; None: it has one rank.

        Raises:
            InvalidRequestError: `group` is no group.
            RankMismatchError: the ranks run different versions.
        """
        if not isinstance(group, mx.distributed.Group):
            raise InvalidRequestError(
                f"group is a {type(group).__name__}, and a group of mx.distributed is "
                "needed. Pass mx.distributed.init()."
            )
        if group.size() == 1:
            return None
        every = group.size() == mx.distributed.init().size()
        if every and None in _met:
            return _met[None]
        result = gathered(_own(), group)
        _check_versions(result)
        key = None if every else tuple((each["host"], each["pid"]) for each in result)
        if key not in _met:
            names = [
                f"rank {rank} ({each['host']}, process {each['pid']})"
                for rank, each in enumerate(result)
            ]
            _met[key] = cls(group, names, result[0]["word"])
        return _met[key]

    def next_number(self) -> int:
        """Return a number for the next generator or stream, without an exchange."""
        self._count += 1
        return self._count

    def exchange(self, place: Place, said: Sequence[Any]) -> list[list[Any]]:
        """Send values to all ranks, wait for all ranks, and return the values of each.

        `said` holds values of JSON types; with `place` they take at most `LINE_BYTES`.

        Raises:
            RankMismatchError: the ranks are at different places; all of them raise it.
        """
        lines = [_parsed(line) for line in self._gather([*place, *said], LINE_BYTES)]
        for rank, line in enumerate(lines):
            if line is None or line[:3] != [*place]:
                self._raise_apart(place, rank, line)
        return [line[3:] for line in lines if line]

    def texts(self, text: str, size: int) -> list[str]:
        """Send a text of at most `size` bytes, and return the text of each rank."""
        raw = self._gather(text, size)
        return [each.decode(errors="replace").rstrip() for each in raw]

    def leave(self, why: str) -> None:
        """Give up the group while other ranks may be waiting for this rank's forward.

        In a ring, the other ranks notice at once. Nothing can begin on this group
        afterwards.
        """
        self._broken = self._broken or (
            f"{self.names[self.rank].capitalize()} has failed inside of a round, where "
            f"the others wait for it: {why} Start the program again on all ranks."
        )
        self._watch.sever()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a block that may wait in mlx; if a rank is lost, raise RankLostError."""
        try:
            with self._watch.inside():
                yield
        except RuntimeError as error:
            ranks = self._watch.lost(LOST_SECONDS)
            if not ranks and not _BACKEND.search(str(error)):
                raise
            self._broken = self._gone(ranks)
            self._watch.sever()
            raise RankLostError(self._broken) from error

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Let the block fail on all ranks if it fails on one.

        Raises:
            RankMismatchError: the block has failed on another rank, not on this one.
        """
        place = Place("make", self.next_number(), 0)
        try:
            yield
        except Exception as error:
            self._refusals(place, f"{type(error).__name__}: {error}")
            raise
        refused = self._refusals(place, "")
        if refused:
            raise RankMismatchError(
                f"Another rank cannot make this generator. {refused}"
            )

    def _refusals(self, place: Place, line: str) -> str:
        """Exchange errors; return the first failed rank and its error, else ""."""
        sizes = [size for (size,) in self.exchange(place, [len(line.encode())])]
        if not any(sizes):
            return ""
        texts = self.texts(line, max(sizes))
        rank = next(rank for rank, text in enumerate(texts) if text)
        return f"Rank {rank} raised {texts[rank]}"

    def _gather(self, said: Any, size: int) -> list[bytes]:
        """Send a text, or values as JSON, and return `size` bytes of every rank."""
        self._check()
        raw = (said if isinstance(said, str) else json.dumps(said)).encode()
        assert len(raw) <= size
        mine = mx.array(list(raw.ljust(size)), mx.uint8)[None]
        with self.inside():
            every = mx.distributed.all_gather(mine, group=self.group)
            mx.eval(every)
        rows: Any = every.tolist()
        return [bytes(row) for row in rows]

    def _check(self) -> None:
        """Raise RankLostError if a rank is gone or the group was given up."""
        ranks = [] if self._broken else self._watch.lost()
        if ranks:
            self._broken = self._gone(ranks)
            self._watch.sever()
        if self._broken:
            raise RankLostError(self._broken)

    def _gone(self, ranks: Sequence[int]) -> str:
        who = " and ".join(self.names[rank] for rank in ranks) or "a rank"
        lost = "are lost" if len(ranks) > 1 else "is lost"
        return (
            f"{who.capitalize()} {lost} to {self.names[self.rank]}: the connection "
            "was closed, so the process has ended, or has failed inside of a round, or "
            "has lost a rank itself. The text cannot go on without it. Start the "
            "program again on all ranks."
        )

    def _raise_apart(self, place: Place, rank: int, line: list[Any] | None) -> NoReturn:
        """Raise an error that names the places of both ranks."""
        there = "is inside a forward" if line is None else str(Place(*line[:3]))
        message = (
            f"Rank {rank} {there}, but rank {self.rank} {place}: their programs are "
            "no longer in step. Let every rank make the same streams and read their "
            "chunks in the same order."
        )
        if line is None:  # that rank waits for this rank's forward, which never comes
            self.leave(message)
        raise RankMismatchError(message)


def _own() -> dict[str, Any]:
    """Return what this rank sends about itself."""
    identity = {"host": socket.gethostname()[:200], "pid": os.getpid()}
    versions = {name: version(name) for name in _PACKAGES}
    return {**identity, **versions, "word": secrets.token_hex(16)}


def _check_versions(result: Sequence[dict[str, Any]]) -> None:
    for rank, each in enumerate(result):
        for name in _PACKAGES:
            if each[name] != result[0][name]:
                raise RankMismatchError(
                    f"Rank {rank} ({each['host']}) has {name} {each[name]}, and rank 0 "
                    f"({result[0]['host']}) has {result[0][name]}. Install the same "
                    "versions on all machines."
                )


def _parsed(line: bytes) -> list[Any] | None:
    """Return the values of a line; None: the bytes are no line."""
    try:
        result = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(result, list) and len(result) >= len(Place._fields)
    return result if whole else None
