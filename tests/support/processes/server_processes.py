"""Servers in separate processes, as users start them."""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation import demo_models
from support.processes.programs import MAIN, python
from support.processes.servers import Listening, connect, packet

DRAFT = str(demo_models()["draft"])
END_OF_TEXT = 0


@dataclass(slots=True)
class ServerProcess:
    popen: "subprocess.Popen[str]"
    url: str  # without a path


@contextmanager
def server_process(
    *options: Any, model: str | Path, before: str
) -> Iterator[ServerProcess]:
    """Run a server, after the code `before`; kill it in the end."""
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


@contextmanager
def streaming(server: Listening, body: dict[str, Any], events: int) -> Iterator[None]:
    """Ask for an endless stream, and wait for some of its events."""
    with connect(server) as connection:
        endless = {"stream": True, "logit_bias": {str(END_OF_TEXT): -100}}
        connection.sendall(packet({**endless, **body}))
        received = b""
        while received.count(b"data: ") < events:
            received += connection.recv(1 << 16)
        yield
