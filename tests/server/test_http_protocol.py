"""Attacks on a bare app: requests that uvicorn alone would accept, or wait for."""

import json
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from mlx_speculation.server.config import Limits, Settings
from mlx_speculation.server.listener import Listener
from mlx_speculation.server.middleware import Gate
from support.processes.servers import answer_on, connect, exchange, get, packet
from support.processes.wait_until import until

MEGABYTE = 1 << 20
SECONDS = 0.5
LIMITS = Limits(body_bytes=4096, read_seconds=SECONDS, connections=8)
BAD = [
    b"NONSENSE\r\n\r\n",
    b"GET / HTTP/x\r\n\r\n",
    b"GET / HTTP/1.1\r\nNo header\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n",
]


def bare() -> FastAPI:
    app = FastAPI()

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.get("/")
    async def much() -> StreamingResponse:
        return StreamingResponse(b"x" * MEGABYTE for _ in range(64))

    return app


@pytest.fixture(name="listener")
def _listener() -> Iterator[Listener]:
    settings = Settings(names=("x",), limits=LIMITS)
    statuses: list[int] = []
    app = Gate(bare(), settings, statuses.append)
    made = Listener(app, LIMITS, statuses.append)
    made.start()
    yield made
    until(lambda: made.connections == 0)
    made.close(2.0)


@pytest.mark.parametrize("sent", BAD, ids=lambda sent: str(sent)[:50])
def test_what_is_no_http_is_refused_and_closed(listener: Listener, sent: bytes) -> None:
    exchange(listener, sent).refused(400)


@pytest.mark.parametrize("coding_first", [True, False])
@pytest.mark.parametrize("line", ["POST", "GET"])
def test_a_length_with_a_coding_ends_the_connection(
    listener: Listener, line: str, coding_first: bool
) -> None:
    pair = ["Content-Length: 2", "Transfer-Encoding: chunked"]
    headers = "\r\n".join(reversed(pair) if coding_first else pair)
    smuggled = b"0\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"{line} / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode()
    answer = exchange(listener, head + smuggled)
    answer.refused(400)
    assert b"HTTP/" not in answer.body


def test_a_body_is_refused_by_its_length_and_the_answer_is_read(
    listener: Listener,
) -> None:
    assert exchange(listener, packet(b"x" * 4096, path="/")).json == 4096
    exchange(listener, packet(b"x" * 4097, path="/")).refused(413)
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange(listener, chunked).refused(411)
    request = urllib.request.Request(f"{listener.url}/", b" " * 30_000_000)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        assert (answer.code, json.load(answer)["error"]["code"]) == (
            413,
            "body_too_large",
        )


def test_heads_that_are_too_large_are_refused(listener: Listener) -> None:
    long = b"a" * 70_000
    host = b" HTTP/1.1\r\nHost: x\r\n"
    exchange(listener, b"GET /" + long + host + b"\r\n").refused(431)
    exchange(listener, b"GET /" + host + b"X: " + long + b"\r\n\r\n").refused(431)
    many = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n"
    exchange(listener, many).refused(431)


def test_writers_that_are_slow_or_silent_are_given_up(listener: Listener) -> None:
    started = time.monotonic()
    with ExitStack() as opened:
        silent, cut, drips, second = (
            opened.enter_context(connect(listener)) for _ in range(4)
        )
        cut.sendall(b"POST / HTTP/1.1\r\nContent-Le")
        drips.sendall(packet(b" " * 99, path="/")[:-99])
        # The second request on a connection has a deadline too.
        second.sendall(packet(b"x", path="/", headers={"Connection": "keep-alive"}))
        received = b""
        while not received.endswith(b"\r\n\r\n1"):  # the head may arrive on its own
            received += second.recv(1000)
        assert b" 200 " in received
        second.sendall(b"POST / HT")
        for _ in range(100):  # each byte is in time, the whole body is not
            drips.sendall(b" ")
            if select.select([drips], [], [], 0.05)[0]:
                break
        for connection in (silent, cut, drips, second):
            answer_on(connection).refused(408)
    assert SECONDS * 0.8 < time.monotonic() - started < 30


def test_a_reader_that_stops_is_given_up(listener: Listener) -> None:
    with connect(listener) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reader.recv(100)
        until(lambda: listener.connections == 1)
        until(lambda: listener.connections == 0)


def test_a_reader_that_is_slow_but_reads_gets_everything(listener: Listener) -> None:
    read = 0
    with connect(listener) as reader:
        line = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader.sendall(line)
        while more := reader.recv(1 << 16):
            read += len(more)
            if read < 10 * MEGABYTE:
                time.sleep(0.001)
    assert read > 64 * MEGABYTE


def test_connections_are_counted(listener: Listener) -> None:
    opened = [connect(listener) for _ in range(8)]
    until(lambda: listener.connections == 8)
    assert exchange(listener, b"").refused(503)["code"] == "too_many_connections"
    for each in opened:
        each.close()
    until(lambda: listener.connections == 0)
    assert get(listener, "/").status == 200


def test_bodies_and_heads_that_end_early_are_refused(listener: Listener) -> None:
    whole = packet({"a": 1}, path="/")
    assert "ends" in exchange(listener, whole[:-2], close=True).refused(400)["message"]
    assert "ends" in exchange(listener, whole[:9], close=True).refused(400)["message"]
    assert exchange(listener, b"", close=True).status == 0


def test_a_key_and_an_origin_are_checked_before_the_body() -> None:
    settings = Settings(names=("x",), limits=LIMITS, api_key="sesame")
    made = Listener(Gate(bare(), settings, lambda _: None), LIMITS, lambda _: None)
    made.start()
    headers: dict[str, Any]
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer sesam"}, 401),
        ({"x-api-key": "sesame", "Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"x-api-key": "sesame"}, 200),
    ):
        sent = packet(b"{}", path="/v1", headers=headers)
        if status != 200:
            sent = sent[:-2]  # the body never arrives
        answer = exchange(made, sent)
        assert answer.status == (404 if status == 200 else status)
    made.close(2.0)
