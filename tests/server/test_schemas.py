"""A schema costs its own process: the engine, the machine and other clients go on."""

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers import Constraint
from mlx_speculation.samplers.constraints.llguidance import json_schema
from mlx_speculation.server import Limits
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.schemas import SchemaCompilers, SchemaConstraint, compilers
from mlx_speculation.server.schemas.template import Template
from mlx_speculation.server.server import ENGINE_SECONDS
from support.processes.server_processes import (
    DRAFT,
    Asked,
    ServerProcess,
    Streaming,
    processes,
    server_process,
)
from support.processes.servers import connect, get, packet, post
from support.processes.wait_until import until
from support.sampling.schemas import SCHEMAS, Schema

SECONDS = 1.5
# Beside a limit: a busy machine, and the processes that come and go.
SLACK = 30.0
TOKENIZER = load(Path(DRAFT))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def hostile(patterns: int = 26) -> dict[str, Any]:
    """Return a schema of 1 KB that takes 2.7 times the time for each pattern."""
    each = (f".*{chr(ord('a') + i)}.{{{i}}}.*" for i in range(patterns))
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in each]}


def asking(schema: Schema, **options: Any) -> dict[str, Any]:
    """Return a request for a text that fits a schema."""
    described = {"name": "one", "schema": schema}
    kind = {"type": "json_schema", "json_schema": described}
    return {"prompt": "x", "max_tokens": 8, "response_format": kind, **options}


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[ServerProcess]:
    """A server on which the time is short and the memory is not."""
    limits = ("--max-schema-seconds", SECONDS, "--max-schema-megabytes", 6000)
    with server_process(*limits, "--max-schemas", 2) as server:
        yield server
        assert get(server, "/health").status == 200


def test_other_texts_go_on_while_a_schema_compiles(server: ServerProcess) -> None:
    """All stood still for as long as it took, which for 26 patterns had no end."""
    stream = Streaming(server, {"prompt": "A long text", "max_tokens": 8000})
    until(lambda: stream.events > 5)
    started = time.monotonic()
    asked = Asked(server, asking(hostile()))
    until(lambda: bool(server.compilers()))
    before = stream.events
    error = asked.result().refused(400)
    took = time.monotonic() - started
    assert stream.events - before > 5
    assert not stream.ended
    stream.close()
    assert SECONDS - 0.5 < took < SECONDS + SLACK
    assert error["code"] == "schema_limit"
    assert error["param"] == "response_format"
    assert f"{SECONDS:g} seconds to compile" in error["message"]
    assert "--max-schema-seconds" in error["message"]


def test_many_such_schemas_take_turns(server: ServerProcess) -> None:
    many = [Asked(server, asking(hostile())) for _ in range(3)]
    most = 0
    while any(asked.answer is None for asked in many):
        most = max(most, len(server.compilers()))
        time.sleep(0.05)
    assert most == 2
    for asked in many:
        asked.result().refused(400)
    assert post(server, asking(PERSON)).status == 200
    until(lambda: not server.compilers())


def test_a_compiler_that_crashes_is_one_answer(server: ServerProcess) -> None:
    asked = Asked(server, asking(hostile()))
    until(lambda: bool(server.compilers()))
    os.kill(server.compilers()[0].id, signal.SIGSEGV)
    error = asked.result().refused(400)
    assert error["code"] == "schema_limit"
    assert "The compiler has failed on this schema" in error["message"]
    assert post(server, asking(PERSON)).status == 200


def test_what_compilers_are_forked_from_is_started_again(
    server: ServerProcess,
) -> None:
    assert post(server, asking(PERSON)).status == 200
    (template,) = processes()[server.popen.pid].children
    os.kill(template.id, signal.SIGKILL)
    until(lambda: post(server, asking(PERSON)).status == 200)


def test_memory_is_bounded_and_ending_waits_for_no_client_that_does_not_read() -> None:
    most = 100
    limits = ("--max-schema-megabytes", most, "--grace-seconds", 1)
    with server_process(*limits) as server:
        assert post(server, asking(PERSON)).status == 200
        (template,) = processes()[server.popen.pid].children
        asked = Asked(server, asking(hostile(), max_tokens=4))
        held = 0.0
        while asked.answer is None:
            held = max([held, *(one.megabytes for one in server.compilers())])
            time.sleep(0.01)
        error = asked.result().refused(400)
        assert f"needs more than {most} MiB of memory" in error["message"]
        assert "--max-schema-megabytes" in error["message"]
        assert most / 2 < held - template.megabytes < 2 * most
        assert post(server, asking(PERSON)).status == 200
        _end_beside_a_client_that_does_not_read(server)


def _end_beside_a_client_that_does_not_read(server: ServerProcess) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    with connection:
        connection.connect((host, int(port)))
        body = {"prompt": "x", "max_tokens": 8000, "logprobs": 20, "stream": True}
        connection.sendall(packet(body))
        assert connection.recv(1)
        started = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        assert time.monotonic() - started < 1 + SLACK


def test_clients_that_leave_and_ending_do_not_wait_for_a_schema() -> None:
    limits = ("--max-schema-seconds", 60, "--max-schema-megabytes", 6000)
    with server_process("--grace-seconds", 1, *limits) as server:
        connection = connect(server)
        connection.sendall(packet(asking(hostile())))
        until(lambda: bool(server.compilers()))
        connection.close()
        started = time.monotonic()
        until(lambda: not server.compilers())
        assert time.monotonic() - started < SLACK
        asked = Asked(server, asking(hostile()))
        until(lambda: bool(server.compilers()))
        held = processes()[server.popen.pid].children
        started = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        assert time.monotonic() - started < 1 + SLACK
        error = asked.result().refused(503)
        assert error["message"] == "The server is shutting down."
        until(lambda: all(one.id not in processes() for one in held))


def test_ending_does_not_wait_for_an_engine_that_hangs(tmp_path: Path) -> None:
    """A chat template may run for ever, and nothing stops it in a thread."""
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    loop = "{% for i in range(99999) %}"
    template = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(template)
    options = ("--grace-seconds", 0.5, "--max-rows", 1, "--max-queue", 0)
    with server_process(*options, model=folder) as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        path = "/v1/chat/completions"
        asked = [Asked(server, chat, path) for _ in range(2)]
        # One of them is turned away, once the other was taken.
        until(lambda: any(one.answer is not None for one in asked))
        started = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 1
        assert time.monotonic() - started < 0.5 + ENGINE_SECONDS + SLACK
        assert sorted(one.result().status for one in asked) == [429, 503]


class Compilers:
    """Compilers in this process, with more limits than a user may set."""

    def __init__(self, **limits: Any) -> None:
        self.own = SchemaCompilers(Limits(**limits))

    def __call__(self, schema: Schema) -> SchemaConstraint:
        end = time.monotonic() + 20

        def check() -> None:
            assert time.monotonic() < end, "no place became free"

        return self.own.compile(schema, TOKENIZER, check)


@pytest.fixture(name="compiled", scope="module")
def _compiled() -> Iterator[Compilers]:
    made = Compilers()
    yield made
    made.own.close()


def walk(constraint: Constraint, seed: int, most: int = 60) -> Iterator[Any]:
    """Yield each place of a random walk, by way of forks: its mask, and its end."""
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


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=40)
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
        made.own.close()


def test_a_child_that_ends_before_its_schema_is_no_fault_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had not said its process id then, and the template was taken for lost."""

    def made_without_limits(vocabulary: Any, limits: Any, check: Any) -> Template:
        return Template(vocabulary, {}, check)  # a child looks for them first

    monkeypatch.setattr(compilers, "Template", made_without_limits)
    made = Compilers()
    with pytest.raises(ApiError, match="The compiler has failed on this schema") as one:
        made(PERSON)
    assert one.value.status == 400
    template = made.own._template
    with pytest.raises(ApiError, match="The compiler has failed on this schema"):
        made(PERSON)
    assert made.own._template is template is not None
    made.own.close()


def test_a_process_that_does_not_answer_is_given_up() -> None:
    others = _grandchildren()
    made = Compilers(mask_seconds=0.2, schemas=1)
    schema = made(PERSON)
    state = schema.begin()
    (child,) = _grandchildren() - others
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(ConstraintError, match="--max-mask-seconds"):
        state.advance(int(np.flatnonzero(state.allowed())[0]))
    assert child not in _grandchildren()
    made(PERSON).close()  # its place is free again
    schema.close()
    made(PERSON).close()
    made.own.close()
    with pytest.raises(ApiError, match="shutting down"):
        made(PERSON)


def _grandchildren() -> set[int]:
    own = processes()[os.getpid()].children
    return {child.id for one in own for child in one.children}
