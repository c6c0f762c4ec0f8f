"""Requests as known clients send them: whole answers, and streams of events."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_speculation.server import Server
from mlx_speculation.server.request.options import GenerationRequest
from support.processes.scripted_servers import call, scripted
from support.processes.servers import Answer, post

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXTS = "/v1/completions"
CALL, OTHER = call("read", '{"path": "a"}'), call("read", '{"path": "b"}')
SAID = {
    "go": f"<think>\nHm.\n</think>\n\nI look.\n{CALL}",
    "two": f"{CALL}\n{OTHER}",
}
OBJECT: dict[str, Any] = {"type": "object"}
# Schemas of MCP servers hold keywords unknown to grammars, and large numbers.
RICH = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": ["string", "null"], "default": None, "format": "uri"},
        "line": {"type": "integer", "maximum": 9007199254740991, "title": "Line"},
        "more": {"anyOf": [{"$ref": "#/$defs/More"}, {"type": "null"}]},
    },
    "$defs": {"More": {"type": "object", "additionalProperties": {}}},
    "required": ["path"],
    "additionalProperties": False,
}


def function(name: str = "read", **more: Any) -> dict[str, Any]:
    named = {"name": name, "description": "Reads.", "parameters": RICH, **more}
    return {"type": "function", "function": named}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text(value: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": value, **more}


def called(name: str = "read", arguments: str = '{"path": "a"}', **more: Any) -> Any:
    made = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": made, **more}


def of_chat(*turns: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "local", "messages": [*turns], **more}


def of_messages(*turns: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    usual = {"model": "claude-any", "max_tokens": 32000, "messages": [*turns]}
    return MESSAGES, {**usual, **more}


def of_responses(*items: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "local", "input": [*items], **more}


RESULT = said("tool", "x", tool_call_id="call_1")
USER = said("user", "go")
USE = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
TOOL = {"name": "read", "description": "Reads.", "input_schema": RICH}
FLAT = {"type": "function", "name": "read", "parameters": RICH, "strict": False}
DONE = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
FORM = {"name": "answer", "strict": True, "schema": OBJECT}
CALL_ITEM = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "read",
    "arguments": "{}",
}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "call_1", "output": "x"}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Chat Completions
    "zed": of_chat(
        said("system", [text("S")]),
        said("user", [text("go")]),
        tools=[function()],
        tool_choice="auto",
        max_completion_tokens=32000,
        stop=[],
        temperature=1.0,
        parallel_tool_calls=False,
        prompt_cache_key="thread-1",
        reasoning_effort=None,
    ),
    "zed and continue, results of all kinds": of_chat(
        USER,
        said("assistant", None, tool_calls=[called()]),
        said("tool", [text("x"), text("y")], tool_call_id="call_1"),
        said("assistant", " ", tool_calls=[called(arguments="", id="call_2")]),
        said(
            "tool",
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
            tool_call_id="call_2",
        ),
        tools=[function()],
    ),
    "cline": of_chat(
        said("system", "S"),
        said("user", [text("a"), text("go")]),
        said(
            "assistant",
            None,
            reasoning_content="Hm.",
            reasoning_details=[{"type": "reasoning.text", "text": "Hm.", "index": 0}],
            tool_calls=[called(index=0)],
        ),
        RESULT,
        tools=[function(strict=False)],
        stream_options={"include_usage": True},
        temperature=0,
    ),
    "continue and aider, an empty answer and no tools": of_chat(
        USER,
        said("assistant", ""),
        said("system", "S2"),
        said("user", "go"),
        tools=[],
        tool_choice=None,
        stop=None,
        n=1,
        prediction=None,
        temperature=0,
    ),
    "langchain": of_chat(
        said("system", "S", name=None),
        said("user", "go", name="u"),
        said(
            "assistant",
            None,
            tool_calls=[called()],
            function_call=None,
            refusal=None,
            audio=None,
            annotations=[],
        ),
        said("tool", "x", tool_call_id="call_1", name="read"),
        tools=[function(strict=True)],
        tool_choice={"type": "function", "function": {"name": "read"}},
        n=1,
        seed=None,
        logprobs=None,
        top_logprobs=None,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias=None,
        max_completion_tokens=64,
    ),
    "langchain, a strict form": of_chat(
        said("user", "{"),
        response_format={"type": "json_schema", "json_schema": FORM},
        max_completion_tokens=24,
        parallel_tool_calls=False,
    ),
    "langchain, any tool": of_chat(
        USER, tools=[function(parameters=OBJECT)], tool_choice="any", max_tokens=64
    ),
    "ai sdk": of_chat(
        said("system", "S"),
        said("user", [text("go")]),
        said(
            "assistant",
            "",
            tool_calls=[called(extra_content={"google": {"thought_signature": "x"}})],
        ),
        RESULT,
        tools=[function()],
        tool_choice="auto",
        user="u",
        seed=1,
        response_format={"type": "text"},
        logprobs=False,
        store=False,
        metadata={"a": "b"},
        verbosity="low",
    ),
    "ai sdk, an object": of_chat(
        said("user", "{"), response_format={"type": "json_object"}, max_tokens=16
    ),
    "ai sdk and cline of openrouter, thinking": of_chat(
        USER,
        thinking={"type": "enabled", "budget_tokens": 64},
        enable_thinking=True,
        reasoning={"max_tokens": 1024, "exclude": False},
        include_reasoning=True,
        provider={"order": ["x"]},
        moderation={"model": "m"},
        max_tokens=4096,
        stop=["<|im_end|>"],
    ),
    "openai sdk": of_chat(
        said("developer", [text("S")]),
        said("user", [text("go", prompt_cache_breakpoint={"type": "x"})]),
        modalities=["text"],
        audio=None,
        moderation=None,
        service_tier="auto",
        safety_identifier="u",
        prompt_cache_options={"mode": "auto"},
        prompt_cache_retention="24h",
        web_search_options=None,
        stream_options={"include_usage": True, "include_obfuscation": False},
    ),
    "openai sdk, a custom tool": of_chat(
        USER,
        tools=[
            {
                "type": "custom",
                "custom": {"name": "sh", "format": {"type": "text"}},
            },
            function(),
        ],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "read"}}],
            },
        },
    ),
    "openai sdk, two calls": of_chat(said("user", "two"), tools=[function()]),
    "copilot": of_chat(
        USER,
        tools=[function(parameters=None, description=None)],
        tool_choice="none",
        top_p=1,
        n=1,
    ),
    # Legacy completions
    "zed, edit prediction": (
        TEXTS,
        {
            "model": "local",
            "prompt": "go",
            "max_tokens": 16,
            "temperature": 0.2,
            "stop": [f"<|stop{i}|>" for i in range(14)],
        },
    ),
    # Messages
    "claude code": of_messages(
        said("user", [text("<system-reminder>\nR\n</system-reminder>"), text("go")]),
        said("system", [text("S", cache_control={"type": "ephemeral", "ttl": "1h"})]),
        system=[
            text("x-anthropic-billing-header: cc_version=2; cc_entrypoint=cli;"),
            text("S", cache_control={"type": "ephemeral"}),
        ],
        tools=[{**TOOL, "eager_input_streaming": True}],
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "max", "task_budget": {"type": "tokens"}},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        metadata={"user_id": "{}"},
        diagnostics={"previous_message_id": None},
    ),
    "claude code, tools run by the provider": of_messages(
        said("assistant", [{"type": "compaction", "content": "Before."}]),
        USER,
        said(
            "assistant",
            [
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s", "name": "w", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "mcp_tool_use", "id": "m", "name": "f", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": "x"},
                text("Hm.", citations=[{"type": "char_location"}]),
                {**USE, "caller": {"type": "direct"}},
            ],
        ),
        said(
            "user",
            [
                DONE,
                {"type": "container_upload", "file_id": "f"},
                {"type": "mcp_tool_listing", "server_name": "s", "tools": []},
                {"type": "tool_addition", "tool_name": "f"},
                {"type": "tool_removal", "tool_name": "f"},
                text("go"),
            ],
        ),
        tools=[
            {**TOOL, "type": "custom"},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "m"},
            {"type": "computer_20251124", "name": "computer", "display_width_px": 1},
        ],
    ),
    "claude code, an error and nothing": of_messages(
        USER,
        said("assistant", [USE, {**USE, "id": "toolu_2", "input": None}]),
        said(
            "user",
            [
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {**DONE, "content": None, "cache_control": {"type": "ephemeral"}},
            ],
        ),
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ),
    "anthropic sdk": of_messages(
        USER,
        said("assistant", "I"),
        system="",
        stop_sequences=[],
        top_k=5,
        top_p=0.9,
        service_tier="auto",
        container=None,
        inference_geo="us",
        speed="standard",
        mcp_servers=[],
        betas=["x"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        temperature=1,
        tool_choice=None,
        cache_control={"type": "ephemeral"},
    ),
    "anthropic sdk, a document": of_messages(
        said(
            "user",
            [
                {
                    "type": "document",
                    "source": {
                        "type": "text",
                        "media_type": "text/plain",
                        "data": "D",
                    },
                    "title": None,
                    "context": None,
                    "citations": {"enabled": True},
                },
                text("go"),
            ],
        )
    ),
    "langchain of anthropic": of_messages(
        USER,
        said(
            "assistant",
            [
                text("Hm.", index=0),
                {**USE, "index": 1, "partial_json": "{}"},
            ],
        ),
        said("user", [{**DONE, "content": [text("x")], "is_error": False}]),
        tools=[{**TOOL, "strict": True, "input_examples": [{}]}],
        tool_choice={"type": "tool", "name": "read"},
        max_tokens=64,
        stream=None,
    ),
    "a title in json": of_messages(
        said("user", "{"),
        output_config={"format": {"type": "json_schema", "schema": OBJECT}},
        max_tokens=16,
    ),
    # Responses
    "codex": of_responses(
        {"type": "message", **said("developer", [text("S", "input_text")])},
        {"type": "message", **said("user", [text("go", "input_text")])},
        instructions="I",
        tools=[
            FLAT,
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "tool_search"},
            {"type": "namespace", "name": "mcp", "tools": [{**FLAT, "name": "f"}]},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto", "context": None},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        client_metadata={"a": "b"},
    ),
    "codex, a replay": of_responses(
        said("user", [text("go", "input_text")]),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [text("Hm.", "reasoning_text")],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "phase": "commentary",
            **said(
                "assistant",
                [text("I.", "output_text", annotations=[], logprobs=[])],
            ),
        },
        {**CALL_ITEM, "id": "fc_1", "status": "completed"},
        {
            "type": "custom_tool_call",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin",
        },
        {
            **OUTPUT_ITEM,
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,A"}],
        },
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
        tools=[FLAT],
        store=False,
    ),
    "codex, reasoning that was cut": of_responses(
        said("user", "a"),
        {"type": "reasoning", "summary": [text("Hm.", "summary_text")]},
        said("user", "go"),
    ),
    "opencode of responses": of_responses(
        said("system", "S"),
        said("user", [text("go", "input_text")]),
        said("assistant", [text("I.", "output_text")], id="msg_1"),
        CALL_ITEM,
        {**OUTPUT_ITEM, "output": ""},
        max_output_tokens=32000,
        store=False,
        tools=[FLAT],
    ),
    "ai sdk of responses": of_responses(
        said("user", [text("{", "input_text")]),
        text={"format": {"type": "json_schema", **FORM}, "verbosity": None},
        max_output_tokens=16,
        top_logprobs=None,
        truncation="auto",
        service_tier="auto",
        user="u",
        max_tool_calls=3,
    ),
    "openai sdk of responses": (
        RESPONSES,
        {
            "input": "go",
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": "read"},
            "max_output_tokens": 64,
            "stream_options": {"include_obfuscation": False},
            "previous_response_id": None,
            "conversation": None,
            "background": False,
            "metadata": None,
        },
    ),
    "agents sdk": of_responses(
        said("user", "two"),
        said("assistant", [{"type": "refusal", "refusal": "No."}], type="message"),
        said("user", "two"),
        instructions=None,
        tools=[{**FLAT, "description": None}],
        tool_choice="required",
        max_output_tokens=64,
        parallel_tool_calls=False,
        reasoning=None,
        text=None,
        prompt_cache_retention=None,
        extra_field={"a": 1},
    ),
}


def script(request: GenerationRequest) -> str | None:
    """Return the text that the last message asks for; None: the model writes it."""
    if request.schema is not None or request.calls is not None:
        return None
    if request.chat is None:
        return "Text."
    question = str(request.chat.messages[-1]["content"]).split("\n")[-1]
    return SAID.get(question, "Hello.")


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    with (
        pytest.MonkeyPatch.context() as patch,
        scripted(script, patch, names=("local",)) as server,
    ):
        yield server


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_a_client_is_taken(server: Server, name: str) -> None:
    path, body = SHAPES[name]
    unstreamed = {name: body[name] for name in body if name != "stream_options"}
    whole = post(server, {**unstreamed, "stream": False}, path=path)
    assert whole.status == 200, whole.body[:400]
    streamed = post(server, {**body, "stream": True}, path=path)
    assert streamed.status == 200, streamed.body[:400]
    check, made = CHECKS[path], whole.json
    check(events(streamed), made)
    if path == MESSAGES:
        counted = post(server, body, path=f"{path}/count_tokens")
        assert counted.json["input_tokens"] > 0


def events(answer: Answer) -> list[tuple[str | None, Any]]:
    """Return the name and the data of each event of a stream."""
    result = []
    for block in answer.body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        name = next((it[7:] for it in lines if it.startswith("event: ")), None)
        data = next((it[6:] for it in lines if it.startswith("data: ")), None)
        if data is not None:
            result.append((name, data if data == "[DONE]" else json.loads(data)))
    return result


def check_chat(seen: list[tuple[str | None, Any]], whole: Any) -> None:
    """Check that the chunks begin with a role, and join to the whole message."""
    *chunks, (_, done) = seen
    assert done == "[DONE]"
    choices = [each["choices"][0] for _, each in chunks if each["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["finish_reason"] for each in choices[:-1]] == [None] * len(choices[1:])
    calls: list[Any] = []
    joined = {"content": "", "reasoning_content": ""}
    for choice in choices:
        for field in joined:
            joined[field] += choice["delta"].get(field, "")
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):  # a call's first piece
                assert piece["id"]
                assert piece["function"]["name"]
                calls.append({**piece["function"]})
            else:
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    (choice,) = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == choices[-1]["finish_reason"]
    assert joined["content"].strip() == (message["content"] or "").strip()
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    assert calls == [each["function"] for each in message.get("tool_calls", ())]
    for made in calls:
        assert isinstance(json.loads(made["arguments"]), dict)
    if calls and choice["finish_reason"] != "length":
        assert choice["finish_reason"] == "tool_calls"


def check_text(seen: list[tuple[str | None, Any]], whole: Any) -> None:
    *chunks, (_, done) = seen
    assert done == "[DONE]"
    text = "".join(each["choices"][0]["text"] for _, each in chunks)
    assert text == whole["choices"][0]["text"]


def check_messages(seen: list[tuple[str | None, Any]], whole: Any) -> None:
    """Check that blocks are open one at a time, and equal those of the whole answer."""
    assert all(name == data["type"] for name, data in seen)
    kept = [data for _, data in seen if data["type"] != "ping"]
    assert kept[0]["type"] == "message_start"
    assert kept[0]["message"]["content"] == []
    assert [each["type"] for each in kept[-2:]] == ["message_delta", "message_stop"]
    blocks: list[Any] = []
    opened: Any = None
    fields = {"text_delta": "text", "thinking_delta": "thinking"}
    for each in kept[1:-2]:
        assert each["index"] == len(blocks)
        if each["type"] == "content_block_start":
            assert opened is None
            opened, partial = {**each["content_block"]}, ""
        elif each["type"] == "content_block_stop":
            if opened["type"] == "tool_use":
                opened["input"] = json.loads(partial or "{}")
            assert opened.get("text") != ""
            blocks.append(opened)
            opened = None
        else:
            delta = each["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            elif delta["type"] == "signature_delta":
                opened["signature"] = delta["signature"]
            else:
                opened[fields[delta["type"]]] += delta[fields[delta["type"]]]
    assert opened is None
    stop = kept[-2]["delta"]["stop_reason"]
    assert stop == whole["stop_reason"]
    uses = [each for each in blocks if each["type"] == "tool_use"]
    assert (stop == "tool_use") == bool(uses) or stop == "max_tokens"
    assert _without_ids(blocks) == _without_ids(whole["content"])


def check_responses(seen: list[tuple[str | None, Any]], whole: Any) -> None:
    """Check event numbers, item ids and indices; the last event holds all items."""
    assert all(name == data["type"] for name, data in seen)
    data = [each for _, each in seen]
    assert [each["sequence_number"] for each in data] == [*range(len(data))]
    assert data[0]["type"] == "response.created"
    end = data[-1]["response"]
    assert data[-1]["type"] == f"response.{end['status']}"
    items: list[Any] = []
    opened: Any = None
    for each in data[1:-1]:
        if "output_index" not in each:
            assert each["type"] == "response.in_progress"
            continue
        assert each["output_index"] == len(items)
        if each["type"] == "response.output_item.added":
            assert opened is None
            opened = each["item"]
            assert opened["status"] == "in_progress"
        elif each["type"] == "response.output_item.done":
            assert each["item"]["id"] == opened["id"]
            items.append(each["item"])
            opened = None
        else:
            assert each["item_id"] == opened["id"]
    assert opened is None
    assert end["output"] == items
    assert end["id"] == data[0]["response"]["id"]
    assert _without_ids(items) == _without_ids(whole["output"])
    for each in items:
        if each["type"] == "function_call":
            assert isinstance(json.loads(each["arguments"]), dict)


def _without_ids(items: list[Any]) -> list[Any]:
    return [
        {name: value for name, value in each.items() if name not in ("id", "call_id")}
        for each in items
    ]


CHECKS = {
    CHAT: check_chat,
    TEXTS: check_text,
    MESSAGES: check_messages,
    RESPONSES: check_responses,
}
