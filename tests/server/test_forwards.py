"""Forwards that clients share: JSON schemas add none.

Each round admits one request, and only once all requests have arrived. So the counts
do not depend on time.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mlx_speculation import PrefixCache, SpeculativeGenerator, demo_models
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.server import Server
from mlx_speculation.server.engine_thread import Worker
from support.processes.servers import post, serving

CLIENTS, TOKENS = 8, 48
PLAIN = "def add(first, second):\n    return"


def body(number: int, *, schema: bool) -> dict[str, Any]:
    """Return a request; its schema is unique and asks for more text than max_tokens."""
    result: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{PLAIN} {number}"}],
        "max_tokens": TOKENS,
        "logit_bias": {"0": -100},  # the end-of-text token
        "speculative": {"off": True},
    }
    if schema:
        item = {"enum": [f"name{number}", "other"]}
        named = {f"list{number}": {"type": "array", "items": item, "minItems": 60}}
        described = {
            "type": "object",
            "properties": named,
            "required": [*named],
            "additionalProperties": False,
        }
        form = {"name": "lists", "schema": described}
        result["response_format"] = {"type": "json_schema", "json_schema": form}
    return result


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    return SpeculativeGenerator.from_pretrained(
        demo_models()["draft"], prefix_cache=prefixes
    )


def forwards(server: Server, bodies: list[dict[str, Any]]) -> int:
    """Return the number of target forwards that these requests take together."""
    (rows,) = server.worker._generators._rows.values()
    stats: BatchStatistics = rows._batch.stats
    before = stats.forwards
    server.worker.wanted = len(bodies)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(bodies)) as clients:
        ask = partial(post, server, path="/v1/chat/completions")
        answers = list(clients.map(ask, bodies))
    for request, answer in zip(bodies, answers, strict=True):
        assert answer.status == 200, answer.body[:300]
        assert answer.json["usage"]["completion_tokens"] == TOKENS
        text = answer.json["choices"][0]["message"]["content"]
        assert text.startswith('{"list') == ("response_format" in request)
    assert not stats.alone
    return stats.forwards - before


def test_schemas_cost_no_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Worker._admit

    def admit(worker: Worker) -> None:
        """Admit requests once `wanted` of them have arrived."""
        if worker._arrived.qsize() < getattr(worker, "wanted", 1):
            time.sleep(0.001)
            return
        worker.wanted = 1  # type: ignore[attr-defined]
        real(worker)

    monkeypatch.setattr(Worker, "_admit", admit)
    constrained = [body(number, schema=True) for number in range(CLIENTS)]
    plain = [body(number, schema=False) for number in range(CLIENTS + 1)]
    with serving(make, draft=None, limits={"max_tokens": TOKENS}) as server:
        longest = forwards(server, constrained[:1])
        together = forwards(server, constrained)
        nine = forwards(server, plain)
        beside = forwards(server, [*plain[:-1], body(CLIENTS, schema=True)])
    print(f"alone {longest}, 8 {together}; 9 plain {nine}, 8 and 1 {beside}")  # noqa: T201
    assert together <= 1.2 * longest
    assert beside <= 1.1 * nine
