"""Requests of all kinds from several threads: answers, counts, and resources in use."""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from prometheus_client.parser import text_string_to_metric_families

from mlx_speculation import (
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    derived_seed,
)
from mlx_speculation.samplers import Chooser
from mlx_speculation.samplers.constraints.llguidance import json_schema
from mlx_speculation.server import Server
from support.identity import assert_same_up_to_ties
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.processes.servers import (
    Answer,
    bytes_in_use,
    connect,
    get,
    nearly,
    packet,
    post,
    serving,
)
from support.processes.wait_until import until

CLIENTS, ROWS = 8, 6
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
CALLS = {  # texts that the model is made to generate, and the calls in them
    '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>': ("add", '{"a": 1}'),
    '<tool_call>{"name":"now"}</tool_call>': ("now", "{}"),
    "<tool_call>[1]</tool_call>": None,
    "<tool_call>{</tool_call>": None,
}
VOCAB = 256 + len(CALLS)
BARRED = range(256, VOCAB)  # excluded from texts that must not call a tool
BEGINNINGS = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 3,
    "ABCDEFGHIJZYX" * 6,
    "def add(a, b):\n" * 5,
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WRONG: tuple[tuple[str, dict[str, Any], int], ...] = (
    (TEXTS, {"prompt": 1}, 400),
    (TEXTS, {"prompt": "x", "max_tokens": 10**9}, 400),
    (TEXTS, {"prompt": "x", "temprature": 1}, 400),
    (TEXTS, {"prompt": "x", "model": "other"}, 404),
    (TEXTS, {"prompt": "x", "n": ROWS + 1}, 400),
    (TEXTS, {"prompt": "x", "stream": "yes"}, 400),
    (TEXTS, {"prompt": "x" * 1300}, 400),
    (CHATS, {"messages": []}, 400),
    (CHATS, {"messages": [{"role": "user", "content": "x"}], "tool_choice": "x"}, 400),
    ("/v1/nothing", {}, 404),
)


@dataclass
class Wanted:
    """A request and its expected answer.

    Attributes:
        known: prompt, sampling and plain decoding's result of each choice.
        leave: bytes of the answer after which its client leaves; None: it stays.
    """

    path: str
    body: dict[str, Any]
    status: int = 200
    known: list[Any] = field(default_factory=list)
    call: tuple[str, str] | None = None
    leave: int | None = None

    @property
    def chat(self) -> bool:
        return self.path == CHATS


def tokenizer() -> TokenizerWrapper:
    """Make a tokenizer of bytes and of the texts above, with tool calls in JSON."""
    fast = byte_tokenizer(tuple(CALLS))._tokenizer
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    """Make a generator whose draft is often accepted."""
    target = build("llama", vocab=VOCAB)
    draft = nearly(target, build("llama", vocab=VOCAB), 0.03, 1)
    return SpeculativeGenerator(
        target, tokenizer(), draft=draft, draft_length=4, prefix_cache=prefixes
    )


class Requests:
    """Draws requests, and computes their answers by plain decoding."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.plain = SpeculativeGenerator(build("llama", vocab=VOCAB), tokenizer())

    def all(self, count: int) -> list[Wanted]:
        """Return requests of all kinds."""
        kinds = [self._text] * 14 + [self._call] * 3 + [self._wrong] * 3
        drawn = [self._draw.choice(kinds)() for _ in range(count - 6)]
        drawn += [self._schema(chat=i % 2 == 0) for i in range(6)]
        self._draw.shuffle(drawn)
        return drawn

    def _prompt(self) -> str:
        begin = self._draw.choice(BEGINNINGS)[: self._draw.randint(4, 70)]
        return begin + self._draw.choice(("", "Q", "QR"))

    def _ask(self, chat: bool) -> tuple[str, dict[str, Any], str]:
        """Return the path and the body of a request, and its prompt as text."""
        prompt = self._prompt()
        if not chat:
            return TEXTS, {"prompt": prompt}, prompt
        half = len(prompt) // 2
        messages = [
            {"role": "user", "content": prompt[:half]},
            {"role": "assistant", "content": prompt[half:]},
        ]
        return CHATS, {"messages": messages}, f"{prompt}:"

    def _text(self) -> Wanted:
        draw = self._draw
        path, body, prompt = self._ask(chat=draw.random() < 0.5)
        body |= {
            "max_tokens": draw.randint(1, 12),
            "logit_bias": {str(token): -100 for token in BARRED},
            "temperature": draw.choice((0, 0.8, 1.0)),
            "seed": draw.randrange(100),
            "n": draw.choice((1, 1, 1, 1, 2, 3)),
            "stream": draw.random() < 0.5,
            "speculative": draw.choice(
                ({}, {}, {"off": True}, {"max_draft": 2}, {"draft": "lookup"})
            ),
        }
        if draw.random() < 0.3:
            shown = {"logprobs": True, "top_logprobs": 2}
            body |= shown if path == CHATS else {"logprobs": 2}
        if draw.random() < 0.3:
            body["stop"] = [chr(draw.randrange(33, 127)) for _ in range(8)]
        leave = draw.choice((0, 200, 900)) if draw.random() < 0.1 else None
        wanted = Wanted(path, body, leave=leave)
        if leave is None:
            wanted.known = [self._known(body, prompt, i) for i in range(body["n"])]
        else:
            body |= {"max_tokens": 60, "stream": True}
        return wanted

    def _known(self, body: dict[str, Any], prompt: str, index: int = 0) -> Any:
        """Return the prompt, the sampling, and plain decoding's result."""
        constraint = None
        if "response_format" in body:
            constraint = json_schema(SCHEMA, self.plain.tokenizer, compact=True)
        sampling = Sampling(
            temperature=body["temperature"],
            seed=derived_seed(body["seed"], index),
            logit_bias=dict.fromkeys(BARRED, -100.0),
        )
        result = self.plain.generate(
            prompt,
            max_tokens=body["max_tokens"],
            sampling=sampling,
            stop=body.get("stop", ()),
            constraint=constraint,
        )
        return prompt, sampling, result

    def _call(self) -> Wanted:
        path, body, _ = self._ask(chat=True)
        number = self._draw.randrange(len(CALLS))
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        body |= {
            "tools": [tool],
            "max_tokens": 1,
            "logit_bias": {str(256 + number): 100},
            "stream": self._draw.random() < 0.5,
        }
        said = [*CALLS][number]
        return Wanted(path, body, call=CALLS[said] or ("", said))

    def _wrong(self) -> Wanted:
        path, body, status = self._draw.choice(WRONG)
        return Wanted(path, dict(body), status)

    def _schema(self, *, chat: bool) -> Wanted:
        path, body, prompt = self._ask(chat=chat)
        described = {"name": "s", "schema": SCHEMA}
        body |= {
            "response_format": {"type": "json_schema", "json_schema": described},
            **{"max_tokens": 60, "temperature": 0, "seed": 1},
            "logit_bias": {str(token): -100 for token in BARRED},
        }
        return Wanted(path, body, known=[self._known(body, prompt)])


def ask(server: Server, wanted: Wanted) -> Answer | None:
    """Send a request; return None if its client left early."""
    if wanted.leave is None:
        return post(server, wanted.body, path=wanted.path)
    with connect(server) as connection:
        connection.sendall(packet(wanted.body, path=wanted.path))
        left = wanted.leave
        while left > 0 and (got := connection.recv(left)):
            left -= len(got)
    return None


def choices(answer: Answer, wanted: Wanted) -> list[dict[str, Any]]:
    """Return the text, the end and the calls of each choice, streamed or whole."""
    field = "delta" if wanted.body.get("stream") else "message"
    packets = [answer.json] if field == "message" else events(answer)
    texts: dict[int, dict[str, Any]] = {}
    for each in packets:
        for choice in each["choices"]:
            choice_text = texts.setdefault(choice["index"], {"text": "", "calls": []})
            part = choice[field] if wanted.chat else choice
            choice_text["text"] += part.get("content" if wanted.chat else "text") or ""
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    choice_text["calls"].append(call)
                else:
                    before = choice_text["calls"][call["index"]]["function"]
                    before["arguments"] += call["function"]["arguments"]
            choice_text["end"] = choice["finish_reason"] or choice_text.get("end")
            probabilities = choice.get("logprobs") or {}
            ids = probabilities.get("token_ids") or [
                one["id"] for one in probabilities.get("content") or ()
            ]
            choice_text.setdefault("ids", []).extend(ids)
    return [texts[index] for index in sorted(texts)]


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the packets of a complete stream."""
    lines = [each for each in answer.body.split(b"\n") if each.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def check(answer: Answer, wanted: Wanted, plain: SpeculativeGenerator) -> int:
    """Assert that the answer is right; return the number of near-ties."""
    assert answer.status == wanted.status, (wanted, answer.body[:300])
    if wanted.status != 200:
        answer.refused(wanted.status)
        return 0
    received = choices(answer, wanted)
    if wanted.call is not None:
        (choice,) = received
        name, text = wanted.call
        calls = [each["function"] for each in choice["calls"]]
        assert calls == ([{"name": name, "arguments": text}] if name else [])
        assert choice["text"] == ("" if name else text)
        return 0
    assert len(received) == len(wanted.known)
    ties = 0
    for choice, (prompt, sampling, known) in zip(received, wanted.known, strict=True):
        same = (choice["text"], choice["end"]) == (known.text, known.finish_reason)
        if same:
            assert choice["ids"] in ([], known.tokens)
        else:  # only rounding may make two texts differ
            ids = choice["ids"] or plain.encode(choice["text"])
            chooser = Chooser(sampling, VOCAB)
            tokens = plain.encode(prompt)
            model: Any = plain.model
            same_but = partial(assert_same_up_to_ties, model, chooser, tokens, width=5)
            assert same_but(known.tokens, ids) is not None, (wanted, choice)
            ties += 1
        if "response_format" in wanted.body and choice["end"] == "stop":
            assert json.loads(choice["text"])["a"] in ("x", "yy")
    return ties


def counted(server: Server) -> Callable[..., float]:
    """Return a function for current metrics, of one label or summed over all."""
    samples = [
        sample
        for family in text_string_to_metric_families(
            get(server, "/metrics").body.decode()
        )
        for sample in family.samples
    ]

    def total(name: str, **labels: str) -> float:
        return sum(
            each.value
            for each in samples
            if each.name.partition(":")[2] == name
            and labels.items() <= each.labels.items()
        )

    return total


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 80), *(pytest.param(n, 300, marks=pytest.mark.slow) for n in range(1, 7))],
)
def test_mixed_requests_get_their_answers_and_leave_nothing(
    seed: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = Requests(seed)
    wanted = requests.all(count)
    prefixes = PrefixCache(1 << 24, every=16)
    limits = {"prompt_tokens": 1200}
    with serving(make, prefixes=prefixes, max_rows=ROWS, limits=limits) as server:
        for speculative in ({}, {"draft": "lookup"}):
            warm = {"prompt": "ABC", "speculative": speculative}
            assert post(server, warm).status == 200
        before, threads = bytes_in_use(server, prefixes), threading.active_count()
        first = counted(server)
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(partial(ask, server), wanted))
        assert bytes_in_use(server, prefixes) <= before + (1 << 16)
        until(lambda: threading.active_count() == threads)
        until(lambda: counted(server)("num_requests_running") == 0)
        last = counted(server)
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    pairs = list(zip(answers, wanted, strict=True))
    ties = sum(check(a, each, requests.plain) for a, each in pairs if a is not None)
    assert ties <= count // 50

    def grown(name: str, **labels: str) -> float:
        return last(name, **labels) - first(name, **labels)

    statuses = Counter(str(each.status) for each in wanted if each.status != 200)
    for status, number in statuses.items():
        assert grown("requests_refused_total", status=status) == number
    assert grown("requests_refused_total") == statuses.total()
    texts = sum(each.body.get("n", 1) for each in wanted if each.status == 200)
    left = grown("requests_cancelled_total")
    assert grown("request_success_total") + left == texts
    assert 0 < left <= sum(each.body["n"] for each in wanted if each.leave is not None)
    tokens = sum(len(k.tokens) for each in wanted for _, _, k in each.known)
    assert grown("generation_tokens_total") >= tokens
    assert last("num_requests_running") == last("num_requests_waiting") == 0
