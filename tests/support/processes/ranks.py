"""Runs programs on several ranks of one machine, with a time limit.

The ranks use mlx's ring; with RANKS_BACKEND=nccl, NCCL and a GPU for each rank.
RANKS_SECONDS changes the limit. The limit is long: threads of the ring keep cores busy
while they wait, so a launch of ten seconds may take two minutes on a busy machine.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.programs import python

ROOT = Path(__file__).parents[3]
PROGRAM = "from support.processes.rank_programs import main; main()"
BACKEND = os.environ.get("RANKS_BACKEND", "ring")
SECONDS = float(os.environ.get("RANKS_SECONDS", "400"))


@dataclass(frozen=True, slots=True)
class Ended:
    """End of one rank's process."""

    status: int  # negative: the signal that killed it
    said: Any  # result written with `rank_programs.say`
    errors: str  # standard error


def run_ranks(
    program: str,
    folder: Path,
    *,
    ranks: int = 2,
    seconds: float = SECONDS,
    launcher: bool = False,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Ended]:
    """Run a program of `rank_programs` on every rank; kill processes left at the end.

    `meanwhile` is called with the ids of the running processes: those of the ranks, or
    with `launcher` that of mlx.launch, which starts the ranks. The folder must be
    empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(os.environ, RANKS_FOLDER=str(folder))
    paths = [str(ROOT / "src"), str(ROOT / "tests"), named.get("PYTHONPATH", "")]
    named["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    named["MLX_SPECULATION_CACHE"] = str(folder / "measured")
    command = python(PROGRAM, *program.split())
    if launcher:
        started = [_launched(command, ranks, folder, named)]
    else:
        started = _spawned(command, ranks, folder, named)
    until = time.monotonic() + seconds
    try:
        if meanwhile is not None:
            meanwhile([process.pid for process in started])
        for process in started:
            process.wait(max(0.1, until - time.monotonic()))
    except (subprocess.TimeoutExpired, AssertionError) as error:
        raise AssertionError(f"{error}: {_errors(folder)}") from error
    finally:
        for process in started:
            _kill(process)
    statuses = [process.returncode for process in started] * (ranks if launcher else 1)
    return [
        Ended(status, _said(folder, rank), _errors(folder).get(rank, ""))
        for rank, status in enumerate(statuses)
    ]


def wait_for(path: Path, seconds: float = 300.0) -> None:
    """Wait until a rank has written a file; fail if a rank has failed."""
    until = time.monotonic() + seconds
    while not path.exists():
        assert not path.with_name("failed").exists(), "a rank has failed"
        assert time.monotonic() < until, f"nobody has written {path.name}"
        time.sleep(0.02)


def _spawned(
    command: Sequence[str], ranks: int, folder: Path, environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    hosts, ports = folder / "hosts.json", _ports(ranks)
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    started = []
    for rank in range(ranks):
        ours = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        if BACKEND == "nccl":
            ours = {
                "NCCL_HOST_IP": "127.0.0.1",
                "NCCL_PORT": str(ports[0]),
                "MLX_WORLD_SIZE": str(ranks),
                "MLX_RANK": str(rank),
                "CUDA_VISIBLE_DEVICES": str(rank),
            }
        with (folder / f"errors{rank}.txt").open("wb") as errors:
            started.append(
                subprocess.Popen(
                    command,
                    env=environment | ours,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            )
    return started


def _launched(
    command: Sequence[str], ranks: int, folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    launch = Path(sys.executable).with_name("mlx.launch")
    options = ["--backend", BACKEND, "-n", str(ranks)]
    port = "--nccl-port" if BACKEND == "nccl" else "--starting-port"
    options += [port, str(_ports(1)[0])]
    with (folder / "errors0.txt").open("wb") as errors:
        return subprocess.Popen(
            [str(launch), *options, "--", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )


def _ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _said(folder: Path, rank: int) -> Any:
    path = folder / f"rank{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _errors(folder: Path) -> dict[int, str]:
    return {
        int(path.stem.removeprefix("errors")): path.read_text(errors="replace")[-4000:]
        for path in sorted(folder.glob("errors*.txt"))
    }
