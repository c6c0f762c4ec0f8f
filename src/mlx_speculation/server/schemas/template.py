"""Start and end of the template process, which forks a child for each schema."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from mlx_speculation.samplers.constraints.llguidance import (
    PortableVocabulary,
    unreadable_tokenizer,
)

PROGRAM = Path(__file__).with_name("template_process.py")
POLL_SECONDS = 0.05
# Time limits of the template: to read the tokenizer, and to fork or end a child.
START_SECONDS, ANSWER_SECONDS = 60.0, 5.0
FORK = b"fork"  # as in template_process, which cannot be imported


class TemplateLostError(Exception):
    """The template does not answer, or has ended."""


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A child process, forked for one schema."""

    channel: Connection  # to the child
    process: int  # the child's process id


class Template:
    """The template process, from which children are forked.

    It leads a process group of its own. So signals of a terminal do not reach it, and
    one signal to the group kills it and all children.

    Raises:
        InvalidRequestError: llguidance cannot read the tokenizer.
        TemplateLostError: the process has not started.
    """

    def __init__(
        self,
        vocabulary: PortableVocabulary,
        limits: dict[str, Any],
        check: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self.end_token = vocabulary.end  # the largest id: the end of a text
        self._control, other = Pipe()
        with other:
            # The template needs no library that is preloaded here, such as a BLAS.
            environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
                env=environment,
            )
        try:
            self._introduce(vocabulary, limits, check)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def fork(self) -> ChildProcess:
        """Return a new child, which may already have ended.

        Raises:
            TemplateLostError: the template does not answer, or has ended.
        """
        channel, theirs = Pipe()
        try:
            with theirs:
                return ChildProcess(channel, self._ask(FORK, theirs.fileno()))
        except TemplateLostError:
            channel.close()
            raise

    def end(self, child: ChildProcess) -> int | None:
        """End a child, and return its status as `os.waitpid` does; None: unknown."""
        child.channel.close()
        try:
            return self._ask(b"%d" % child.process)
        except TemplateLostError:
            self.close()
            return None

    def close(self) -> None:
        """Kill the template and all children."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except OSError:  # the process has no group yet, or has ended
                self._process.kill()
            self._process.wait()
        with self._lock:
            self._control.close()

    def _ask(self, command: bytes, descriptor: int | None = None) -> int:
        """Send a command, and return the number that the template answers."""
        with self._lock:
            try:
                self._control.send_bytes(command)
                if descriptor is not None:
                    send_handle(self._control, descriptor, self._process.pid)
                if self._control.poll(ANSWER_SECONDS):
                    return int(self._control.recv_bytes())
            except (OSError, EOFError) as error:
                raise TemplateLostError("the template has ended") from error
        raise TemplateLostError("the template does not answer")

    def _introduce(
        self,
        vocabulary: PortableVocabulary,
        limits: dict[str, Any],
        check: Callable[[], None],
    ) -> None:
        settings = {"end": vocabulary.end, "limits": limits}
        try:
            self._control.send_bytes(json.dumps(settings).encode())
            self._control.send_bytes(vocabulary.text.encode())
            answer = received(self._control, START_SECONDS, check)
        except (OSError, EOFError) as error:
            raise TemplateLostError("the template has not started") from error
        if answer is None:
            raise TemplateLostError("the template does not start")
        if answer != b"ready":
            raise unreadable_tokenizer(answer.decode())


def received(
    channel: Connection, seconds: float, check: Callable[[], None]
) -> bytes | None:
    """Return the next message; None: none came within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if channel.poll(POLL_SECONDS):
            return channel.recv_bytes()
        check()
    return None
