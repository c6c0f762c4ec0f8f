"""Sessions of an agent through each API: the part of each prompt that is read again."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_speculation.server import Server
from mlx_speculation.server.request.options import GenerationRequest
from support.processes.scripted_servers import call, scripted
from support.processes.servers import post

AGAIN, MANY = 0.03, 200
HEAD = " ".join(f"Rule {i}: leave file_{i}.py as it is." for i in range(400))
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


def script(request: GenerationRequest) -> str:
    """Return a thought and a tool call for every turn."""
    assert request.chat is not None
    number = len(request.chat.messages)
    arguments = json.dumps({"path": f"src/file_{number}.py", "lines": [1, number]})
    thought = f"<think>\nFile {number} is next.\n</think>\n\n"
    return f"{thought}I read it.\n{call('read', arguments)}"


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, scripted(script, patch) as server:
        yield server


def result(turn: int) -> str:
    return f"{turn}: " + "def value(x): return x + 1  # kept\n" * 5


def chats(server: Server, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield each turn's counts of prompt tokens, cached tokens and generated tokens."""
    tools = [{"type": "function", "function": {"name": "read"}}]
    tools[0]["function"]["parameters"] = PARAMETERS  # type: ignore[index]
    messages: list[Any] = [{"role": "system", "content": HEAD}]
    messages.append({"role": "user", "content": "Read all."})
    for turn in range(count):
        body = {"messages": messages, "tools": tools}
        answer = post(server, body, path="/v1/chat/completions").json
        message = answer["choices"][0]["message"]
        (made,) = message["tool_calls"]
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": made["id"]})
        messages[-1]["content"] = result(turn)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        yield usage["prompt_tokens"], cached, usage["completion_tokens"]


def messages(server: Server, count: int) -> Iterator[tuple[int, int, int]]:
    tools = [{"name": "read", "input_schema": PARAMETERS}]
    turns: list[Any] = [{"role": "user", "content": "Read all."}]
    # This reminder keeps its place, but changes its form after the first turn.
    turns.append({"role": "system", "content": [{"type": "text", "text": "Be brief."}]})
    for turn in range(count):
        head = [{"type": "text", "text": f"x-anthropic-billing-header: cch={turn:05};"}]
        head.append({"type": "text", "text": HEAD, "cache_control": {}})  # type: ignore[dict-item]
        body = {"max_tokens": 32_000, "system": head, "messages": turns, "tools": tools}
        answer = post(server, body, path="/v1/messages").json
        turns[1]["content"] = "Be brief."
        called = answer["content"][-1]["id"]
        block = {"type": "tool_result", "tool_use_id": called, "content": result(turn)}
        turns.append({"role": "assistant", "content": answer["content"]})
        turns.append({"role": "user", "content": [{**block, "cache_control": {}}]})
        for each in turns[2:-1:2]:
            for part in each["content"]:
                part.pop("cache_control", None)
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        yield usage["input_tokens"] + cached, cached, usage["output_tokens"]


def responses(server: Server, count: int) -> Iterator[tuple[int, int, int]]:
    tools = [{"type": "function", "name": "read", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "developer", "content": HEAD}]
    items.append({"role": "user", "content": "Read all."})
    for turn in range(count):
        body = {"input": items, "tools": tools, "store": False}
        answer = post(server, body, path="/v1/responses").json
        items += answer["output"]
        called = answer["output"][-1]["call_id"]
        items.append({"type": "function_call_output", "call_id": called})
        items[-1]["output"] = [{"type": "input_text", "text": result(turn)}]
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        yield usage["input_tokens"], cached, usage["output_tokens"]


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("api", [chats, messages, responses])
def test_a_session_reads_little_again(
    api: Callable[[Server, int], Iterator[tuple[int, int, int]]],
    count: int,
    server: Server,
) -> None:
    turns = list(api(server, count))
    again, seen = 0, turns[0][0]
    for prompt, cached, generated in turns[1:]:
        new = prompt - seen  # a part of these may be cached already, hence `max`
        again += max(0, prompt - cached - new)
        seen = prompt
        assert generated > 0
    total = sum(prompt for prompt, _, _ in turns)
    assert turns[0][0] > 5000
    assert again <= AGAIN * total, (again, total)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_request_has_two_hundred_tools(server: Server, choice: str) -> None:
    """All tools are in the prompt, and the next turn reads none of them again."""
    name = "a description of some length, " * 5
    function = {"description": name, "parameters": PARAMETERS}
    functions = [{"name": f"tool_{i}", **function} for i in range(MANY)]
    tools = [
        {"type": "function", "function": each}
        for each in (*functions, {"name": "read", **function})
    ]
    turns: list[Any] = [{"role": "user", "content": "Read all."}]
    body = {"messages": turns, "tools": tools, "tool_choice": choice}
    first = post(server, body, path="/v1/chat/completions").json
    message = first["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert choice == "required" or made["function"]["name"] == "read"
    turns += [message, {"role": "tool", "tool_call_id": made["id"], "content": "x"}]
    usage = post(server, body, path="/v1/chat/completions").json["usage"]
    assert first["usage"]["prompt_tokens"] > MANY * len(name) / 8
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (1 - AGAIN) * first["usage"]["prompt_tokens"]
