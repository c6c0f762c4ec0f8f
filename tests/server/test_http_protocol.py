"""Connections of a bare app: slow clients, and a key checked before the body."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from mlx_speculation.server import Server
from mlx_speculation.server.http_protocol import Gate
from mlx_speculation.server.routes import Api
from support.processes.servers import answer_on, connect, exchange, packet, serving
from support.processes.wait_until import until

MEGABYTE = 1 << 20


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    bare = FastAPI()

    @bare.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    @bare.get("/")
    async def much() -> StreamingResponse:
        return StreamingResponse(b"x" * MEGABYTE for _ in range(64))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "app", lambda it: Gate(bare, it._settings, it._metrics))
        with serving(limits={"read_seconds": 0.5}, api_key="sesame") as server:
            yield server


KEY = {"x-api-key": "sesame"}


def test_a_second_request_on_a_connection_has_a_deadline_too(server: Server) -> None:
    with connect(server) as connection:
        sent = {**KEY, "Connection": "keep-alive"}
        connection.sendall(packet(b"x", path="/", headers=sent))
        received = b""
        while not received.endswith(b"\r\n\r\n1"):  # the head can arrive alone
            received += connection.recv(1000)
        assert b" 200 " in received
        connection.sendall(b"POST / HT")
        answer_on(connection).refused(408)


GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_a_reader_that_stops_is_given_up(server: Server) -> None:
    with connect(server) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(GET)
        assert reader.recv(100)
        until(lambda: server.connections == 1)
        until(lambda: server.connections == 0)


def test_a_reader_that_is_slow_but_reads_gets_everything(server: Server) -> None:
    read = 0
    with connect(server) as reader:
        reader.sendall(GET)
        while more := reader.recv(1 << 16):
            read += len(more)
            if read < 10 * MEGABYTE:
                time.sleep(0.001)
    assert read > 64 * MEGABYTE


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sesam"}, 401),
        ({**KEY, "Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer sesame"}, 404),
        (KEY, 404),
    ],
)
def test_a_key_and_an_origin_are_checked_before_the_body(
    server: Server, headers: dict[str, Any], status: int
) -> None:
    sent = packet(b"{}", path="/v1", headers=headers)
    if status != 404:
        sent = sent[:-2]  # the body never arrives
    assert exchange(server, sent).status == status
