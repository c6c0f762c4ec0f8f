"""Servers in this process, their clients, and requests as bytes."""

import gc
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import openai
from mlx.utils import tree_map
from pydantic import ValidationError

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.server import Defaults, Limits, Server, Settings
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.engine_thread import Worker
from mlx_speculation.server.request.models import as_invalid
from support.models.tiny_models import build
from support.models.tiny_tokenizer import letter_tokenizer
from support.processes.wait_until import until

LETTERS = 26
NAME = "tiny"


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("A") for letter in text]


def nearly(model: nn.Module, twin: nn.Module, scale: float, seed: int) -> nn.Module:
    """Give a twin a model's weights with noise: a draft that is sometimes right."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))

    def noisy(weight: mx.array) -> mx.array:
        return weight + scale * mx.random.normal(weight.shape, key=next(keys))

    twin.update(tree_map(noisy, model.parameters()))
    mx.eval(twin.parameters())
    return twin


def tiny_pair(name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """Return a target over letters, and a draft that is often right."""
    target = build(name, vocab=LETTERS)
    return target, nearly(target, build(name, vocab=LETTERS), 0.03, 1)


def make_tiny(name: str = "llama", **options: Any) -> Callable[..., Any]:

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        target, draft = tiny_pair(name)
        chosen = {"draft": draft, "draft_length": 4, **options}
        return SpeculativeGenerator(
            target, letter_tokenizer(LETTERS), prefix_cache=prefixes, **chosen
        )

    return make


@contextmanager
def serving(
    make: Callable[..., Any] | None = None,
    *,
    draft: str | None = "near",
    prefixes: PrefixCache | None = None,
    limits: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Run a server in this process, by default of a tiny pair."""
    usual = {"max_tokens": 64, "prompt_tokens": 256, "read_seconds": 5.0}
    made = Settings(
        draft=draft,
        limits=Limits(**{**usual, **(limits or {})}),
        **{"names": (NAME,), "defaults": Defaults(max_tokens=16), **settings},
    )
    with Server(made, make or make_tiny(), prefixes=prefixes) as server:
        yield server


@contextmanager
def client_of(server: Server, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=60,
        # Reading certificates would take 40 ms.
        http_client=openai.DefaultHttpxClient(verify=False),
    ) as client:
        yield client


class Listening(Protocol):
    url: str  # without a path


@dataclass(frozen=True, slots=True)
class Answer:
    status: int  # 0: no response
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def refused(self, status: int) -> dict[str, Any]:
        """Assert that the body is an error in OpenAI's form, and return the error."""
        assert self.status == status, (self.status, self.body[:300])
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        return error


def connect(server: Listening) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=120)


def exchange(server: Listening, sent: bytes, *, close: bool = False) -> Answer:
    """Send bytes and read the answer; with `close`, sending ends after the bytes."""
    with connect(server) as connection:
        try:
            connection.sendall(sent)
            if close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server may have closed already
        return answer_on(connection)


def answer_on(connection: socket.socket) -> Answer:
    received = b""
    while more := connection.recv(1 << 16):
        received += more
    if not received:
        return Answer(0, {}, b"")
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status = first.split()[:2]
    assert version.startswith("HTTP/1."), first
    pairs = (line.split(":", 1) for line in lines)
    return Answer(int(status), {k.lower(): v.strip() for k, v in pairs}, body)


def post(server: Listening, body: Any, **options: Any) -> Answer:
    """Send a request; its body becomes JSON unless it is bytes. See `packet`."""
    return exchange(server, packet(body, **options))


def packet(
    body: Any,
    *,
    path: str = "/v1/completions",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"Host": "here", "Connection": "close", "Content-Length": str(len(raw))}
    lines = {**usual, **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


def get(server: Listening, path: str, **headers: str) -> Answer:
    return post(server, b"", path=path, headers=headers, method="GET")


def rows_held(worker: Worker) -> int:
    """Return the number of waiting and running rows in all batches of the worker."""
    batches = [rows._batch for rows in tuple(worker._rows.values())]
    return sum(len(batch.waiting) + len(batch.running) for batch in batches)


def bytes_in_use(server: Server, prefixes: PrefixCache) -> int:
    """Clear the prefix cache after all requests; return the bytes still in use."""
    until(lambda: server.worker.taken == 0 and rows_held(server.worker) == 0)
    until(lambda: server.connections == 0)
    prefixes.clear()
    gc.collect()
    return mx.get_active_memory()


def refusal(act: Callable[[], Any]) -> int:
    """Return the status of the refusal that a call raises; 0: no refusal."""
    try:
        act()
    except ApiError as error:
        json.dumps(error.body_for())
        return error.status
    return 0


def read_body(model: Any, body: Mapping[str, Any]) -> Any:
    """Return a body as the server parses it; raise an `ApiError` if it is not valid."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        located = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise as_invalid(located, body) from error
