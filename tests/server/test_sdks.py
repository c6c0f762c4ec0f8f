"""Anthropic's and OpenAI's clients: streams, tools, thinking, schemas, errors."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from mlx_speculation.server import Server, answering
from mlx_speculation.server.request.options import GenerationRequest
from support.processes.scripted_servers import call, scripted
from support.processes.servers import client_of, get, post

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}},
    {"name": "look", "input_schema": {"type": "object"}},
]
TWO = call("read", '{"path": "a b"}') + "\n" + call("look", "{}")
SAID = {
    "text": "Hello there.",
    "think": "<think>\nHm, so.\n</think>\n\nHello.",
    "tools": f"<think>\nHm.\n</think>\n\nI look.\n{TWO}",
    "only": TWO,
    "cut": "One two three four five six seven eight nine ten.",
}


def script(request: GenerationRequest) -> str | None:
    """Return the text that the last message asks for; None: the model writes it."""
    assert request.chat is not None
    question = str(request.chat.messages[-1]["content"]).split("\n")[0]
    return (
        None
        if request.schema or request.calls
        else SAID.get(question, question or "Hm.")
    )


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    limits = {"body_bytes": 200_000, "prompt_tokens": 3000}
    with (
        pytest.MonkeyPatch.context() as patch,
        scripted(
            script, patch, draft="lookup", limits=limits, names=("local",)
        ) as server,
    ):
        yield server


@pytest.fixture(name="claude", scope="module")
def _claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with claude_of(server) as client:
        yield client


@pytest.fixture(name="gpt", scope="module")
def _gpt(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@contextmanager
def claude_of(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(verify=False),
    ) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def message_body(text: str, **more: Any) -> Any:
    """Return a request of the Messages API."""
    usual = {"model": "claude-any", "max_tokens": 200, "messages": user(text)}
    return {**usual, **more}


def shown(blocks: Any) -> list[tuple[str, Any]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(each.type, getattr(each, fields[each.type])) for each in blocks]


CALLED = [
    ("thinking", "\nHm.\n"),
    ("text", "I look.\n"),
    ("tool_use", {"path": "a b"}),
    ("tool_use", {}),
]


@pytest.mark.parametrize("name", ["text", "think", "tools", "only"])
def test_messages_whole_and_streamed_are_the_same(
    claude: anthropic.Anthropic, name: str
) -> None:
    request = message_body(name, tools=TOOLS)
    whole = claude.messages.create(**request)
    with claude.messages.stream(**request) as stream:
        kinds = [each.type for each in stream]
        streamed = stream.get_final_message()
    assert shown(streamed.content) == shown(whole.content)
    assert streamed.stop_reason == whole.stop_reason
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    if name == "tools":
        assert shown(whole.content) == CALLED
        assert whole.content[0].signature
        ids = [each.id for each in whole.content[2:]]
        assert len(set(ids)) == 2
    assert whole.stop_reason == (
        "tool_use" if name in ("tools", "only") else "end_turn"
    )
    usage = streamed.usage
    assert usage.output_tokens == whole.usage.output_tokens > 0
    # In the second request, all of the prompt but one token was cached.
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )
    assert usage.cache_read_input_tokens


def test_messages_end_by_a_stop_text_and_by_their_length(
    claude: anthropic.Anthropic,
) -> None:
    cut = claude.messages.create(**message_body("cut", stop_sequences=["xyz", " four"]))
    assert shown(cut.content) == [("text", "One two three")]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", " four")
    short = claude.messages.create(**message_body("cut", max_tokens=3))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    huge = claude.messages.create(**message_body("text", max_tokens=20_000))
    assert huge.stop_reason == "end_turn"


def test_tokens_are_counted_as_they_are_read(claude: anthropic.Anthropic) -> None:
    request = message_body("text", tools=TOOLS, system="Be kind.")
    usage = claude.messages.create(**request).usage
    del request["max_tokens"]
    count = claude.messages.count_tokens(**request).input_tokens
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_are_listed(claude: anthropic.Anthropic) -> None:
    assert [each.id for each in claude.models.list()] == ["local"]
    assert claude.models.retrieve("local").display_name == "local"
    assert claude.models.list().data[0].created_at.year > 2000


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": user("x" * 30_000)}, 400, "prompt is too long: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "no"}],
                    }
                ]
            },
            400,
            "no tool_use before it",
        ),
        ({"tool_choice": {"type": "tool", "name": "no"}}, 400, "tool_choice is 'no'"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web"}],
                "tool_choice": {"type": "tool", "name": "web"},
            },
            400,
            "not run here",
        ),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"metadata": {"user_id": "x" * 300_000}}, 413, "--max-body-bytes"),
    ],
)
def test_errors_of_messages_have_their_form(
    server: Server, more: dict[str, Any], status: int, said: str
) -> None:
    answer = post(server, message_body("x", **more), path="/v1/messages")
    assert answer.status == status, answer.body
    assert set(answer.json) == {"type", "error"}
    assert answer.headers["request-id"].startswith("req_")
    assert set(answer.json["error"]) == {"type", "message"}
    kind = "request_too_large" if status == 413 else "invalid_request_error"
    assert answer.json["error"]["type"] == kind
    assert said in answer.json["error"]["message"]


@pytest.mark.parametrize("thinks", [True, False])
def test_a_schema_and_a_forced_tool_constrain_messages(
    claude: anthropic.Anthropic, thinks: bool
) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else None
    more: dict[str, Any] = {"thinking": thinking or {"type": "disabled"}}
    made = claude.messages.create(**message_body("x", output_config=form, **more))
    assert json.loads(made.content[-1].text)["a"] in ("x", "y")
    tool = [{"name": "pick", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "pick"}):
        forced = claude.messages.create(
            **message_body("x", tools=tool, tool_choice=choice, **more)
        )
        (block,) = forced.content
        assert block.type == "tool_use"
        assert block.input["a"] in ("x", "y")


BROKEN = {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}
OF_RESPONSES: Any = [
    {"type": "function", "name": "read", "parameters": {"type": "object"}},
    {"type": "custom", "name": "look", "description": "Looks."},
    {"type": "web_search"},
]


@pytest.mark.parametrize("name", ["text", "think", "tools", "only"])
def test_responses_whole_and_streamed_are_the_same(
    gpt: openai.OpenAI, name: str
) -> None:
    request: Any = {"model": "local", "input": name, "tools": OF_RESPONSES}
    whole = gpt.responses.create(**request)
    with gpt.responses.stream(**request) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert events[-1].type == "response.completed"

    def kinds(response: Any) -> list[Any]:
        return [
            {
                key: value
                for key, value in item.model_dump(exclude_none=True).items()
                if key not in ("id", "call_id", "parsed_arguments")
            }
            for item in response.output
        ]

    def plain(items: list[Any]) -> list[Any]:
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    assert plain(kinds(streamed)) == plain(kinds(whole))
    assert whole.status == streamed.status == "completed"
    assert whole.output_text.strip() == {"text": "Hello there.", "think": "Hello."}.get(
        name, "I look." if name == "tools" else ""
    )
    if name == "tools":
        types = [item.type for item in whole.output]
        expected = ["reasoning", "message", "function_call", "custom_tool_call"]
        assert types == expected
        assert json.loads(whole.output[2].arguments) == {"path": "a b"}
    assert whole.usage is not None
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == (
        name in ("tools", "think")
    )


def test_a_namespace_is_flattened_for_the_model_and_named_in_its_calls(
    gpt: openai.OpenAI,
) -> None:
    inner = {"type": "function", "name": "wait", "parameters": {"type": "object"}}
    tools: Any = [{"type": "namespace", "name": "agents", "tools": [inner]}]
    said = call("agents__wait", "{}")
    made = gpt.responses.create(model="local", input=said, tools=tools, store=False)
    # The script answers with the first line of its input only.
    assert made.output_text.strip() == "<tool_call>"
    items: Any = [
        {"role": "user", "content": "x"},
        {
            **{"type": "function_call", "name": "wait", "namespace": "agents"},
            **{"call_id": "c1", "arguments": ""},
        },
        {"type": "function_call_output", "call_id": "c1", "output": "only"},
    ]
    again = gpt.responses.create(model="local", input=items, tools=tools)
    assert [item.type for item in again.output] == ["function_call", "function_call"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "mcp_call"}]}, "input[0]"),
        (
            {"input": [BROKEN]},
            "input[0].arguments",
        ),
    ],
)
def test_what_responses_cannot_do_is_named(
    gpt: openai.OpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.responses.create(**{"model": "local", "input": "x", **more})
    assert refused.value.param == param
    assert "item_reference" not in str(more) or "store: false" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", message_body("cut", stream=True)),
        ("/v1/responses", {"input": "cut", "stream": True}),
        ("/v1/chat/completions", {"messages": user("cut"), "stream": True}),
    ],
)
def test_a_silent_stream_says_that_it_goes_on(
    server: Server, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "KEEP_ALIVE_SECONDS", -1.0)
    raw = post(server, body, path=path).body
    assert raw.count(b": keepalive\n" if "chat" in path else b"in_progress") > 2 or (
        raw.count(b"event: ping") > 2
    )


def test_tokens_are_counted_while_the_engine_is_busy(server: Server) -> None:
    """A count of tokens does not wait for the text of another request."""
    with claude_of(server) as client:
        busy = threading.Thread(
            target=lambda: client.messages.create(**message_body("word " * 300))
        )
        busy.start()
        request = message_body("text", tools=TOOLS)
        del request["max_tokens"]
        counts = {
            client.messages.count_tokens(**request).input_tokens for _ in range(9)
        }
        busy.join()
    assert len(counts) == 1


def test_the_page_of_the_routes_is_served(server: Server) -> None:
    page = get(server, "/openapi.json").json
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        body = page["paths"][path]["post"]["requestBody"]["content"]
        assert body["application/json"]["schema"]
    assert get(server, "/docs").status == 200
