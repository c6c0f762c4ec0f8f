"""The end of a server's process: of its program, and by signals."""

import subprocess
from pathlib import Path

from support.processes.programs import python

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from support.processes.servers import connect, make_tiny, packet
from mlx_speculation.server import Limits, Server, Settings

limits = Limits(max_tokens=50_000)
server = Server(Settings(names=("tiny",), limits=limits), make_tiny())
server.start()
asked = connect(server)
asked.sendall(packet({{"prompt": "LONG", "max_tokens": 50_000, "stream": True}}))
asked.recv(1000)
"""


def test_a_program_that_ends_ends_its_server() -> None:
    """It hung, since Python waits for threads."""
    command = python(PROGRAM.format(tests=str(Path(__file__).parents[1])))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Exception" not in done.stderr
