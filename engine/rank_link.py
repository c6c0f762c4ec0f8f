"""Messages between rank 0 and every other rank over TCP, and who is still there.

What `mx.distributed` sends are arrays, and who waits for one cannot be woken: a rank
that has died or stands still blocks the others inside of mlx, for ever with most
backends. So what rank 0 decides on the host goes by a link of its own, where a wait
ends when a rank is lost, and a thread watches over the time that is spent inside of
mlx. A link is a star: rank 0 hears every rank, and tells all of them who was lost.

    heard from a rank               known
    a closed connection             it has ended, or was killed: at once
    "left" and a reason             its program has left the stream by an error
    nothing for `silence` seconds   it stands still, or its machine does

A message is a line of JSON: [kind, stream, ...]. It knows neither models nor tokens.
"""

import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from mlx_speculation.errors import RankLostError

Message = list[Any]

BEAT_SECONDS = 1.0
# A rank that heard of a loss inside of mlx comes out by itself with the ring backend.
# Where it does not, it says so after the first time, and is ended after the second.
# mlx.launch ends all ranks a second or two after one of them.
SAY_SECONDS, GRACE_SECONDS = 0.5, 2.0
STATUS = 70  # of a process that is ended so


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that is gone.

    Attributes:
        rank: which.
        why: in words.
        stream: the stream that it has left; None: all.
        error: the name of the exception by which it left, if it said so.
        when: of `time.monotonic`.
    """

    rank: int
    why: str
    stream: int | None = None
    error: str = ""
    when: float = field(default_factory=time.monotonic)


class Link:
    """This rank's connections, from now on to `close` or the end of the process.

    Args:
        rank: this one.
        names: how every rank is called in messages, such as "rank 1 (host, process 7)".
        peers: the connections by rank: of rank 0 those to all others, of others that
            to rank 0.
        silence: seconds without a word after which a rank counts as lost.
        end: ends the process with a status; for tests.
    """

    def __init__(
        self,
        rank: int,
        names: list[str],
        peers: Mapping[int, socket.socket],
        *,
        silence: float,
        end: Callable[[int], Any],
    ) -> None:
        self.rank, self.names, self.silence = rank, names, silence
        self._peers, self._end = dict(peers), end
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._inbox: dict[tuple[int, int], deque[Message]] = {}
        self._losses: list[Loss] = []
        self._news = threading.Condition(threading.RLock())
        self._sending = threading.RLock()
        # Streams whose rounds run, and since when, innermost last.
        self._inside: list[tuple[int, float]] = []
        self._forgotten: set[int] = set()
        self._closed = False
        self._warned: Loss | None = None
        for peer in self._peers:
            self._thread(self._listen, peer)
        self._thread(self._watch)

    @property
    def others(self) -> list[int]:
        """The ranks at the other ends."""
        return sorted(self._peers)

    def send(self, message: Message, to: int | None = None) -> None:
        """Send a message to one rank, or to all at the other ends.

        A rank that is gone hears nothing, and is noticed where something is awaited.
        """
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer in self.others if to is None else [to]:
                try:
                    self._peers[peer].sendall(line)
                except OSError as error:
                    self._note(Loss(peer, f"its connection broke: {error}"))

    def receive(self, source: int, stream: int) -> Message:
        """Wait for the next message of a rank on a stream.

        Raises:
            RankLostError: a rank is gone, and there is no message from before; or it
                has gone on to a later stream.
        """
        with self._news:
            while not self._inbox.get((source, stream)):
                loss = self.loss(stream)
                if loss is None and any(
                    peer == source and number > stream for peer, number in self._inbox
                ):
                    loss = Loss(source, "it runs another part of its program", stream)
                if loss is not None:
                    raise self.error(loss)
                self._news.wait()
            message = self._inbox[source, stream].popleft()
            if not self._inbox[source, stream]:
                del self._inbox[source, stream]
            return message

    def loss(self, stream: int, wait: float = 0.0) -> Loss | None:
        """Return who was lost first, to a stream; wait so long for it to be known."""
        until = time.monotonic() + wait
        with self._news:
            while True:
                for loss in self._losses:
                    if loss.stream in (None, stream):
                        return loss
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)

    def error(self, loss: Loss) -> RankLostError:
        """Return what to raise for a loss; no stream can be begun after it."""
        with self._news:
            if loss.stream is not None:  # what it has submitted is not known
                self._losses.insert(0, Loss(loss.rank, loss.why, None, loss.error))
        return RankLostError(self._said(loss))

    def forget(self, stream: int) -> None:
        """Drop what is left of a stream that has ended on this rank."""
        with self._news:
            self._forgotten.add(stream)
            for peer in self._peers:
                self._inbox.pop((peer, stream), None)
            self._losses = [each for each in self._losses if each.stream != stream]

    def close(self) -> None:
        """End the connections; the ranks at the other ends take this one for lost."""
        self._closed = True
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @contextmanager
    def inside(self, stream: int) -> Iterator[None]:
        """Say that this thread may be waiting in mlx for other ranks, in a stream."""
        entry = stream, time.monotonic()
        with self._news:
            self._inside.append(entry)
        try:
            yield
        finally:
            with self._news:
                self._inside.remove(entry)

    def _said(self, loss: Loss) -> str:
        return (
            f"{self.names[loss.rank].capitalize()} is lost to "
            f"{self.names[self.rank]}: {loss.why}. The text cannot go on without it. "
            "Start the program again on all ranks."
        )

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _listen(self, peer: int) -> None:
        """Take in what a rank says, until its connection ends."""
        try:
            with self._peers[peer].makefile("rb") as lines:
                for line in lines:
                    self._take(peer, json.loads(line))
            why = "its connection was closed, so its process has ended"
        except (OSError, ValueError) as error:
            why = f"its connection broke: {error}"
        self._note(Loss(peer, why))

    def _take(self, peer: int, message: Message) -> None:
        kind, stream, *rest = message
        with self._news:
            self._heard[peer] = time.monotonic()
            if kind == "left" and stream in self._forgotten:
                return
            if kind == "left":
                rank, why, error = rest
                self._note(Loss(rank, why, stream, error), heard_from=peer)
            elif kind != "beat" and stream not in self._forgotten:
                self._inbox.setdefault((peer, stream), deque()).append(message)
            self._news.notify_all()

    def _note(self, loss: Loss, heard_from: int | None = None) -> None:
        """Note a loss; rank 0 tells the others, which do not hear each other."""
        with self._news:
            known = any(
                each.rank == loss.rank and each.stream in (None, loss.stream)
                for each in self._losses
            )
            if known:
                return
            self._losses.append(loss)
            self._news.notify_all()
        if self.rank == 0:
            said = ["left", loss.stream, loss.rank, loss.why, loss.error]
            for peer in self.others:
                if peer not in (loss.rank, heard_from):
                    self.send(said, to=peer)

    def _watch(self) -> None:
        """Send heartbeats, miss those of others, and end what cannot go on."""
        beat = 0.0
        while not self._closed:
            now = time.monotonic()
            if now - beat >= BEAT_SECONDS:
                beat = now
                self.send(["beat", None])
            for peer, heard in self._heard.items():
                if now - heard > self.silence:
                    why = f"nothing was heard from it for {now - heard:.0f} seconds"
                    self._note(Loss(peer, why))
            self._end_if_stuck(now)
            time.sleep(BEAT_SECONDS / 5)

    def _end_if_stuck(self, now: float) -> None:
        """Say, and then end, that the thread of a stream is stuck inside of mlx."""
        loss, seconds = self._longest_wait(now)
        if loss is None or seconds < SAY_SECONDS:
            return
        if self._warned is not loss:
            self._warned = loss
            print(  # noqa: T201  the process can say it in no other way
                f"RankLostError: {self._said(loss)} This process waits for it "
                f"inside of mlx, where nothing can wake it, and is ended with status "
                f"{STATUS} unless it comes out by itself.",
                file=sys.stderr,
                flush=True,
            )
        if seconds >= GRACE_SECONDS:
            self._end(STATUS)

    def _longest_wait(self, now: float) -> tuple[Loss | None, float]:
        """Return who was lost to a thread in mlx, and how long it has been there since.

        A loss may be older than the stream: to begin one raises, and takes no time.
        """
        found: tuple[Loss | None, float] = (None, 0.0)
        with self._news:
            for stream, entered in self._inside:
                loss = self.loss(stream)
                if loss is not None:
                    seconds = now - max(loss.when, entered)
                    found = max(found, (loss, seconds), key=itemgetter(1))
        return found
