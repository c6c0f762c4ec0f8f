"""Limits of the server: refused requests, and released resources."""

import asyncio
import gc
import json
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from starlette.datastructures import Headers

from mlx_speculation import (
    InvalidRequestError,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine.batch.generator import BatchGenerator
from mlx_speculation.server import Server, Settings, engine_thread
from mlx_speculation.server import job as jobs
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis.chat_completions import ChatBody
from mlx_speculation.server.engine_thread import Worker
from mlx_speculation.server.http_protocol import check_permission
from mlx_speculation.server.request.options import GenerationRequest
from support.models.position_tables import TABLES, with_table
from support.models.tiny_tokenizer import letter_tokenizer
from support.processes.servers import (
    NAME,
    answer_on,
    client_of,
    connect,
    exchange,
    get,
    make_tiny,
    packet,
    post,
    refusal,
    rows_held,
    serving,
)
from support.processes.wait_until import until

# More tokens than the server generates within the time of a test.
MANY = 50_000
LONG: dict[str, Any] = {"model": NAME, "prompt": "LONG", "max_tokens": MANY}
GOOD_PAGE, ALLOW_ORIGIN = "http://good.example", "access-control-allow-origin"
SHORT: dict[str, Any] = {"model": NAME, "prompt": "SHORT", "max_tokens": 2}


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    limits = {"max_tokens": MANY, "body_bytes": 2000, "read_seconds": 0.5}
    with serving(limits=limits, allowed_origins=(GOOD_PAGE,)) as server:
        yield server


def test_a_body_that_is_too_large_is_refused_unread(server: Server) -> None:
    error = post(server, b"[" * 2001).refused(413)
    assert error["code"] == "body_too_large"
    assert "2001 bytes; at most 2000" in error["message"]
    post(server, b"[" * 2000).refused(400)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    exchange(server, head % 10**17).refused(413)


def test_a_client_that_sends_too_much_gets_to_read_its_answer(server: Server) -> None:
    """The server reads on: http.client gives up if its connection is reset early."""
    request = urllib.request.Request(f"{server.url}/v1/completions", b" " * 30_000_000)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        assert answer.code == 413
        assert json.load(answer)["error"]["code"] == "body_too_large"


def test_a_prompt_that_is_too_long_is_refused(server: Server) -> None:
    error = post(server, {**SHORT, "prompt": "A" * 257}).refused(400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "prompt is too long: 257 tokens > 256 maximum. Shorten it, or start the server "
        "with a larger --max-prompt-tokens."
    )
    assert post(server, {**SHORT, "prompt": "A" * 256}).status == 200


@pytest.mark.filterwarnings("ignore::mlx_speculation.ContextLengthNotice")
@pytest.mark.parametrize(("model_len", "longest"), [(0, 20), (30, 30)])
def test_what_the_model_is_made_for_is_not_left(model_len: int, longest: int) -> None:
    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        generator = make_tiny()(prefixes)
        generator.model.args.max_position_embeddings = 20
        return SpeculativeGenerator(generator.model, generator.tokenizer)

    with serving(make, limits={"model_len": model_len}) as server:
        error = post(server, {**SHORT, "prompt": "A" * longest}).refused(400)
        assert error["code"] == "context_length_exceeded"
        advice = {
            0: "it: the model was made for 20 tokens.",
            30: "it, or start the server with a larger --max-model-len.",
        }
        assert error["message"] == (
            f"prompt is too long: {longest} tokens > {longest - 1} maximum. Shorten "
            f"{advice[model_len]}"
        )
        request = {**SHORT, "prompt": "A" * (longest - 3), "max_tokens": 50}
        answer = json.loads(post(server, request).body)
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("model_len", [0, 100])
def test_no_limit_goes_past_a_table_of_positions(name: str, model_len: int) -> None:
    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        model = with_table(name, 24)
        return SpeculativeGenerator(model, letter_tokenizer(26), draft=model)

    with serving(make, limits={"model_len": model_len}) as server:
        error = post(server, {**SHORT, "prompt": "A" * 24}).refused(400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == (
            "prompt is too long: 24 tokens > 23 maximum. Shorten it: the model has a "
            "table of 24 positions."
        )
        for stops in ([], ["QQ"]):
            request = {**SHORT, "prompt": "THE" * 7, "max_tokens": 50, "stop": stops}
            answer = json.loads(post(server, request).body)
            assert answer["usage"]["completion_tokens"] == 3
            assert answer["choices"][0]["finish_reason"] == "length"


def test_what_is_too_much_names_the_option_that_allows_more(server: Server) -> None:
    for more, limit, option in (
        ({"max_tokens": MANY + 1}, str(MANY), "max-tokens-limit"),
        ({"max_completion_tokens": MANY + 1}, str(MANY), "max-tokens-limit"),
        ({"num_draft_tokens": 65}, "64", "max-draft"),
        ({"speculative": {"max_draft": 65}}, "64", "max-draft"),
        ({"n": 33}, "32", "max-rows"),
    ):
        error = post(server, {**SHORT, **more}).refused(400)
        assert error["param"].rpartition(".")[2] in str(more)
        assert limit in error["message"]
        assert f"larger --{option}" in error["message"]
    assert "--max-body-bytes" in post(server, b"[" * 2001).refused(413)["message"]


def test_a_request_that_does_not_arrive_is_given_up(server: Server) -> None:
    started = time.monotonic()
    partial = packet(b" " * 99)[:-99]
    with connect(server) as silent, connect(server) as cut, connect(server) as drips:
        cut.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        drips.sendall(partial)
        for _ in range(300):  # each byte is in time, the whole body is not
            drips.sendall(b" ")
            if select.select([drips], [], [], 0.05)[0]:
                break
        else:
            raise AssertionError("it has waited for 15 seconds")
        for connection in (silent, cut, drips):
            answer_on(connection).refused(408)
    assert 0.4 < time.monotonic() - started < 60


def cancelled(server: Server) -> float:
    """Return the number of requests counted as cancelled."""
    page = get(server, "/metrics").body.decode()
    name = "mlx_speculation:requests_cancelled_total{"
    (line,) = (each for each in page.splitlines() if each.startswith(name))
    return float(line.rpartition(" ")[2])


def test_a_client_that_leaves_is_counted_wherever_its_request_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One request runs; three wait: for a row, for the engine and for a grammar."""
    busy, release = threading.Event(), threading.Event()
    real = Worker._admit

    def admit(worker: Worker) -> None:
        if busy.is_set():
            release.wait(20)
        real(worker)

    monkeypatch.setattr(Worker, "_admit", admit)
    with serving(limits={"max_tokens": MANY}, max_rows=1) as server:
        monkeypatch.setattr(server.worker.schemas, "compile", _waiting)
        opened = []
        for count in range(4):
            if count == 2:
                busy.set()
            kind = {"response_format": {"type": "json_object"}} if count == 3 else {}
            opened.append(connect(server))
            opened[-1].sendall(packet({**LONG, **kind}))
            until(lambda: server.worker.taken == count + 1)  # noqa: B023
            if count == 1:
                until(lambda: rows_held(server.worker) == 2)
        for connection in opened:
            connection.close()
        until(lambda: server.worker.taken == 3)  # the one with a grammar has left
        time.sleep(0.3)  # until the server has noticed that the other clients left
        release.set()
        until(lambda: server.worker.taken == 0)
        assert cancelled(server) == 4
        gc.collect()
        assert "never retrieved" not in caplog.text


def test_a_client_that_leaves_while_its_body_is_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a body is read, images are fetched, which may take seconds."""
    release, real = threading.Event(), ChatBody.request

    def slowly(body: ChatBody, settings: Settings) -> Any:
        release.wait(90)  # longer than `until` waits
        return real(body, settings)

    monkeypatch.setattr(ChatBody, "request", slowly)
    with serving(max_rows=4) as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 10**400}
        client = connect(server)
        client.sendall(packet(chat, path="/v1/chat/completions"))
        time.sleep(0.3)
        client.close()
        until(lambda: cancelled(server) == 4)
        release.set()


def _waiting(schema: Any, tokenizer: Any, check: Callable[[], None]) -> Any:
    """Stand in for a compilation that never ends."""
    while True:
        check()
        time.sleep(0.01)


def test_what_takes_too_long_is_ended() -> None:
    limits = {"seconds": 0.5, "max_tokens": MANY}
    with serving(limits=limits, max_rows=1) as server, client_of(server) as client:
        post(server, SHORT)  # warm up: the first request compiles for some time
        waiting: list[int] = []

        def wait() -> None:
            answer = post(server, LONG)
            assert "Retry-After" not in answer.headers or answer.status == 503
            waiting.append(answer.status)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One request ran too long; perhaps the other never had a row.
        assert sorted(waiting) in ([503, 504], [504, 504])
        with pytest.raises(openai.APIError, match=r"more than 0\.5 seconds"):
            list(client.completions.create(**LONG, stream=True))
        until(lambda: server.worker.taken == 0)
        assert post(server, SHORT).status == 200


def test_more_requests_than_may_wait_are_turned_away() -> None:
    limits = {"queue": 1, "max_tokens": MANY}
    with serving(limits=limits, max_rows=1) as server:
        connections = []
        for count in (1, 2):
            connections.append(connect(server))
            connections[-1].sendall(packet(LONG))
            until(lambda: server.worker.taken == count)  # noqa: B023
        answer = post(server, SHORT)
        assert answer.refused(429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        for connection in connections:
            connection.close()
        until(lambda: server.worker.taken == 0)
        assert post(server, SHORT).status == 200


def test_more_connections_than_may_be_are_turned_away() -> None:
    with serving(limits={"connections": 2}) as server:
        idle = [connect(server) for _ in range(2)]
        until(lambda: server.connections == 2)
        answer = exchange(server, b"")
        assert answer.refused(503)["code"] == "too_many_connections"
        for connection in idle:
            connection.close()
        until(lambda: server.connections == 0)
        assert get(server, "/health").status == 200


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic sésame", 401),
        ("Bearer ", 401),
        ("Bearer sésameX", 401),
        ("Bearer sésame", 0),
        ("bearer  sésame ", 0),
    ],
)
def test_a_key_is_the_whole_key(shown: str | None, status: int) -> None:
    # The client sends UTF-8; the server reads Latin-1.
    raw = [] if shown is None else [(b"authorization", shown.encode())]
    made = Settings(names=(NAME,), api_key="sésame")
    headers = Headers(raw=raw)
    assert refusal(lambda: check_permission(headers, "/v1/models", made)) == status


def test_the_key_has_to_be_shown() -> None:
    with serving(api_key="sesame") as server, client_of(server, "sesame") as client:
        for path in ("/metrics", "/v1/models"):
            assert get(server, path).refused(401)["code"] == "invalid_api_key"
        assert post(server, SHORT).status == 401
        assert get(server, "/health").status == 200
        assert client.completions.create(**SHORT).choices[0].text
        other = client.with_options(api_key="other")
        with pytest.raises(openai.AuthenticationError):
            other.completions.create(**SHORT)


def test_an_empty_key_is_none() -> None:
    with pytest.raises(InvalidRequestError, match="The API key is empty"):
        Settings(names=(NAME,), api_key=" ")


def test_web_pages_may_not_use_it_unless_they_are_named(server: Server) -> None:
    origin = {"Origin": "http://evil.example"}
    assert post(server, SHORT, headers=origin).refused(403)["code"]
    assert ALLOW_ORIGIN not in get(server, "/health", **origin).headers
    good = {"Origin": GOOD_PAGE}
    assert post(server, SHORT, headers=good).status == 200
    lines = "".join(f"{name}: {value}\r\n" for name, value in good.items())
    for line in (
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization,content-type",
    ):
        lines += f"{line}\r\n"
    path = "/v1/chat/completions"
    lines += "Host: here\r\nConnection: close\r\n"
    answer = exchange(server, f"OPTIONS {path} HTTP/1.1\r\n{lines}\r\n".encode())
    assert (answer.status, answer.headers[ALLOW_ORIGIN]) == (200, GOOD_PAGE)
    names = answer.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "content-type"} <= set(names)
    assert get(server, "/health", **good).headers[ALLOW_ORIGIN] == GOOD_PAGE


def test_the_last_event_of_an_engine_that_is_gone_is_read() -> None:
    """The last event of an engine is reported even if the engine is gone by then."""

    def gone() -> None:
        raise ApiError(503, "The engine has failed.")

    async def wait() -> None:
        job = jobs.Job(GenerationRequest(sampling=Sampling()), seconds=60)
        job.put(ApiError(503, "The server is shutting down."))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="shutting down"):
            await job.next(1, gone)
        with pytest.raises(ApiError, match="has failed"):
            await job.next(1, gone)

    asyncio.run(wait())


def test_stopping_cuts_off_what_runs_and_says_so() -> None:
    with serving(limits={"max_tokens": MANY}) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(server, LONG)))
        thread.start()
        until(lambda: server.worker.taken > 0)
        server.stop()
        thread.join()
        error = answers[0].refused(503)
        assert error["message"] == "The server is shutting down."
        with pytest.raises(OSError, match=r"(?i)refused"):
            connect(server)


def test_stopping_lets_what_runs_end_within_the_grace() -> None:
    with serving(limits={"max_tokens": MANY}) as server:
        answers = []
        body = {**LONG, "max_tokens": 60}
        thread = threading.Thread(target=lambda: answers.append(post(server, body)))
        thread.start()
        until(lambda: server.worker.taken > 0)
        server.stop(grace=20)
        thread.join()
        assert answers[0].status == 200


def test_a_server_whose_models_do_not_load_does_not_start() -> None:
    def make(prefixes: object) -> Any:
        raise InvalidRequestError("no such model")

    with pytest.raises(InvalidRequestError, match="no such model"), serving(make):
        pass


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, pytest.raises(InvalidRequestError, match="cannot listen at"):
        Server(Settings(names=(NAME,)), make_tiny(), port=port)


def test_a_batch_that_fails_as_a_whole_begins_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the failure once, however many requests fail by it."""
    real = BatchGenerator.next

    def fail(batch: BatchGenerator) -> Any:
        monkeypatch.setattr(BatchGenerator, "next", real)
        raise RuntimeError("a secret of this machine")

    monkeypatch.setattr(BatchGenerator, "next", fail)
    error = post(server, SHORT).refused(500)
    assert error["message"] == (
        "The server failed (RuntimeError); its log has the details."
    )
    assert post(server, SHORT).status == 200
    assert server.worker.taken == 0
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "a secret of this machine"


def test_an_engine_that_has_died_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(worker: Worker) -> None:
        raise RuntimeError("dead")

    with serving() as server:
        monkeypatch.setattr(Worker, "_admit", fail)
        until(lambda: not server.worker.alive)
        assert get(server, "/health").status == 503
        post(server, SHORT).refused(503)


def test_an_engine_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "OVERDUE_SECONDS", 0.1)
    release = threading.Event()
    real = BatchGenerator.next

    def hang(batch: BatchGenerator) -> Any:
        release.wait(20)
        return real(batch)

    with serving(limits={"seconds": 0.3}) as server:
        monkeypatch.setattr(BatchGenerator, "next", hang)
        error = post(server, SHORT).refused(504)
        assert error["message"] == "The engine does not answer."
        release.set()
        until(lambda: server.worker.taken == 0)


def test_an_engine_has_ended_when_the_thread_of_the_system_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stop` waits until /proc has no such thread: an exit before could abort."""
    paths: list[str] = []

    class Task:
        def __init__(self, path: str) -> None:
            self.path = path

        def exists(self) -> bool:
            paths.append(self.path)
            return len(paths) < 3

    monkeypatch.setattr(engine_thread, "Path", Task)
    with serving() as server:
        thread = server.worker._thread
        server.stop()
    assert paths == [f"/proc/self/task/{thread.native_id}"] * 3
