"""One pytest process, its environment and its limits."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_HUNG = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which a process is ended: one test's, and those of all."""

    test: float
    all: float


def test_environment(root: Path) -> dict[str, str]:
    """Return the environment in which the tests of a copy run.

    One thread for matrix products: there are as many processes as cores.
    """
    path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own = {"PYTHONPATH": path, "HYPOTHESIS_PROFILE": "mutants"}
    return {**one_thread, **os.environ, **own}


def outcome(copy: Path, tests: list[str], limits: Limits) -> tuple[str, str]:
    """Run tests until the first failure.

    Returns:
        "survived", "killed" or "timeout", and the test that failed or what happened.
    """
    with tempfile.TemporaryDirectory() as temporary:
        arguments, output = Path(temporary, "tests"), Path(temporary, "output")
        arguments.write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--tb=no"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"@{arguments}"]
        command += ["-o", f"faulthandler_timeout={limits.test}"]
        command += ["-o", "faulthandler_exit_on_timeout=true"]
        code = _run(command, copy, output, limits.all)
        text = output.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return "timeout", f"all tests in {limits.all:.0f} s"
    if code == 0:
        return "survived", ""
    if _HUNG.search(text):
        return "timeout", f"one test in {limits.test:.0f} s"
    failed = _FAILED.search(text)
    last = text.strip().rpartition("\n")[2]
    return "killed", failed[1] if failed else f"exit status {code}: {last}"


def _run(command: list[str], copy: Path, output: Path, limit: float) -> int | None:
    """Return the exit status, None where the limit ended the process.

    The limit ends its children too: they would hold the output open.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=test_environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def say(line: str) -> None:
    """Tell the progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
