"""Detection of lost neighbours in mlx's ring, by the state of its connections.

When the process at the other end of a connection ends, mlx's ring backend seldom raises
an error. Most often (9 of 10 kills of a busy pair, mlx 0.32.2) the thread that
evaluates waits for ever inside of mlx, where Python cannot wake it. But the system has
closed the connection. A thread polls the connections, and after a loss ends this
process if a call of mlx does not return.

The connections are this process's TCP connections at ports that MLX_HOSTFILE names.
Nothing is read from them or written to them. Without the ring backend there are no such
connections, and nothing is watched. A suspended process keeps its connections, so the
other ranks wait for it.
"""

import json
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_SECONDS = 0.2
# Seconds until a stuck process prints an error, and until it is ended. Both are counted
# from the later of two events: the detection of the loss, and the entry into mlx.
# The error comes early, since mlx.launch ends all ranks 1 to 2 s after one has ended.
SAY_SECONDS, END_SECONDS = 1.0, 4.0
STATUS = 70  # exit status
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Connections = Mapping[int, Sequence[socket.socket]]


class RingWatch:
    """Watches the connections to the neighbours until the process ends."""

    def __init__(
        self,
        connections: Connections,
        message: Callable[[Sequence[int]], str],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._connections = connections
        self._message, self._end = message, end
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        for rank, each in connections.items():
            for connection in each:
                self._ranks[connection.fileno()] = rank
                self._poll.register(connection, getattr(select, "POLLRDHUP", 0))
        self._depth, self._entered, self._warned = 0, 0.0, False
        self._known: tuple[list[int], float] | None = None
        self._lock = threading.Lock()
        if self._ranks:
            threading.Thread(target=self._run, daemon=True).start()

    def lost(self, wait: float = 0.0) -> list[int]:
        """Return the lost neighbours; wait up to `wait` seconds for a loss.

        The first loss causes the others, so all later calls return its ranks.
        """
        until = time.monotonic() + wait
        while self._ranks:
            with self._lock:
                if self._known is None:
                    result = self._poll.poll(0)
                    gone = {
                        self._ranks[file] for file, event in result if event & _GONE
                    }
                    if gone:
                        self._known = sorted(gone), time.monotonic()
                if self._known is not None:
                    return self._known[0]
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        return []

    def sever(self) -> None:
        """Close the connections; each neighbour then closes its own, and so on."""
        for each in self._connections.values():
            for connection in each:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark that this thread may be waiting for other ranks inside of mlx."""
        if self._depth == 0:
            self._entered = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _run(self) -> None:
        ended = False
        while not ended:
            time.sleep(LOOK_SECONDS)
            ended = bool(self.lost()) and self._end_if_stuck(time.monotonic())

    def _end_if_stuck(self, now: float) -> bool:
        """Report a thread stuck in mlx; if it stays stuck, end the process.

        Returns:
            Whether the process was ended.
        """
        if self._depth == 0 or self._known is None:
            return False
        ranks, since = self._known
        seconds = now - max(self._entered, since)
        if seconds >= SAY_SECONDS and not self._warned:
            self._warned = True
            print(  # noqa: T201  no exception can reach the stuck thread
                f"RankLostError: {self._message(ranks)} This process waits inside "
                f"mlx, where it cannot be interrupted. It will be ended with status "
                f"{STATUS}, unless mlx returns before that.",
                file=sys.stderr,
                flush=True,
            )
        if seconds < END_SECONDS:
            return False
        self._end(STATUS)
        return True


def ring_connections(
    rank: int, size: int, hosts: str | None = None
) -> dict[int, list[socket.socket]]:
    """Return this process's connections of mlx's ring, by the rank at the other end.

    A rank listens at its ports in the hostfile, accepts the connection of the rank
    before it, and connects to the rank after it.
    """
    path = os.environ.get("MLX_HOSTFILE", "") if hosts is None else hosts
    if not path or not Path(path).is_file():
        return {}
    with suppress(ValueError, TypeError, IndexError):
        listed = json.loads(Path(path).read_text("utf-8"))
        ports = [
            {int(str(each).rpartition(":")[2]) for each in local} for local in listed
        ]
        before, after = (rank - 1) % size, (rank + 1) % size
        ours, theirs = ports[rank], ports[after]
        result: dict[int, list[socket.socket]] = {}
        for connection in _connected():
            local, other = connection.getsockname()[1], connection.getpeername()[1]
            if local in ours:
                result.setdefault(before, []).append(connection)
            elif other in theirs:
                result.setdefault(after, []).append(connection)
            else:
                connection.close()
        return result
    return {}


def _connected() -> Iterator[socket.socket]:
    """Yield this process's TCP connections, each with a duplicated descriptor."""
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            result = socket.socket(fileno=os.dup(int(path.name)))
            try:
                result.getpeername()
                whole = result.family in (socket.AF_INET, socket.AF_INET6)
            except OSError:
                whole = False
            if whole and result.type == socket.SOCK_STREAM:
                yield result
            else:
                result.close()
