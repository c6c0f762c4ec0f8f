"""Schema compilers: the number of child processes, their limits and errors.

A child lives from the compilation of its schema to the end of the text. There are at
most `Limits.schemas` children, of which at most `COMPILING` compile at the same time.
Further requests wait. This bounds the memory of all children together.
"""

import json
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from mlx_speculation.samplers.constraints.llguidance import (
    not_enforced,
    portable_vocabulary,
    unusable,
)
from mlx_speculation.server.api_errors import ApiError, invalid, unavailable
from mlx_speculation.server.config import Limits
from mlx_speculation.server.schemas.constraint import SchemaConstraint
from mlx_speculation.server.schemas.template import (
    POLL_SECONDS,
    ChildProcess,
    Template,
    TemplateLostError,
    received,
)

LOG = logging.getLogger("mlx_speculation.server")
COMPILING = 2
# Seconds that each mask adds to the time that all masks of a text may take.
STEP_SECONDS = 0.02
# Seconds after its time limit at which the server ends a child that has not ended.
OVERDUE_SECONDS = 1.0
OUT_OF_MEMORY = 3 << 8  # exit status 3 of template_process, as waitpid encodes it
UNUSABLE, NOT_ENFORCED = b"u", b"w"
# Prefix of a grammar; the same as in template_process, which cannot be imported
LARK = "lark:"
FIELD, CODE = "response_format", "schema_limit"
TOOLS = "tools"  # the field that errors of a tool call's grammar name
CLOSING = "The server is shutting down."
LOST = "The process that compiles schemas has ended. Try again."


class SchemaCompilers:
    """Compiles each schema in a child process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = threading.BoundedSemaphore(limits.schemas)
        self._compiling = threading.BoundedSemaphore(COMPILING)
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._closed = False

    def compile(
        self, schema: dict[str, Any] | str, tokenizer: Any, check: Callable[[], None]
    ) -> SchemaConstraint:
        """Return a constraint. The caller has to close it.

        Args:
            schema: a JSON schema, or `LARK` and a grammar in llguidance's syntax.
            tokenizer: the tokenizer of the text.
            check: called repeatedly during the wait; it raises to end the wait.

        Raises:
            ApiError: the schema cannot be used, a limit was hit, or the child or its
                template has ended.
            ConstraintError: llguidance failed on the mask of the first token.
            InvalidRequestError: the tokenizer cannot be used.
            MissingLibraryError: llguidance is not installed.
        """

        def waiting() -> None:
            if self._closed:
                raise unavailable(CLOSING)
            check()

        text = schema if isinstance(schema, str) else json.dumps(schema)
        _take(self._places, waiting)
        try:
            _take(self._compiling, waiting)
            try:
                return self._compiled(text, tokenizer, waiting)
            finally:
                self._compiling.release()
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """Kill all processes. Calls of `compile` that wait raise an error."""
        self._closed = True
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None

    def _compiled(
        self, schema: str, tokenizer: Any, waiting: Callable[[], None]
    ) -> SchemaConstraint:
        template, child = self._fork(tokenizer, waiting)
        limits = self._limits

        def leave(needed: bool) -> str:
            status = template.end(child)
            self._places.release()
            return self._refusal(status, masks=True).message if needed else ""

        try:
            answer = _answer(child, schema, limits.schema_seconds, waiting)
            if answer is not None:
                if answer[:1] in (UNUSABLE, NOT_ENFORCED):
                    raise _refused(schema, answer)
                seconds, end = limits.mask_seconds + OVERDUE_SECONDS, template.end_token
                return SchemaConstraint(
                    child.channel, answer, end, seconds=seconds, leave=leave
                )
        except BaseException:
            template.end(child)
            raise
        raise self._refusal(template.end(child))

    def _fork(
        self, tokenizer: Any, waiting: Callable[[], None]
    ) -> tuple[Template, ChildProcess]:
        """Return a new child of the template, which is started if it does not run."""
        with self._lock:
            waiting()
            if self._template is not None and not self._template.alive:
                LOG.error("the process that schemas are compiled from was lost")
                self._template.close()
                self._template = None
            try:
                if self._template is None:
                    vocabulary = portable_vocabulary(tokenizer)
                    limits = {
                        "seconds": self._limits.schema_seconds,
                        "mask_seconds": self._limits.mask_seconds,
                        "step_seconds": STEP_SECONDS,
                        "bytes": self._limits.schema_megabytes << 20,
                    }
                    self._template = Template(vocabulary, limits, waiting)
                return self._template, self._template.fork()
            except TemplateLostError as error:
                if self._template is not None:
                    self._template.close()
                raise unavailable(LOST) from error

    def _refusal(self, status: int | None, *, masks: bool = False) -> ApiError:
        """Return the error for a client whose child has ended.

        Args:
            status: the exit status of the child; None: unknown.
            masks: whether the child was computing masks of its compiled schema.
        """
        limits = self._limits
        if self._closed:
            return unavailable(CLOSING)
        if status is None:
            return unavailable(LOST)
        if status == OUT_OF_MEMORY:
            what = f"needs more than {limits.schema_megabytes} MiB of memory"
            option = "--max-schema-megabytes"
        elif status in (signal.SIGALRM, signal.SIGKILL) and masks:
            what = f"needs more than {limits.mask_seconds:g} seconds for its masks"
            option = "--max-mask-seconds"
        elif status in (signal.SIGALRM, signal.SIGKILL):
            what = f"takes more than {limits.schema_seconds:g} seconds to compile"
            option = "--max-schema-seconds"
        else:
            LOG.error("the compiler of a schema has ended with status %d", status)
            return invalid(
                "The compiler has failed on this schema, as it may where memory is "
                f"short ({limits.schema_megabytes} MiB, --max-schema-megabytes). "
                "Simplify it.",
                FIELD,
                code=CODE,
            )
        return invalid(
            f"The schema {what}, which is the limit of this server ({option}). "
            "Simplify it: patterns under allOf cost most.",
            FIELD,
            code=CODE,
        )


def _refused(schema: str, answer: bytes) -> ApiError:
    """Return the error for a client whose schema llguidance refuses."""
    calls, reason = schema.startswith(LARK), answer[1:].decode()
    field, kind = (TOOLS, "grammar of the tools") if calls else (FIELD, "JSON schema")
    if answer[:1] == NOT_ENFORCED:
        return invalid(str(not_enforced(reason, kind)), field)
    return invalid(str(unusable(reason, schema, kind)), field)


def _take(places: threading.Semaphore, waiting: Callable[[], None]) -> None:
    """Acquire a semaphore; call `waiting` repeatedly until then."""
    waiting()
    while not places.acquire(timeout=POLL_SECONDS):
        waiting()


def _answer(
    child: ChildProcess, schema: str, seconds: float, waiting: Callable[[], None]
) -> bytes | None:
    """Return a child's answer to a schema; None: it has ended or is late."""
    try:
        child.channel.send_bytes(schema.encode())
        return received(child.channel, seconds + OVERDUE_SECONDS, waiting)
    except (OSError, EOFError):
        return None  # the caller reads the exit status
