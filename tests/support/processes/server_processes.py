"""Servers in separate processes, as users start them, and their memory."""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_speculation import demo_models
from support.processes.programs import MAIN, python
from support.processes.servers import (
    Answer,
    Listening,
    connect,
    packet,
    post,
)

DRAFT = str(demo_models()["draft"])
END_OF_TEXT = 0


@dataclass(frozen=True, slots=True)
class Process:
    """One line of `ps`.

    Attributes:
        id: process id.
        megabytes: resident memory.
        children: ids of its children.
    """

    id: int
    megabytes: float
    children: list["Process"] = field(default_factory=list)


def processes() -> dict[int, Process]:
    """Return all running processes by their ids."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,rss=,stat="],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    lines = [[*map(int, row[:3])] for row in rows if not row[3].startswith("Z")]
    by_id = {line[0]: Process(line[0], line[2] / 1024) for line in lines}
    for line in lines:
        if line[1] in by_id:
            by_id[line[1]].children.append(by_id[line[0]])
    return by_id


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server.

    Attributes:
        popen: its process.
        url: its address, without a path.
    """

    popen: "subprocess.Popen[str]"
    url: str


@contextmanager
def server_process(
    *options: Any, model: str | Path, before: str
) -> Iterator[ServerProcess]:
    """Run a server; kill it in the end if it still runs.

    Args:
        options: options of the command.
        model: folder of the model.
        before: code that the program runs first.
    """
    command = ["serve", str(model), "--port", "0", "--blas", "stock"]
    popen = subprocess.Popen(
        python(f"{before}\n{MAIN}", *command, *map(str, options)),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    guard = threading.Timer(150, popen.kill)
    guard.start()
    with popen:
        try:
            assert popen.stderr is not None
            said = ""
            for line in popen.stderr:
                said += line
                if match := re.search(r"is served at (http\S+)/v1", line):
                    break
            else:
                raise AssertionError(said)
            yield ServerProcess(popen, match[1])
        finally:
            guard.cancel()
            popen.kill()


class Asked:
    """A request that waits for its answer in a thread.

    Args:
        server: the server.
        body: body of the request.
        path: path of the request.
    """

    def __init__(
        self,
        server: Listening,
        body: dict[str, Any],
        path: str = "/v1/completions",
    ) -> None:
        self.answer: Answer | None = None

        def wait() -> None:
            self.answer = post(server, body, path=path)

        self._thread = threading.Thread(target=wait, daemon=True)
        self._thread.start()

    def result(self) -> Answer:
        """Wait for the answer."""
        self._thread.join(60)
        assert self.answer is not None, "no answer has come"
        return self.answer


class Streaming:
    """A stream that a thread reads until it is closed.

    Args:
        server: the server.
        body: further keys of the request, which is an endless stream.
    """

    def __init__(self, server: Listening, body: dict[str, Any]) -> None:
        whole = {"stream": True, "logit_bias": {str(END_OF_TEXT): -100}, **body}
        self._connection = connect(server)
        self._connection.sendall(packet(whole))
        self._received = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def events(self) -> int:
        """Number of events so far."""
        return self._received.count(b"data: ")

    def close(self) -> None:
        """Close the connection."""
        self._connection.shutdown(2)
        self._thread.join(20)
        self._connection.close()

    def _read(self) -> None:
        try:
            while more := self._connection.recv(1 << 16):
                self._received += more
        except OSError:
            return  # the connection was reset
