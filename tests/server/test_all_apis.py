"""Simultaneous requests of all APIs: texts, cancellations, and resources in use."""

import gc
import json
import random
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from mlx_speculation import PrefixCache, Sampling, SpeculativeGenerator
from mlx_speculation.samplers import Chooser
from mlx_speculation.samplers.constraints.llguidance import json_schema
from mlx_speculation.server import Limits, Server
from support.identity import assert_same_up_to_ties
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.processes.server_processes import DRAFT, server_process
from support.processes.servers import (
    Answer,
    Listening,
    bytes_in_use,
    connect,
    nearly,
    packet,
    post,
    rows_held,
    serving,
)
from support.processes.wait_until import until

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<A>"
APIS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")
LEAVING = 0.15  # share of clients that leave before their answer is complete
CONSTRAINED = 0.1  # share of requests that are constrained by a schema
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PROMPTS = (
    "ABCDEFGHIJKLMNOP" * 4,
    "def add(a, b):\n    return a\n" * 3,
    "0123456789" * 7,
)
TOKENS = 16


@dataclass(frozen=True)
class Asked:
    path: str
    prompt: str
    stream: bool
    leaves: bool
    constrained: bool = False

    @property
    def body(self) -> dict[str, Any]:
        turn = [{"role": "user", "content": self.prompt}]
        body: dict[str, Any] = {
            "/v1/completions": {"prompt": self.prompt, "max_tokens": TOKENS},
            "/v1/responses": {"input": turn, "max_output_tokens": TOKENS},
        }.get(self.path, {"messages": turn, "max_tokens": TOKENS})
        if self.constrained:
            body |= self._form
        return {**body, "stream": self.stream, "temperature": 0}

    @property
    def _form(self) -> dict[str, Any]:
        form = {"type": "json_schema", "schema": SCHEMA}
        named = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        return {
            "/v1/messages": {"output_config": {"format": form}},
            "/v1/responses": {"text": {"format": {**form, "name": "s"}}},
        }.get(self.path, {"response_format": named})

    @property
    def rendered(self) -> str:
        chat = self.path != "/v1/completions"
        return f"<user>{self.prompt}<A>" if chat else self.prompt


def drawn(seed: int, count: int) -> list[Asked]:
    draw = random.Random(seed)
    return [
        Asked(
            draw.choice(APIS),
            draw.choice(PROMPTS)[: draw.randint(4, 60)],
            draw.random() < 0.5,
            draw.random() < LEAVING,
            draw.random() < CONSTRAINED,
        )
        for _ in range(count)
    ]


@cache
def plain() -> SpeculativeGenerator:
    return SpeculativeGenerator(build("llama"), _tokenizer())


@cache
def expected(prompt: str, constrained: bool) -> Any:
    schema = None
    if constrained:
        schema = json_schema(SCHEMA, plain().tokenizer, compact=True)
    return plain().generate(
        prompt, max_tokens=TOKENS, sampling=Sampling(), constraint=schema
    )


def _tokenizer() -> Any:
    wrapped = byte_tokenizer()
    wrapped._tokenizer.chat_template = TEMPLATE
    wrapped.has_chat_template = True
    return wrapped


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    target = build("llama")
    draft = nearly(target, build("llama"), 0.03, 1)
    return SpeculativeGenerator(
        target, _tokenizer(), draft=draft, prefix_cache=prefixes
    )


def ask(server: Listening, question: Asked) -> Answer | None:
    """Send a request; return None if its client leaves before the answer."""
    if not question.leaves:
        return post(server, question.body, path=question.path)
    with connect(server) as connection:
        connection.sendall(packet(question.body, path=question.path))
        if question.stream:
            connection.recv(200)
    return None


def text_of(answer: Answer, question: Asked) -> str:
    """Return the text of an answer, streamed or whole."""
    assert answer.status == 200, answer.body[:300]
    if not question.stream:
        return _whole(answer.json, question.path)
    lines = answer.body.decode().split("\n")
    data = [line[6:] for line in lines if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    assert "error" not in str([each.get("type") for each in events])
    if question.path == "/v1/messages":
        assert events[-1]["type"] == "message_stop"
        deltas = [each.get("delta", {}) for each in events]
        return "".join(each.get("text", "") for each in deltas)
    if question.path == "/v1/responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return "".join(
            each["delta"] for each in events if each["type"].endswith("text.delta")
        )
    assert data[-1] == "[DONE]"
    choices = [each["choices"][0] for each in events]
    return "".join(
        each["text"] if "text" in each else each["delta"].get("content", "")
        for each in choices
    )


def _whole(body: Any, path: str) -> str:
    if path == "/v1/messages":
        return "".join(each["text"] for each in body["content"])
    if path == "/v1/responses":
        return "".join(each["content"][0]["text"] for each in body["output"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def check(answer: Answer, question: Asked) -> int:
    """Assert that a text is plain decoding's; return 1 for a near-tie."""
    known = expected(question.rendered, question.constrained)
    text = text_of(answer, question)
    if question.constrained:
        assert json.loads(text)["a"] in ("x", "yy")
    if text == known.text or not known.text.strip():
        return 0
    plain_generator = plain()
    chooser = Chooser(Sampling(), 256)
    ids, tokens = (
        plain_generator.encode(text),
        plain_generator.encode(question.rendered),
    )
    same: Any = assert_same_up_to_ties
    model: Any = plain_generator.model
    assert same(model, chooser, tokens, known.tokens, ids, width=5) is not None
    return 1


def run(server: Server, requests: list[Asked], clients: int) -> None:
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(partial(ask, server), requests))
    pairs = zip(answers, requests, strict=True)
    ties = sum(check(answer, each) for answer, each in pairs if answer is not None)
    print(f"{len(requests)} requests, {answers.count(None)} left, {ties} near-ties")  # noqa: T201
    assert ties <= len(requests) // 50
    until(lambda: server.worker.taken == 0 and rows_held(server.worker) == 0)
    places = server.worker.schemas._places
    until(lambda: places._value == Limits().schemas)


def resident() -> float:
    """Return the peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_requests_of_all_apis_get_their_texts() -> None:
    with serving(make, prefixes=PrefixCache(1 << 22), max_rows=6) as server:
        run(server, drawn(1, 32), 8)


@pytest.mark.slow
def test_a_thousand_requests_leave_no_slot_and_no_memory() -> None:
    prefixes = PrefixCache(1 << 22)
    with serving(make, prefixes=prefixes, max_rows=8) as server:
        run(server, drawn(2, 300), 32)
        gc.collect()
        before, threads, most = (
            bytes_in_use(server, prefixes),
            threading.active_count(),
            resident(),
        )
        run(server, drawn(3, 1000), 32)
        gc.collect()
        assert bytes_in_use(server, prefixes) <= before + (1 << 16)
        until(lambda: threading.active_count() <= threads)
        print(f"resident: {most:.0f} MiB, then {resident():.0f}")  # noqa: T201
        assert resident() <= most * 1.05 + 8


@pytest.mark.slow
def test_two_signals_end_a_server_that_all_apis_ask() -> None:
    with server_process("--grace-seconds", "60", model=DRAFT, before="") as server:
        requests = [
            Asked(api, "def add(a, b):", stream, False)
            for api in APIS
            for stream in (True, False)
        ]
        opened = []
        for each in requests:
            opened.append(connect(server))
            body = {**each.body, "logit_bias": {"0": -100}}
            field = "max_output_tokens" if "responses" in each.path else "max_tokens"
            opened[-1].sendall(packet({**body, field: 2000}, path=each.path))
        assert opened[0].recv(10)
        server.popen.send_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="timed out"):
            server.popen.wait(0.5)
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(2) == 128 + signal.SIGTERM
        for each_socket in opened:
            each_socket.close()
