"""Schema compilers: the number of child processes, their limits and errors.

A child lives from the compilation of its schema to the end of the text. There are at
most `Limits.schemas` children, which bounds their memory; further requests wait.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from mlx_speculation.samplers.constraints import llguidance
from mlx_speculation.server.api_errors import LOG, ApiError, invalid, unavailable
from mlx_speculation.server.config import Limits
from mlx_speculation.server.schemas import template_process as program
from mlx_speculation.server.schemas.constraint import SchemaConstraint, unpacked

POLL_SECONDS = 0.05
# Time limits of the template process: to read the tokenizer; to fork or end a child.
START_SECONDS, ANSWER_SECONDS = 60.0, 5.0
# Seconds that each mask adds to the time that all masks of a text may take.
STEP_SECONDS = 0.02
# Seconds that a child may outlive its time limit before the server ends it.
OVERDUE_SECONDS = 1.0
FIELD = "response_format"
CLOSING = "The server is shutting down."
LOST = "The process that compiles schemas has ended. Try again."


class Template:
    """The template process, from which children are forked.

    Signals of a terminal do not reach its process group. One signal to the group kills
    the template and its children. Methods raise ApiError if the template does not
    answer.
    """

    def __init__(
        self,
        vocabulary: llguidance.PortableVocabulary,
        limits: dict[str, Any],
        check: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self.end_token = vocabulary.end  # the id that ends a text
        self._control, other = Pipe()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", program.__file__],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "LD_PRELOAD": ""},  # it needs no BLAS
            )
        settings = {"end": vocabulary.end, "limits": limits}
        message = json.dumps({**settings, "tokenizer": vocabulary.text}).encode()
        try:
            answer = asked(self._control, message, START_SECONDS, check)
            if answer is None:
                raise unavailable(LOST)
            if answer != b"ready":
                raise llguidance.unreadable_tokenizer(answer.decode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the template and all children."""
        if self.process.returncode is None:
            with suppress(OSError):  # all have ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with self._lock:
            self._control.close()

    def ask(self, command: bytes, descriptor: int | None = None) -> int:
        """Send a command, and return the number that the template answers."""
        with self._lock, suppress(OSError, EOFError):
            self._control.send_bytes(command)
            if descriptor is not None:
                send_handle(self._control, descriptor, self.process.pid)
            if self._control.poll(ANSWER_SECONDS):
                return int(self._control.recv_bytes())
        self.close()
        raise unavailable(LOST)


class Child:
    """A child process for one schema. The process may already have ended."""

    _status: int | None = None

    def __init__(self, template: Template) -> None:
        self.template = template
        self.channel, theirs = Pipe()
        with theirs:
            self._process = template.ask(program.FORK, theirs.fileno())

    def end(self) -> int | None:
        """End the child, and return its status as `os.waitpid` does; None: unknown."""
        if not self.channel.closed:
            self.channel.close()
            with suppress(ApiError):
                self._status = self.template.ask(b"%d" % self._process)
        return self._status


class SchemaCompilers:
    """Compiles each schema in a child process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = threading.BoundedSemaphore(limits.schemas)
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._closed = False

    def compile(
        self, schema: dict[str, Any] | str, tokenizer: Any, check: Callable[[], None]
    ) -> SchemaConstraint:
        """Return the constraint of a JSON schema, or of a Lark grammar.

        A grammar has the prefix `LARK`. The caller has to close the constraint. `check`
        is called during the wait; an error that it raises ends the wait.

        Raise ApiError if the schema cannot be used or hits a limit, and the errors of
        llguidance's `Grammar`.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        compiling = self._limits.schema_seconds + OVERDUE_SECONDS
        masking = self._limits.mask_seconds + OVERDUE_SECONDS

        def waiting() -> None:
            if self._closed:
                raise unavailable(CLOSING)
            check()

        while not self._places.acquire(timeout=POLL_SECONDS):
            waiting()
        with ExitStack() as stack:
            stack.callback(self._places.release)
            child = self._fork(tokenizer, waiting)
            stack.callback(child.end)
            answer = asked(child.channel, text.encode(), compiling, waiting)
            if answer is None:
                raise self._refusal(child.end())
            if answer[:1] in (program.UNUSABLE, program.NOT_ENFORCED):
                raise _refused(text, answer)

            def ask(step: bytes) -> bytes | str:
                mask = asked(child.channel, step, masking)
                return mask or self._refusal(child.end(), masks=True).message

            first = unpacked(answer, child.template.end_token)
            return SchemaConstraint(ask, first, stack.pop_all())

    def close(self) -> None:
        """Kill all processes. Calls of `compile` that wait raise an error."""
        self._closed = True
        with self._lock:
            if self._template is not None:
                self._template.close()

    def _fork(self, tokenizer: Any, waiting: Callable[[], None]) -> Child:
        """Return a new child of the template, which is started if it does not run."""
        with self._lock:
            waiting()
            template = self._template
            if template is None or template.process.poll() is not None:
                if template is not None:
                    LOG.error("the template process of the schema compilers has ended")
                    template.close()
                limits = {**asdict(self._limits), "step_seconds": STEP_SECONDS}
                vocabulary = llguidance.portable_vocabulary(tokenizer)
                self._template = template = Template(vocabulary, limits, waiting)
            return Child(template)

    def _refusal(self, status: int | None, *, masks: bool = False) -> ApiError:
        """Return the error of an ended child; `masks`: its schema was compiled."""
        limits = self._limits
        if self._closed:
            return unavailable(CLOSING)
        if status is None:
            return unavailable(LOST)
        said = (
            "The schema {}, which is the limit of this server ({}). Simplify it: "
            "patterns under allOf cost most."
        )
        memory = f"{limits.schema_megabytes} MiB"
        if status == program.OUT_OF_MEMORY << 8:
            what = f"needs more than {memory} of memory"
            said = said.format(what, "--max-schema-megabytes")
        elif status not in (signal.SIGALRM, signal.SIGKILL):
            LOG.error("the compiler of a schema has ended with status %d", status)
            said = (
                "The schema cannot be compiled; the compiler may have run out of "
                f"memory ({memory}, --max-schema-megabytes). Simplify the schema."
            )
        elif masks:
            what = f"needs more than {limits.mask_seconds:g} seconds for its masks"
            said = said.format(what, "--max-mask-seconds")
        else:
            what = f"takes more than {limits.schema_seconds:g} seconds to compile"
            said = said.format(what, "--max-schema-seconds")
        return invalid(said, FIELD, code="schema_limit")


def _refused(schema: str, answer: bytes) -> ApiError:
    calls, reason = schema.startswith(program.LARK), answer[1:].decode()
    field, kind = ("tools", "grammar of the tools") if calls else (FIELD, "JSON schema")
    if answer[:1] == program.NOT_ENFORCED:
        return invalid(str(llguidance.not_enforced(reason, kind)), field)
    return invalid(str(llguidance.unusable(reason, schema, kind)), field)


def asked(
    channel: Connection,
    message: bytes,
    seconds: float,
    check: Callable[[], None] | None = None,  # called repeatedly during the wait
) -> bytes | None:
    """Return an answer; None: the process has ended, or takes more than `seconds`."""
    end = time.monotonic() + seconds
    with suppress(OSError, EOFError):
        channel.send_bytes(message)
        while time.monotonic() < end:
            if channel.poll(POLL_SECONDS):
                return channel.recv_bytes()
            if check is not None:
                check()
    return None
