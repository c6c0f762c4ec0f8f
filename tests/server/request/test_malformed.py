"""Malformed requests: the server survives them; its errors have OpenAI's form."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_speculation.server import Server, Settings
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis.chat_completions import ChatBody, ChatFace
from mlx_speculation.server.apis.messages import MessagesBody, MessagesFace
from mlx_speculation.server.apis.openai import CompletionBody, CompletionFace
from mlx_speculation.server.apis.responses import ResponsesBody, ResponsesFace
from mlx_speculation.server.request.models import parsed
from support.processes.servers import (
    NAME,
    Answer,
    exchange,
    packet,
    post,
    read_body,
    refusal,
    rows_held,
    serving,
)

GOOD: dict[str, Any] = {"model": NAME, "prompt": "GOOD", "max_tokens": 2}
CHAT = "/v1/chat/completions"
# Numbers of requests that a property test sends, in usual runs and in slow ones.
EXAMPLES = pytest.mark.parametrize(
    "examples", [60, pytest.param(5000, marks=pytest.mark.slow)]
)


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    limits = {"body_bytes": 100_000, "read_seconds": 0.5, "connections": 64}
    with serving(limits=limits) as server:
        yield server
        assert post(server, GOOD).status == 200


FIELDS = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 1.5),
    ("top_k", 0.5),
    ("min_p", [0.1]),
    ("max_tokens", 0),
    ("max_tokens", 1.0),
    ("max_tokens", 10**30),
    ("seed", 2**64),
    ("seed", "1"),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 501),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("n", 0),
    ("n", 1000),
    ("n", True),
    ("best_of", 2),
    ("echo", True),
    ("suffix", "end"),
    ("logprobs", 21),
    ("top_logprobs", 3),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"99": 1}),
    ("logit_bias.5", {"5": 101}),
    ("xtc_threshold", 0.6),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300),
    ("presence_context_size", -1),
    ("adapters", "folder"),
    ("draft_model", "other"),
    ("num_draft_tokens", -1),
    ("speculative", "off"),
    ("speculative.draft", {"draft": "other"}),
    ("speculative.draft", {"draft": 3}),
    ("speculative.max_draft", {"max_draft": 65}),
    ("speculative.off", {"off": 1}),
    ("speculative.off", {"off": True, "max_draft": 2}),
    ("speculative.exact", {"exact": 8}),
    ("speculative.on", {"on": True}),
    ("response_format", {"type": "json_schema"}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 40_000}}},
    ),
    ("response_format.type", {"type": "xml"}),
    ("prompt", 5),
    ("prompt", ["A", 1]),
    ("prompt", [[1], "A", None]),
    ("prompt", [["A"]]),
    ("prompt", [0.5]),
    ("colour", "red"),
    ("model", 5),
]


@pytest.mark.parametrize(("param", "value"), FIELDS, ids=lambda value: str(value)[:50])
def test_a_wrong_field_is_named(server: Server, param: str, value: Any) -> None:
    body = {**GOOD, param.split(".")[0]: value}
    error = post(server, body).refused(400)
    if param not in ("logit_bias", "response_format"):
        assert error["param"] == param


MESSAGES = [
    None,
    [],
    "hello",
    ["hello"],
    [{"content": "no role"}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "critic", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "tool_calls": ["x"]}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=str)
def test_wrong_messages_are_named(server: Server, messages: Any) -> None:
    body = {"model": NAME, "messages": messages, "max_tokens": 2}
    error = post(server, body, path=CHAT).refused(400)
    assert error["param"].startswith("messages")


def test_what_would_run_for_ever_in_a_template_is_refused(server: Server) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    body = {**chat, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert post(server, body, path=CHAT).refused(400)["param"] == "chat_template_kwargs"


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": "\\ud800"}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999, "prompt": "A"}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"seed": ' + b"9" * 300 + b', "prompt": "A"}',
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b"[" * 90_000,
    b'"' + b'\\"' * 40_000,
    b'{"prompt": "A", "prompt": 3}',
    b"\x00" * 100,
    json.dumps({"prompt": "A" * 90_000}).encode(),
    json.dumps({"prompt": [10**9]}).encode(),
    json.dumps({"prompt": [-1]}).encode(),
    json.dumps({"prompt": ""}).encode(),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:20])
def test_a_body_that_is_none_is_refused(server: Server, body: bytes) -> None:
    post(server, body).refused(400)


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (b'"metadata": ' + b"[" * 70 + b"]" * 70, "nested"),
        (b'"stop": "\\ud800"', "surrogate"),
        (b'"user": NaN', "NaN"),
    ],
    ids=["deep", "surrogate", "nan"],
)
def test_a_field_that_means_nothing_is_parsed_with_limits(
    server: Server, field: bytes, why: str
) -> None:
    error = post(server, b'{"prompt": "A", ' + field + b"}").refused(400)
    assert why in error["message"]


def test_nesting_is_counted_outside_of_texts() -> None:
    deep = b'{"a":' * 63 + b"[]" + b"}" * 63
    assert refusal(lambda: parsed(deep)) == 0
    deeper = b'{"a":' + deep + b"}"
    with pytest.raises(ApiError, match=r"nested .* more than 64 levels"):
        parsed(deeper)
    in_text = json.dumps({"a": '[{"\\' * 1000, "b": [[]] * 50}).encode()
    assert refusal(lambda: parsed(in_text)) == 0


RAW = [
    (b"NONSENSE\r\n\r\n", 400),
    (b"GET /health\r\n\r\n", 400),
    (b"GET\r\n\r\n", 400),
    (b"POST /v1/completions\r\n\r\n", 400),
    (b"GET /health HTTP/9.9\r\n\r\n", 505),
    (b"GET /health HTTP/x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nNo header\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400),
    (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
    (b"POST /v1/nothing HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 404),
    (b"PUT /v1/completions HTTP/1.1\r\n\r\n", 405),
    (b"GET /v1/completions HTTP/1.1\r\n\r\n", 405),
    (b"DELETE /v1/models HTTP/1.1\r\n\r\n", 405),
    (b"BREW /health HTTP/1.1\r\n\r\n", 405),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
    (b"POST /v1/completions HTTP/1.1\r\n\r\n", 411),
    (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400),
    (
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n"
        b"Content-Length: 3\r\n\r\n{}",
        400,
    ),
    (b"GET /health HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2, 2\r\n\r\n{}", 400),
]


@pytest.mark.parametrize(("sent", "status"), RAW, ids=lambda value: str(value)[:40])
def test_what_is_no_request_is_refused(
    server: Server, sent: bytes, status: int
) -> None:
    sent = sent.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nHost: x\r\n")
    sent = sent.replace(b" HTTP/9.9\r\n", b" HTTP/9.9\r\nHost: x\r\n")
    # Without "close", the connection stays open after a successful answer.
    sent = sent.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    exchange(server, sent).refused(status)


# From these fields, a proxy could infer another body length than this server does.
CODINGS = [
    "Transfer-Encoding: chunked",
    "transfer-encoding: identity",
    "Transfer-Encoding:\r\n chunked",
    "Transfer-Encoding:",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding chunked",
]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("line", ["POST /v1/completions", "GET /health"])
def test_a_length_and_a_coding_together_are_refused(
    server: Server, coding: str, first: bool, line: str
) -> None:
    body = json.dumps(GOOD).encode()
    headers = ["Host: here", f"Content-Length: {len(body)}"]
    headers.insert(0 if first else 2, coding)
    head = "\r\n".join([f"{line} HTTP/1.1", *headers, "", ""]).encode()
    smuggled = b"GET /v1/models HTTP/1.1\r\n\r\n"
    answer = exchange(server, head + body + smuggled)
    error = answer.refused(400)
    assert error["message"]
    assert answer.body.count(b"HTTP/") == 0  # no second answer follows


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"max_token": 4}, "Did you mean 'max_tokens'?"),
        ({"speculative": {"of": True}}, "Did you mean 'speculative.off'?"),
        ({"guided": True}, "Leave it out."),
        ({"sufix": "x"}, "Leave it out."),  # "suffix" is unsupported too
        ({"suffix": "x"}, "suffix is not offered here. Leave it out: a text"),
        ({"functions": []}, "Name them in tools."),
    ],
)
def test_a_field_that_is_not_taken_is_refused_with_advice(
    server: Server, fields: dict[str, Any], advice: str
) -> None:
    assert advice in post(server, {**GOOD, **fields}).refused(400)["message"]


@pytest.mark.parametrize(
    ("line", "status", "advice"),
    [
        ("GET /v1/chat/completions", 405, "Send a POST with a JSON object."),
        ("POST /v1/models", 405, "Send a GET."),
        ("GET /v1/responses", 405, "Send a POST with a JSON object."),
        ("POST /v1/threads", 404, "GET / lists the paths."),
    ],
)
def test_a_wrong_path_or_method_is_refused_with_advice(
    server: Server, line: str, status: int, advice: str
) -> None:
    lines = "Host: x\r\nConnection: close\r\nContent-Length: 2"
    raw = f"{line} HTTP/1.1\r\n{lines}\r\n\r\n{{}}".encode()
    assert advice in exchange(server, raw).refused(status)["message"]


def test_a_head_has_no_body(server: Server) -> None:
    for path, status in (("/health", 405), ("/", 200), ("/api/hello", 200)):
        line = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = exchange(server, line.encode())
        assert (answer.status, answer.body) == (status, b"")


def test_a_truncated_body_is_refused(server: Server) -> None:
    whole = packet(GOOD)
    error = exchange(server, whole[:-5], close=True).refused(400)
    assert "ends too early" in error["message"]
    head = exchange(server, whole[:9], close=True).refused(400)
    assert "ends too early" in head["message"]
    assert exchange(server, b"", close=True).status == 0
    exchange(server, whole[:-5]).refused(408)  # the client keeps the connection open


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=6,
)
NAMES = (
    *("model", "prompt", "messages", "stream", "stream_options", "max_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "n"),
    *("top_logprobs", "response_format", "speculative", "tools", "tool_choice"),
    *("logit_bias", "repetition_penalty", "chat_template_kwargs", "adapters"),
    *("input", "system", "instructions", "thinking", "reasoning", "output_config"),
    *("stop_sequences", "text", "max_output_tokens", "prediction"),
)
objects = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5)
nearly_good = objects.map(lambda wrong: {**GOOD, "max_tokens": 2, **wrong})


@settings(max_examples=50)
@given(raw=st.binary(max_size=200) | json_values.map(json.dumps).map(str.encode))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    assert refusal(lambda: parsed(raw)) in (0, 400)


FACES: list[tuple[Any, Any]] = [
    (ChatBody, ChatFace),
    (CompletionBody, CompletionFace),
    (MessagesBody, MessagesFace),
    (ResponsesBody, ResponsesFace),
]


@settings(max_examples=200)
@given(body=nearly_good, face=st.sampled_from(FACES))
def test_any_object_is_a_request_or_refused(body: dict[str, Any], face: Any) -> None:
    made = Settings(names=(NAME,))

    def read() -> None:
        face[1](read_body(face[0], body), made)

    assert refusal(read) in (0, 400, 404)


def _check_answer(answer: Answer) -> None:
    """Check that an answer is good, or an error in OpenAI's form."""
    if answer.status >= 400:
        assert answer.status < 500 or answer.status == 505
        answer.refused(answer.status)
    else:
        assert answer.status in (200, 204)


@EXAMPLES
def test_wrong_objects_never_kill_it(server: Server, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(body=nearly_good, path=st.sampled_from(["/v1/completions", CHAT]))
    def ask(body: dict[str, Any], path: str) -> None:
        _check_answer(post(server, json.dumps(body).encode(), path=path))

    ask()
    assert post(server, GOOD).status == 200
    assert rows_held(server.worker) == 0
    assert server.connections <= 1


@EXAMPLES
def test_mangled_requests_never_kill_it(server: Server, examples: int) -> None:
    """Bytes of requests are replaced, left out or inserted."""
    whole = [packet(GOOD), packet({"messages": [], **GOOD}, path=CHAT)]
    line = b"GET /v1/models HTTP/1.1\r\nHost: here\r\n"
    whole.append(line + b"Connection: close\r\nAccept: x\r\n\r\n")

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        which=st.sampled_from(whole),
        cut=st.tuples(st.floats(0, 1), st.integers(0, 30)),
        new=st.binary(max_size=30),
    )
    def ask(which: bytes, cut: tuple[float, int], new: bytes) -> None:
        start = int(cut[0] * len(which))
        sent = which[:start] + new + which[start + cut[1] :]
        answer = exchange(server, sent, close=True)
        if answer.status:  # the server does not answer an empty request
            _check_answer(answer)

    ask()
    assert post(server, GOOD).status == 200
    assert rows_held(server.worker) == 0
    assert server.connections <= 1
