"""Schemas compile in other processes: the engine, the machine and clients go on."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers import Constraint
from mlx_speculation.samplers.constraints.llguidance import json_schema
from mlx_speculation.server import Limits, Server
from mlx_speculation.server.answering import Answering
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings
from mlx_speculation.server.schemas import compilers
from mlx_speculation.server.schemas.compilers import SchemaCompilers, Template
from mlx_speculation.server.schemas.constraint import SchemaConstraint
from support.processes import servers
from support.processes.server_processes import DRAFT, server_process, streaming
from support.processes.servers import Answer, Listening, connect, get, packet, post
from support.processes.wait_until import until
from support.sampling.schemas import SCHEMAS, Schema

# Seconds added to a limit: the machine can be busy, and processes have to start.
SLACK = 30.0
LONG = {
    "schema_seconds": 60.0,
    "schema_megabytes": 6000,
    "schemas": 2,
    "read_seconds": 60.0,
}
TOKENIZER = load(Path(DRAFT))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def hostile(patterns: int = 26) -> dict[str, Any]:
    """Return a schema of 1 KB; each pattern multiplies the compile time by 2.7."""
    each = (f".*{chr(ord('a') + i)}.{{{i}}}.*" for i in range(patterns))
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in each]}


def asking(schema: Schema, **options: Any) -> dict[str, Any]:
    """Return a request for a text that fits a schema."""
    described = {"name": "one", "schema": schema}
    kind = {"type": "json_schema", "json_schema": described}
    return {"prompt": "x", "max_tokens": 8, "response_format": kind, **options}


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    return SpeculativeGenerator.from_pretrained(DRAFT)


def serving() -> AbstractContextManager[Server]:
    """Run a server in this process; its limits let schemas compile for long."""
    return servers.serving(make, draft=None, limits={**LONG, "max_tokens": 8000})


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    with serving() as server:
        yield server
        assert get(server, "/health").status == 200


def processes() -> dict[int, tuple[int, float]]:
    """Map the id of each running process to its parent's id and its own megabytes."""
    command = ["ps", "-A", "-o", "pid=,ppid=,rss=,stat="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {
        int(child): (int(parent), int(size) / 1024)
        for child, parent, size, state in rows
        if not state.startswith("Z")
    }


def children(*parents: int) -> set[int]:
    return {child for child, (parent, _) in processes().items() if parent in parents}


def template_of(server: Server) -> int:
    """Return the id of the process that a server's compilers are forked from."""
    template = server.worker.schemas._template
    assert template is not None
    return template.process.pid


def compilers_of(server: Server) -> set[int]:
    """Return the ids of the processes that hold a server's schemas."""
    if server.worker.schemas._template is None:
        return set()
    return children(template_of(server))


def asked(server: Listening, body: Any, **options: Any) -> Future[Answer]:
    """Send a request from a new thread; return the future of its answer."""
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(post, server, body, **options)
    pool.shutdown(wait=False)
    return answer


def test_other_texts_go_on_while_a_schema_compiles_until_its_client_leaves(
    server: Server,
) -> None:
    """The compilation of 26 patterns never ends.

    The text starts after the compiler: otherwise it might be finished, on a busy
    machine, before the compiler has started.
    """
    with connect(server) as connection:
        connection.sendall(packet(asking(hostile())))
        until(lambda: bool(compilers_of(server)))
        compiler = compilers_of(server)
        text = {"prompt": "A long text", "max_tokens": 8000}
        with streaming(server, text, 11):
            assert compilers_of(server) == compiler
    until(lambda: not compilers_of(server), SLACK)


def test_many_such_schemas_take_turns_and_one_that_crashes_is_one_answer(
    server: Server,
) -> None:
    many = [asked(server, asking(hostile())) for _ in range(3)]
    until(lambda: len(compilers_of(server)) == 2)
    first = compilers_of(server)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert compilers_of(server) == first
    for compiler in first:
        os.kill(compiler, signal.SIGSEGV)
    until(lambda: len(compilers_of(server) - first) == 1)
    (last,) = compilers_of(server) - first
    os.kill(last, signal.SIGSEGV)
    for request in many:
        error = request.result(60).refused(400)
        assert error["code"] == "schema_limit"
        assert error["param"] == "response_format"
        assert "The schema cannot be compiled" in error["message"]
    assert post(server, asking(PERSON)).status == 200
    until(lambda: not compilers_of(server))


def test_what_compilers_are_forked_from_is_started_again(server: Server) -> None:
    assert post(server, asking(PERSON)).status == 200
    os.kill(template_of(server), signal.SIGKILL)
    until(lambda: post(server, asking(PERSON)).status == 200)


def test_ending_waits_for_no_schema_and_for_no_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_speculation.server.server.PARTING_SECONDS", 0.2)
    with serving() as server, socket.socket() as connection:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        body = {"prompt": "x", "max_tokens": 8000, "logprobs": 20, "stream": True}
        connection.sendall(packet(body))
        assert connection.recv(1)
        request = asked(server, asking(hostile()))
        until(lambda: bool(compilers_of(server)))
        kept_processes = {template_of(server), *compilers_of(server)}
        started = time.monotonic()
        assert server.stop(grace=0.5)
        assert time.monotonic() - started < 0.5 + SLACK
        error = request.result(60).refused(503)
        assert error["message"] == "The server is shutting down."
        until(lambda: not kept_processes & processes().keys())


@pytest.mark.slow
def test_ending_does_not_wait_for_a_template_that_hangs(tmp_path: Path) -> None:
    """A chat template can loop forever, and its thread cannot be stopped."""
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    loop = "{% for i in range(99999) %}"
    template = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(template)
    sooner = "from mlx_speculation.server import server; server.ENGINE_SECONDS = 0.5"
    options = ("--grace-seconds", 0.3, "--max-rows", 1, "--max-queue", 0)
    with server_process(*options, model=folder, before=sooner) as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        path = "/v1/chat/completions"
        requests = [asked(server, chat, path=path) for _ in range(2)]
        # One of the two requests is turned away once the other has been taken.
        until(lambda: any(one.done() for one in requests))
        started = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        assert time.monotonic() - started < 0.3 + 0.5 + SLACK
        assert sorted(one.result(60).status for one in requests) == [429, 503]


class Compilers:
    """Schema compilers without a server."""

    def __init__(self, **limits: Any) -> None:
        self.compilers = SchemaCompilers(Limits(**limits))

    def __call__(self, schema: Schema) -> SchemaConstraint:
        end = time.monotonic() + 60

        def check() -> None:
            assert time.monotonic() < end, "no place became free"

        return self.compilers.compile(schema, TOKENIZER, check)


@pytest.fixture(name="compiled", scope="module")
def _compiled() -> Iterator[Compilers]:
    made = Compilers()
    yield made
    made.compilers.close()


def walk(constraint: Constraint, seed: int, most: int = 60) -> Iterator[Any]:
    """Yield the mask and the end flag of each state on a random walk over forks."""
    state, chance = constraint.begin(), random.Random(seed)
    for _ in range(most):
        allowed = state.allowed()
        yield allowed.tolist(), state.may_end
        ids = np.flatnonzero(allowed)
        if not len(ids):
            return
        for token in chance.choices(ids, k=2):
            fork = state.fork()
            fork.advance(int(token))
        state = fork


def refusal_of(schema: Schema, **limits: Any) -> tuple[str, float, float]:
    """Return the refusal of a schema, its seconds, and its peak memory in MB.

    The memory is that of the compiling process beyond that of its template process.
    """
    made = Compilers(**limits)
    made(PERSON).close()
    assert made.compilers._template is not None
    template, most_megabytes, began = (
        made.compilers._template.process.pid,
        0.0,
        time.monotonic(),
    )
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(made, schema)
        while not refused.done():
            running = processes()
            sizes = [size for parent, size in running.values() if parent == template]
            beside = [size - running[template][1] for size in sizes]
            most_megabytes = max([most_megabytes, *beside])
            time.sleep(0.005)  # leaves a core to the niced child
    took = time.monotonic() - began
    made(PERSON).close()
    made.compilers.close()
    with pytest.raises(ApiError) as error:
        refused.result()
    assert error.value.status == 400
    assert error.value.code == "schema_limit"
    return error.value.message, took, most_megabytes


def test_the_time_of_a_schema_is_bounded() -> None:
    said, took, _ = refusal_of(hostile(), schema_seconds=0.6, schema_megabytes=6000)
    assert "takes more than 0.6 seconds to compile" in said
    assert "--max-schema-seconds" in said
    assert 0.5 < took < 0.6 + SLACK


def test_the_memory_of_a_schema_is_bounded() -> None:
    said, _, most_megabytes = refusal_of(
        hostile(), schema_seconds=60.0, schema_megabytes=50
    )
    assert "needs more than 50 MiB of memory" in said
    assert "--max-schema-megabytes" in said
    assert 25 < most_megabytes < 100


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_masks_are_those_of_the_grammar(
    compiled: Compilers, schema: Schema, seed: int
) -> None:
    other = compiled(schema)
    assert isinstance(other, Constraint)
    try:
        here = json_schema(schema, TOKENIZER, compact=True)
        assert list(walk(other, seed)) == list(walk(here, seed))
    finally:
        other.close()


def test_a_token_that_is_not_allowed_leaves_the_state(compiled: Compilers) -> None:
    schema = compiled(PERSON)
    state = schema.begin()
    before = state.allowed()
    for token in (-1, len(before), int(np.flatnonzero(~before)[0])):
        with pytest.raises(ConstraintError, match=f"Token {token} is not allowed"):
            state.advance(token)
    assert state.allowed() is before
    schema.close()
    schema.close()
    with pytest.raises(ConstraintError, match="has ended"):
        state.advance(int(np.flatnonzero(before)[0]))


def test_a_step_that_fails_costs_no_other_one(compiled: Compilers) -> None:
    """After its first failure, a matcher of llguidance fails at every call."""
    schema = compiled(PERSON)
    state, other = schema.begin(), schema.begin()
    for _ in range(3):
        state.advance(int(np.flatnonzero(state.allowed())[0]))
    refused = int(np.flatnonzero(~other.allowed())[0])
    with pytest.raises(ConstraintError):
        schema.after((refused,))
    expected = state.fork()
    state.advance(int(np.flatnonzero(state.allowed())[0]))
    expected.advance(int(np.flatnonzero(expected.allowed())[0]))
    assert state.allowed().tolist() == expected.allowed().tolist()
    schema.close()


def test_masks_that_take_too_long_end_their_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers, "STEP_SECONDS", 1e-9)
    made = Compilers(mask_seconds=2e-3)
    schema = made({"type": "string", "minLength": 9000})
    try:
        with pytest.raises(ConstraintError, match="--max-mask-seconds"):
            list(walk(schema, 1, most=10_000))
    finally:
        schema.close()
        made.compilers.close()


def test_a_child_that_ends_before_its_schema_is_no_fault_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child can end before its process id arrives; the template process goes on."""

    def made_without_limits(vocabulary: Any, limits: Any, check: Any) -> Template:
        return Template(vocabulary, {}, check)  # a child fails without limits

    monkeypatch.setattr(compilers, "Template", made_without_limits)
    made = Compilers()
    with pytest.raises(ApiError, match="The schema cannot be compiled") as one:
        made(PERSON)
    assert one.value.status == 400
    template = made.compilers._template
    with pytest.raises(ApiError, match="The schema cannot be compiled"):
        made(PERSON)
    assert made.compilers._template is template is not None
    made.compilers.close()


def test_a_process_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers, "OVERDUE_SECONDS", 0.1)
    others = children(*children(os.getpid()))
    made = Compilers(mask_seconds=0.2, schemas=1)
    schema = made(PERSON)
    state = schema.begin()
    (child,) = children(*children(os.getpid())) - others
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(ConstraintError, match="--max-mask-seconds"):
        state.advance(int(np.flatnonzero(state.allowed())[0]))
    assert child not in processes()
    made(PERSON).close()  # the place of the killed compiler is free again
    schema.close()
    made(PERSON).close()
    made.compilers.close()
    with pytest.raises(ApiError, match="shutting down"):
        made(PERSON)


def test_a_client_that_leaves_as_its_schema_is_ready_gives_its_place_back() -> None:
    limits, stack = Limits(schemas=1), ExitStack()
    compiling = SchemaCompilers(limits)
    request = SimpleNamespace(
        schema=PERSON, calls=None, thinking_budget=None, options={}
    )
    job: Any = SimpleNamespace(request=request, cancelled=False, late=False)
    stack.callback(lambda: setattr(job, "cancelled", True))

    class Leaving:
        """Compiles a schema; the client leaves during the compilation."""

        def compile(self, *args: Any) -> SchemaConstraint:
            constraint = compiling.compile(*args)
            stack.close()
            return constraint

    generator = SimpleNamespace(tokenizer=TOKENIZER, model=None)
    worker: Any = SimpleNamespace(
        check_alive=lambda: None,
        schemas=Leaving(),
        template=None,
        main=SimpleNamespace(generator=generator),
    )
    unused: Any = None
    answering = Answering(worker, Settings(names=("x",), limits=limits), unused)
    answering._constraint(job, "normal", stack)
    with closing(compiling):
        assert compiling._places.acquire(blocking=False)
