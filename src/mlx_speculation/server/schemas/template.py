"""Starts the program that forks a child for each schema, and ends what it has made."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mlx_speculation.samplers.constraints.llguidance import (
    PortableVocabulary,
    unreadable_tokenizer,
)

PROGRAM = Path(__file__).with_name("template_process.py")
POLL_SECONDS = 0.05
# To read a tokenizer, and to fork or to end a child.
START_SECONDS, ANSWER_SECONDS = 60.0, 5.0
ANSWER_BYTES = 4


class TemplateLostError(Exception):
    """Raised where the template does not answer, or was ended."""


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A child that waits for its schema."""

    channel: Connection  # to it
    process: int  # its id


class Template:
    """The process that children are forked from.

    It leads a process group of its own: signals of a terminal do not reach it, and one
    signal ends it with all children.

    Raises:
        InvalidRequestError: llguidance cannot read the tokenizer.
        TemplateLostError: it has not started.
    """

    def __init__(
        self,
        vocabulary: PortableVocabulary,
        limits: dict[str, Any],
        check: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self.end_token = vocabulary.end  # that of a text, the largest id
        self._control, other = socket.socketpair()
        with other:
            # Nothing of this process but its Python is needed there, such as a BLAS.
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
        """True while it runs."""
        return self._process.poll() is None

    def fork(self) -> ChildProcess:
        """Return a new child, which may have ended already.

        Raises:
            TemplateLostError: the template has gone.
        """
        ours, theirs = socket.socketpair()
        channel = Connection(ours.detach())
        try:
            with theirs:
                return ChildProcess(channel, self._ask(b"F", 0, theirs.fileno()))
        except TemplateLostError:
            channel.close()
            raise

    def end(self, child: ChildProcess) -> int | None:
        """End a child, and return its status as `os.waitpid` does; None: unknown."""
        child.channel.close()
        try:
            return self._ask(b"E", child.process)
        except TemplateLostError:
            self.close()
            return None

    def close(self) -> None:
        """End it and all children, whatever they do."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except OSError:  # it has not got its group yet, or has ended
                self._process.kill()
            self._process.wait()
        with self._lock:
            self._control.close()

    def _ask(self, kind: bytes, process: int, *descriptors: int) -> int:
        """Send a command, and return the number that answers it."""
        command = kind + process.to_bytes(4, "little")
        try:
            with self._lock:
                if descriptors:
                    socket.send_fds(self._control, [command], descriptors)
                else:
                    self._control.sendall(command)
                answer = self._control.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        except OSError as error:
            raise TemplateLostError("the template does not answer") from error
        if len(answer) < ANSWER_BYTES:
            raise TemplateLostError("the template has ended")
        return int.from_bytes(answer, "little", signed=True)

    def _introduce(
        self,
        vocabulary: PortableVocabulary,
        limits: dict[str, Any],
        check: Callable[[], None],
    ) -> None:
        settings = {"end": vocabulary.end, "limits": limits}
        try:
            with Connection(os.dup(self._control.fileno())) as first:
                first.send_bytes(json.dumps(settings).encode())
                first.send_bytes(vocabulary.text.encode())
                answer = received(first, START_SECONDS, check)
        except (OSError, EOFError) as error:
            raise TemplateLostError("the template has not started") from error
        if answer is None:
            raise TemplateLostError("the template does not start")
        if answer != b"ready":
            raise unreadable_tokenizer(answer.decode())
        self._control.settimeout(ANSWER_SECONDS)


def received(
    channel: Connection, seconds: float, check: Callable[[], None]
) -> bytes | None:
    """Return a message; None: none has come for so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if channel.poll(POLL_SECONDS):
            return channel.recv_bytes()
        check()
    return None
