"""Long prompts are read in chunks: other texts go on, and waiting clients can leave."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.server import Server
from mlx_speculation.server import job as jobs
from mlx_speculation.server.job import Job, Piece
from support.models.tiny_tokenizer import letter_tokenizer
from support.processes.servers import (
    LETTERS,
    NAME,
    client_of,
    connect,
    get,
    packet,
    post,
    rows_held,
    serving,
    tiny_pair,
)
from support.processes.wait_until import until

MANY = 50_000
LIMITS: dict[str, Any] = {"max_tokens": MANY, "prompt_tokens": MANY}
# `slow` reads one token between two rounds, so no test sees the end of this prompt.
ENDLESS: dict[str, Any] = {"model": NAME, "prompt": "AB" * 20_000, "max_tokens": 2}
SHORT: dict[str, Any] = {"model": NAME, "prompt": "SHORT", "max_tokens": MANY}


@pytest.fixture(name="events")
def _events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Return a list that records all events of requests, with their prompt lengths."""
    events: list[tuple[int, Any]] = []
    put = Job.put

    def noting(job: Job, event: Any) -> None:
        events.append((job.prompt_tokens, event))
        put(job, event)

    monkeypatch.setattr(Job, "put", noting)
    return events


@pytest.fixture(name="slow")
def _slow() -> Iterator[Server]:
    with serving(limits=LIMITS, prefill_step=1) as server:
        yield server


def test_a_short_request_goes_on_while_a_long_prompt_is_read(
    events: list[tuple[int, Any]],
) -> None:
    prompt = "THEQUICKBROWNFOX" * 25
    with (
        serving(limits=LIMITS, prefill_step=16) as server,
        client_of(server) as client,
        client.completions.create(**SHORT, stream=True) as short,
    ):
        next(iter(short))
        long = client.completions.create(model=NAME, prompt=prompt, max_tokens=9)
    wanted = (len(prompt), int), (len("SHORT"), Piece)
    kinds = [
        "read" if isinstance(event, int) else "short"
        for length, event in events
        if event and (length, type(event)) in wanted
    ]
    first = kinds.index("read")
    last = len(kinds) - kinds[::-1].index("read")
    assert kinds.count("read") == len(prompt) // 16
    assert kinds[first:last] == ["read", "short"] * (len(prompt) // 16 - 1) + ["read"]
    plain = SpeculativeGenerator(tiny_pair()[0], letter_tokenizer(LETTERS))
    assert long.choices[0].text == plain.generate(prompt, max_tokens=9).text


def test_the_log_reports_a_prompt_that_is_read_for_long(
    slow: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SAY_SECONDS", 0.0)
    caplog.set_level("INFO", "mlx_speculation.server")
    prompt = "B" * 100
    assert post(slow, {"prompt": prompt, "max_tokens": 1}).status == 200
    said = [re.match("([0-9]+) of 100 prompt", each) for each in caplog.messages]
    counts = [int(each[1]) for each in said if each]
    assert len(counts) > 1
    assert counts == sorted(counts)
    monkeypatch.setattr(jobs, "SAY_SECONDS", 30.0)
    caplog.clear()
    assert post(slow, {"prompt": prompt, "max_tokens": 1}).status == 200
    assert not [each for each in caplog.messages if "prompt tokens are read" in each]


def test_a_client_that_leaves_is_read_no_further(
    slow: Server, caplog: pytest.LogCaptureFixture
) -> None:
    worker = slow.worker
    caplog.set_level("INFO", "mlx_speculation.server")
    with connect(slow) as connection:
        connection.sendall(packet({**ENDLESS, "stream": True}))
        received = b""
        while b"keepalive" not in received:
            received += connection.recv(1 << 12)
    until(lambda: worker.taken == 0)
    until(lambda: rows_held(worker) == 0)
    begins, ended = caplog.messages
    said = re.fullmatch("a prompt of ([0-9]+) tokens arrives beside 0 texts", begins)
    counted = re.match(r"prompt ([0-9]+), reused 0, read ([0-9]+); text 0 ", ended)
    assert said
    assert counted
    assert 0 < int(counted[2]) < int(counted[1]) == int(said[1])
    assert b"requests_cancelled_total" in get(slow, "/metrics").body
    assert post(slow, {**SHORT, "max_tokens": 3}).status == 200


def test_a_prompt_that_takes_too_long_has_had_its_turn() -> None:
    limits = {**LIMITS, "seconds": 0.5}
    with serving(limits=limits, prefill_step=1) as server:
        answer = post(server, ENDLESS).refused(504)
        assert "took more than 0.5 seconds" in answer["message"]
        until(lambda: server.worker.taken == 0)


def test_stopping_does_not_wait_for_a_prompt(slow: Server) -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(slow, ENDLESS)))
    thread.start()
    until(lambda: rows_held(slow.worker) == 1)
    slow.stop()
    thread.join()
    assert answers[0].refused(503)["message"] == "The server is shutting down."
