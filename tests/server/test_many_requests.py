"""Requests of all kinds and APIs at once: answers, counts, and resources in use."""

import json
import random
import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
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
    demo_models,
    derived_seed,
)
from mlx_speculation.samplers import Chooser
from mlx_speculation.samplers.constraints.llguidance import json_schema
from mlx_speculation.server import Limits, Server
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
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
APIS = (TEXTS, CHATS, MESSAGES, RESPONSES)
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
        known: of each choice, the prompt, the sampling and plain decoding's result.
        leave: after so many bytes of the answer, the client leaves; None: it stays.
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
    """Make a tokenizer whose tokens are bytes and the texts of CALLS."""
    fast = byte_tokenizer(tuple(CALLS))._tokenizer
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def make_tiny(name: str, prefixes: PrefixCache | None) -> SpeculativeGenerator:
    """Make a generator whose draft is often accepted."""
    target = build(name, vocab=VOCAB)
    draft = nearly(target, build(name, vocab=VOCAB), 0.03, 1)
    return SpeculativeGenerator(
        target, tokenizer(), draft=draft, draft_length=4, prefix_cache=prefixes
    )


class Requests:
    """Draws requests, and computes their answers by plain decoding."""

    def __init__(
        self,
        seed: int,
        plain: SpeculativeGenerator,
        apis: Sequence[str] = APIS,
        barred: Sequence[int] = BARRED,
        longest: int = 12,
    ) -> None:
        self._draw, self._longest = random.Random(seed), longest
        self.plain, self._apis, self._barred = plain, apis, barred

    def all(self, count: int) -> list[Wanted]:
        """Return requests of all kinds."""
        kinds = [self.text] * 14 + [self._call] * 3 + [self._wrong] * 3
        drawn = [self._draw.choice(kinds)() for _ in range(count - 8)]
        drawn += [self._schema(path) for path in APIS * 2]
        self._draw.shuffle(drawn)
        return drawn

    def text(self) -> Wanted:
        """Return a request for a text, or for several."""
        draw, path = self._draw, self._draw.choice(self._apis)
        body, prompt = self._ask(path)
        length = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body |= {
            length: draw.randint(1, self._longest),
            "temperature": 0,
            "stream": draw.random() < 0.5,
            "speculative": draw.choice(
                ({}, {}, {"off": True}, {"max_draft": 2}, {"draft": "lookup"})
            ),
        }
        if path in (TEXTS, CHATS):
            body |= {
                "logit_bias": {str(token): -100 for token in self._barred},
                "temperature": draw.choice((0, 0.8, 1.0)),
                "top_p": draw.choice((1, 0.9)),
                "seed": draw.randrange(100),
                "n": draw.choice((1, 1, 1, 1, 2, 3)),
            }
            if draw.random() < 0.3:
                shown = {"logprobs": True, "top_logprobs": 2}
                body |= shown if path == CHATS else {"logprobs": 2}
            if draw.random() < 0.3:
                body["stop"] = [chr(draw.randrange(33, 127)) for _ in range(8)]
        leave = draw.choice((0, 200, 900)) if draw.random() < 0.1 else None
        if leave is not None:
            return Wanted(path, {**body, length: 60, "stream": True}, leave=leave)
        count = body.get("n", 1)
        known = [self._known(body, prompt, body[length], i) for i in range(count)]
        if not set(self._barred).isdisjoint(known[0][2].tokens):
            return self.text()
        return Wanted(path, body, known=known)

    def _ask(self, path: str) -> tuple[dict[str, Any], str]:
        """Return the body of a request, and its prompt as text."""
        begin = self._draw.choice(BEGINNINGS)[: self._draw.randint(4, 70)]
        prompt = begin + self._draw.choice(("", "Q", "QR"))
        if path == TEXTS:
            return {"prompt": prompt}, prompt
        half = len(prompt) // 2
        turns = [
            {"role": "user", "content": prompt[:half]},
            {"role": "assistant", "content": prompt[half:]},
        ]
        return {"input" if path == RESPONSES else "messages": turns}, f"{prompt}:"

    def _known(
        self, body: dict[str, Any], prompt: str, length: int, index: int, **more: Any
    ) -> Any:
        """Return the prompt, the sampling, and plain decoding's result."""
        sampling = Sampling(
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            seed=derived_seed(body.get("seed", 1), index),
            logit_bias={int(k): v for k, v in body.get("logit_bias", {}).items()},
        )
        result = self.plain.generate(
            prompt,
            max_tokens=length,
            sampling=sampling,
            stop=body.get("stop", ()),
            **more,
        )
        return prompt, sampling, result

    def _call(self) -> Wanted:
        body, _ = self._ask(CHATS)
        number = self._draw.randrange(len(CALLS))
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        body |= {
            "tools": [tool],
            "max_tokens": 1,
            "logit_bias": {str(256 + number): 100},
            "stream": self._draw.random() < 0.5,
        }
        said = [*CALLS][number]
        return Wanted(CHATS, body, call=CALLS[said] or ("", said))

    def _wrong(self) -> Wanted:
        path, body, status = self._draw.choice(WRONG)
        return Wanted(path, dict(body), status)

    def _schema(self, path: str) -> Wanted:
        body, prompt = self._ask(path)
        form = {"type": "json_schema", "schema": SCHEMA}
        named = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        forms: dict[str, Any] = {
            MESSAGES: {"output_config": {"format": form}, "max_tokens": 60},
            RESPONSES: {
                "text": {"format": {**form, "name": "s"}},
                "max_output_tokens": 60,
            },
        }
        body |= forms.get(path, {"response_format": named, "max_tokens": 60})
        body["temperature"] = 0
        schema = json_schema(SCHEMA, self.plain.tokenizer, compact=True)
        known = self._known(body, prompt, 60, 0, constraint=schema)
        return Wanted(path, body, known=[known])


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
    blocks = wanted.path in (MESSAGES, RESPONSES)
    streamed = wanted.body.get("stream", False)
    packets = events(answer, done=not blocks) if streamed else [answer.json]
    if blocks:
        return [of_blocks(packets)]
    field = "delta" if streamed else "message"
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


def of_blocks(packets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the text and the end of an answer of Messages or Responses."""
    last = packets[-1]
    whole = last.get("response", last)
    if "output" in whole:
        end = whole["status"]
        blocks = [part for item in whole["output"] for part in item["content"]]
    elif "content" in whole:
        end, blocks = whole["stop_reason"], whole["content"]
    else:
        assert last["type"] == "message_stop"
        blocks = [each["delta"] for each in packets if "delta" in each]
        end = blocks[-1]["stop_reason"]
    text = "".join(block.get("text", "") for block in blocks)
    cut = end in ("incomplete", "max_tokens")
    return {"text": text, "end": "length" if cut else "stop", "ids": []}


def events(answer: Answer, *, done: bool) -> list[dict[str, Any]]:
    """Return the packets of a complete stream, which ends with [DONE] if `done`."""
    lines = [each for each in answer.body.split(b"\n") if each.startswith(b"data: ")]
    if done:
        assert lines.pop() == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


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
        text = known.text
        if wanted.path in (MESSAGES, RESPONSES) and not text.strip():
            text = ""  # white space alone is no block
        if (choice["text"], choice["end"]) == (text, known.finish_reason):
            assert choice["ids"] in ([], known.tokens)
        else:  # only by rounding can texts differ
            ids = choice["ids"] or plain.encode(choice["text"])
            chooser = Chooser(sampling, len(plain.tokenizer.get_vocab()))
            tokens = plain.encode(prompt)
            model: Any = plain.model
            same_but = partial(assert_same_up_to_ties, model, chooser, tokens, width=5)
            assert same_but(known.tokens, ids) is not None, (wanted, choice)
            ties += 1
        if "json_schema" in str(wanted.body) and choice["end"] == "stop":
            assert json.loads(choice["text"])["a"] in ("x", "yy")
    return ties


def counted(server: Server) -> Callable[..., float]:
    """Fetch the metrics; return a function that sums samples by name and labels."""
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


def run(
    server: Server, wanted: list[Wanted], plain: SpeculativeGenerator, clients: int
) -> None:
    """Check the answers that parallel clients get, and the metrics of the requests."""
    first = counted(server)
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(partial(ask, server), wanted))
    until(lambda: server.worker.taken == 0)
    until(lambda: counted(server)("num_requests_running") == 0)
    last = counted(server)
    pairs = list(zip(answers, wanted, strict=True))
    ties = sum(check(a, each, plain) for a, each in pairs if a is not None)
    print(f"{len(wanted)} requests, {answers.count(None)} left, {ties} near-ties")  # noqa: T201
    assert ties <= max(1, len(wanted) // 20)

    def grown(name: str, **labels: str) -> float:
        return last(name, **labels) - first(name, **labels)

    statuses = Counter(str(each.status) for each in wanted if each.status != 200)
    for status, number in statuses.items():
        assert grown("requests_refused_total", status=status) == number
    assert grown("requests_refused_total") == statuses.total()
    texts = sum(each.body.get("n", 1) for each in wanted if each.status == 200)
    left = grown("requests_cancelled_total")
    leaving = [each.body.get("n", 1) for each in wanted if each.leave is not None]
    assert grown("request_success_total") + left == texts
    assert 0 < left <= sum(leaving)
    tokens = sum(len(k.tokens) for each in wanted for _, _, k in each.known)
    assert grown("generation_tokens_total") >= tokens
    assert texts - left <= grown("time_to_first_token_seconds_count") <= texts
    assert last("num_requests_running") == last("num_requests_waiting") == 0
    assert last("rows_alone_total") == 0  # requests with schemas share forwards too
    places = server.worker.schemas._places
    until(lambda: places._value == Limits().schemas)


def resident() -> float:
    """Return the peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def warm(server: Server) -> None:
    for speculative in ({}, {"draft": "lookup"}):
        body = {"prompt": "ABC", "max_tokens": 9, "speculative": speculative}
        assert post(server, body).status == 200


@pytest.mark.parametrize(
    ("name", "seed", "count"),
    [
        ("llama", 1, 100),
        *(pytest.param("llama", n, 300, marks=pytest.mark.slow) for n in range(1, 7)),
        pytest.param("gemma3_text", 7, 100, marks=pytest.mark.slow),
    ],
)
def test_mixed_requests_get_their_answers_and_leave_nothing(
    name: str, seed: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = SpeculativeGenerator(build(name, vocab=VOCAB), tokenizer())
    wanted = Requests(seed, plain).all(count)
    prefixes = PrefixCache(1 << 24, every=16)
    limits, make = {"prompt_tokens": 1200}, partial(make_tiny, name)
    with serving(make, prefixes=prefixes, max_rows=ROWS, limits=limits) as server:
        warm(server)
        before, threads = bytes_in_use(server, prefixes), threading.active_count()
        run(server, wanted, plain, CLIENTS)
        assert bytes_in_use(server, prefixes) <= before + (1 << 16)
        until(lambda: threading.active_count() == threads)
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.slow
def test_a_thousand_requests_leave_no_memory() -> None:
    plain = SpeculativeGenerator(build("llama", vocab=VOCAB), tokenizer())
    requests, prefixes = Requests(8, plain), PrefixCache(1 << 22)
    limits, make = {"prompt_tokens": 1200}, partial(make_tiny, "llama")
    with serving(make, prefixes=prefixes, max_rows=ROWS, limits=limits) as server:
        run(server, requests.all(300), plain, 16)
        before, most = bytes_in_use(server, prefixes), resident()
        run(server, requests.all(1000), plain, 16)
        assert bytes_in_use(server, prefixes) <= before + (1 << 16)
        print(f"resident: {most:.0f} MiB, then {resident():.0f}")  # noqa: T201
        assert resident() <= most * 1.05 + 8


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dense", "sliding", "hybrid"])
def test_bundled_models_get_their_texts(target: str) -> None:
    folders, prefixes = demo_models(), PrefixCache(1 << 28, every=16)

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator.from_pretrained(
            folders[target],
            draft=folders["draft"],
            draft_length=4,
            prefix_cache=prefixes,
        )

    plain = SpeculativeGenerator.from_pretrained(folders[target])
    requests = Requests(4, plain, apis=[TEXTS], barred=(), longest=40)
    wanted = [requests.text() for _ in range(130)]  # about 200 texts
    with serving(make, prefixes=prefixes, max_rows=ROWS) as server:
        warm(server)
        before = bytes_in_use(server, prefixes)
        run(server, wanted, plain, CLIENTS)
        assert bytes_in_use(server, prefixes) <= before + (1 << 16)
