"""The end of a server's process: with its program, and by signals."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.processes.programs import python
from support.processes.server_processes import DRAFT, server_process, streaming

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from support.processes.servers import connect, make_tiny, packet
from mlx_speculation.server import Limits, Server, Settings

limits = Limits(max_tokens=50_000)
server = Server(Settings(names=("tiny",), limits=limits), make_tiny())
server.start()
client = connect(server)
client.sendall(packet({{"prompt": "LONG", "max_tokens": 50_000, "stream": True}}))
client.recv(1000)
"""


@pytest.mark.slow
def test_a_program_that_ends_ends_its_server() -> None:
    """Python waits for its threads at the end, and the server's threads do end."""
    command = python(PROGRAM.format(tests=str(Path(__file__).parents[1])))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("options", "body", "number"),
    [
        pytest.param(
            ["--grace-seconds", "60"],
            {"prompt": "x", "max_tokens": 8000},
            "SIGTERM",
            id="while a text comes",
        ),
        # The prompt is read in one forward, which Python cannot interrupt.
        pytest.param(
            ["--prefill-step-size", "40000", "--max-model-len", "40000"],
            {"prompt": "def f(x): return x\n" * 2000, "max_tokens": 8},
            "SIGINT",
            id="while a prompt is read",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_signal_ends_a_server_at_once(
    options: list[str], body: dict[str, Any], number: str
) -> None:
    """After the first signal, the server waits for running requests."""
    sent = getattr(signal, number)
    with (
        server_process(*options, model=DRAFT, before="") as server,
        streaming(server, body, 4 if "grace" in options[0] else 0),
    ):
        time.sleep(0.5)
        server.popen.send_signal(sent)
        with pytest.raises(subprocess.TimeoutExpired):
            server.popen.wait(0.5)
        server.popen.send_signal(sent)
        assert server.popen.wait(2) == 128 + sent
