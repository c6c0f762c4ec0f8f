"""The ranks of a group: how they meet, and the link between them.

Every rank runs the same program. Rank 0 decides, and tells the others:

    what                                told by
    the tokens of a draft               a sum over the ranks, in the graph
    a round's tokens and its count      likewise, one for both
    draft lengths, empty drafts, end    the link, which is heard while the device works

So no rank acts on numbers of its own, which may differ from rank 0's by a bit.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.rank_addresses import (
    HOST,
    address_for,
    own_machine,
    watched,
)
from mlx_speculation.engine.rank_link import Link
from mlx_speculation.errors import (
    InvalidRequestError,
    RankLostError,
    RankMismatchError,
)
from mlx_speculation.models import Group, gathered, told
from mlx_speculation.samplers import Sampling

TIMEOUT = "MLX_SPECULATION_RANK_TIMEOUT"
USUAL_TIMEOUT = 30.0  # a rank that reads weights may hold its interpreter for seconds
MEETING_SECONDS = 30.0
_PACKAGES = ("mlx", "mlx-lm", "mlx-speculation")

# By the processes of the group; None: all that there are.
_met: dict[tuple[Any, ...] | None, "Ranks"] = {}


class Ranks:
    """The ranks of one group, as one of them sees it.

    Args:
        group: the group, of two or more.
        link: between rank 0 and the others.
        secret: the same on all ranks, and in each start of a program another.
    """

    def __init__(self, group: Group, link: Link, secret: str) -> None:
        self.group, self.link = group, link
        self._secret = secret
        self._count = 0

    @classmethod
    def of(cls, group: Group) -> "Ranks | None":
        """Return the ranks of a group; None where this one is alone.

        All ranks have to call it, and wait here for each other.

        Raises:
            InvalidRequestError: it is no group.
            RankMismatchError: the ranks run other versions.
            RankLostError: rank 0 cannot be reached.
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
        found = gathered(own_machine() | _versions(), group)
        _check_versions(found)
        key = None if every else tuple((each["host"], each["pid"]) for each in found)
        if key not in _met:
            _met[key] = cls._meet(group, found)
        return _met[key]

    @classmethod
    def _meet(cls, group: Group, found: SequenceOf[dict[str, Any]]) -> "Ranks":
        names = [
            f"rank {rank} ({each['host']}, process {each['pid']})"
            for rank, each in enumerate(found)
        ]
        place: dict[str, Any] = {}
        listener: socket.socket | None = None
        if group.rank() == 0:
            try:
                listener = socket.create_server((address_for(found), 0))
                place["at"] = listener.getsockname()[:2]
            except OSError as error:
                place["error"] = f"{address_for(found)}: {error}"
            place["word"] = secrets.token_hex(16)
        place = gathered(place, group)[0]
        if "error" in place:
            raise RankLostError(
                f"Rank 0 cannot listen at {place['error']}. Set {HOST} to a name or "
                "address of its machine that the other ranks can reach."
            )
        if listener is not None:
            with listener:
                peers = _accepted(listener, names, place["word"])
        else:
            peers = {0: _connected(place, group.rank())}
        link = Link(
            group.rank(), names, peers, silence=_checked_timeout(), end=os._exit
        )
        return cls(group, link, place["word"])

    @property
    def rank(self) -> int:
        """The number of this one; rank 0 decides."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size()

    def told(self, array: mx.array) -> mx.array:
        """Return rank 0's array, see `models.ranks`."""
        return told(array, self.group)

    def next_number(self) -> int:
        """Return the number of what all ranks begin next: a generator, or a stream."""
        self._count += 1
        return self._count

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Let all ranks refuse what one of them refuses inside the block.

        Raises:
            RankMismatchError: another rank has refused it.
            RankLostError: a rank is gone.
        """
        number = self.next_number()
        refused = ""
        try:
            yield
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
            self._compare(number, refused)
            raise
        wrong = self._compare(number, "")
        if wrong:
            raise RankMismatchError(
                f"Another rank has refused what this one takes. {wrong}"
            )

    def _compare(self, number: int, refused: str) -> str:
        """Return who has refused something and why; rank 0 hears and tells it."""
        said = f"Rank {self.rank} says: {refused}" if refused else ""
        if self.rank:
            self.link.send(["made", number, said])
            return str(self.link.receive(0, number)[2])
        heard = [said, *(self.link.receive(r, number)[2] for r in self.link.others)]
        said = next((each for each in heard if each), "")
        self.link.send(["made", number, said])
        return said

    def with_seed(self, sampling: Sampling, stream: int) -> Sampling:
        """Return these options with a seed, the same on all ranks if there was none."""
        if sampling.seed is not None:
            return sampling
        digest = hashlib.sha256(f"{self._secret} {stream}".encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}


def _check_versions(found: SequenceOf[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        for name in _PACKAGES:
            if each[name] != found[0][name]:
                raise RankMismatchError(
                    f"Rank {rank} ({each['host']}) has {name} {each[name]}, and rank 0 "
                    f"({found[0]['host']}) has {found[0][name]}. Install the same "
                    "versions on all machines."
                )


def _checked_timeout() -> float:
    said = os.environ.get(TIMEOUT, "") or str(USUAL_TIMEOUT)
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds < 1e9:
        raise InvalidRequestError(
            f"{TIMEOUT} is {said!r}, and a number of seconds of at least 2 is needed: "
            "how long a rank may stay silent before it counts as lost."
        )
    return seconds


def _accepted(
    listener: socket.socket, names: SequenceOf[str], word: str
) -> dict[int, socket.socket]:
    """Wait for every other rank; who does not know the word is sent away."""
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + MEETING_SECONDS
    while len(peers) < len(names) - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [name for i, name in enumerate(names) if i and i not in peers]
            raise RankLostError(
                f"{missing[0].capitalize()} did not come to rank 0 at "
                f"{listener.getsockname()[0]} in {MEETING_SECONDS:.0f} seconds. Set "
                f"{HOST} to an address of rank 0 that it can reach."
            ) from None
        rank = _rank_of(connection, word)
        if 0 < rank < len(names) and rank not in peers:
            peers[rank] = watched(connection)
        else:
            connection.close()
    return peers


def _rank_of(connection: socket.socket, word: str) -> int:
    """Return which rank is calling; 0 for who does not know the word."""
    connection.settimeout(5.0)
    try:
        with connection.makefile("rb", buffering=0) as lines:  # and nothing behind it
            said = lines.readline(200).decode(errors="replace").split()
    except OSError:
        return 0
    connection.settimeout(None)
    known = len(said) == 2 and secrets.compare_digest(said[0].encode(), word.encode())
    return int(said[1]) if known and said[1].isdecimal() else 0


def _connected(place: dict[str, Any], rank: int) -> socket.socket:
    host, port = place["at"]
    try:
        connection = socket.create_connection((host, port), timeout=MEETING_SECONDS)
        connection.sendall(f"{place['word']} {rank}\n".encode())
    except OSError as error:
        raise RankLostError(
            f"Rank {rank} cannot reach rank 0 at {host}, port {port}: {error}. Set "
            f"{HOST} on rank 0 to an address that the other ranks can reach."
        ) from error
    connection.settimeout(None)
    return watched(connection)
