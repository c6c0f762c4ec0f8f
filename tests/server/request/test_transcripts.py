"""Transcripts of agents as the chat template receives them: order, tools, images."""

import json
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_speculation.server import Limits, Settings
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis.chat_completions import ChatBody
from mlx_speculation.server.apis.messages import CountBody
from mlx_speculation.server.apis.responses import ResponsesBody
from mlx_speculation.server.chat_prompts import ChatTemplate, Traits, fitted
from mlx_speculation.server.request.options import Chat, GenerationRequest
from support.models.tiny_tokenizer import byte_tokenizer
from support.processes.servers import read_body, refusal

SETTINGS = Settings(names=("local",), reads_images=False)
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
REMINDER = "<system-reminder>\nS\n</system-reminder>"


def chat_of(request: GenerationRequest) -> Chat:
    assert request.chat is not None
    return request.chat


def messages(*turns: Any, **more: Any) -> Chat:
    """Return the chat of a Messages API request with these turns."""
    body = read_body(CountBody, {"messages": list(turns), **more})
    return chat_of(body.request(SETTINGS))


def chat(*turns: Any, **more: Any) -> Chat:
    body = read_body(ChatBody, {"messages": list(turns), **more})
    return chat_of(body.request(SETTINGS))


def responses(*items: Any, **more: Any) -> Chat:
    body = read_body(ResponsesBody, {"input": list(items), **more})
    return chat_of(body.request(SETTINGS))


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def pairs(made: Chat) -> list[tuple[str, Any]]:
    return [(each["role"], each["content"]) for each in made.messages]


def used(name: str, call: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}


def result(call: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


@pytest.mark.parametrize("content", ["S", [text("S", cache_control={"type": "x"})]])
def test_a_later_instruction_is_a_reminder_in_the_turn_beside_it(content: Any) -> None:
    first = messages(turn("user", "U"), turn("system", content), system="H")
    assert pairs(first) == [("system", "H"), ("user", f"U\n{REMINDER}")]
    later = [turn("user", "U"), turn("system", "S"), turn("assistant", "A")]
    after = messages(*later, turn("user", "V"), system="H")
    assert pairs(after)[:2] == pairs(first)
    before = chat(turn("user", "U"), turn("assistant", "A"), turn("developer", "S"))
    assert pairs(before)[-1] == ("user", REMINDER)
    beside = chat(
        *(turn("user", "U"), turn("assistant", "A"), turn("developer", "S")),
        turn("user", "V"),
    )
    assert pairs(beside)[-1] == ("user", f"{REMINDER}\nV")


def test_instructions_that_lead_are_one_message() -> None:
    leading = [turn("system", "A"), turn("developer", "B"), turn("user", "U")]
    assert pairs(chat(*leading)) == [("system", "A\n\nB"), ("user", "U")]
    made = responses(*leading, instructions="I")
    assert pairs(made) == [("system", "I\n\nA\n\nB"), ("user", "U")]
    blocks = [text("A"), text("B", cache_control={"type": "ephemeral"})]
    made = messages(turn("user", "U"), system=blocks)
    assert pairs(made)[0] == ("system", "A\n\nB")


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1.332.e8f; cc_entrypoint=sdk-cli;",
        "x-anthropic-billing-header: cc_version=2.1.177; cch=0a1b2;",
    ],
)
def test_the_billing_line_is_left_out(line: str) -> None:
    plain = messages(turn("user", "U"), system=[text("H")])
    for blocks in ([text(line), text("H")], [text(f"{line}\nH")]):
        assert messages(turn("user", "U"), system=blocks) == plain
    later = [turn("user", "U"), turn("system", f"{line}\nS")]
    assert pairs(messages(*later))[-1][1].endswith(REMINDER)
    quoted = messages(turn("user", "U"), system=f"See: {line}")
    assert line in pairs(quoted)[0][1]


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = turn("assistant", [text("A"), used("f", "1"), used("f", "2", a=1)])
    answers = [result("2", "two"), text("U"), result("1", [text("o"), text("ne")])]
    made = messages(turn("user", "Q"), calls, turn("user", answers), tools=[TOOL])
    assert pairs(made)[2:] == [("tool", "o\nne"), ("tool", "two"), ("user", "U")]
    assert [each["tool_call_id"] for each in made.messages[2:4]] == ["1", "2"]
    arguments = [
        call["function"]["arguments"] for call in made.messages[1]["tool_calls"]
    ]
    assert arguments == [{}, {"a": 1}]
    items = [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {
            **{"type": "function_call_output", "call_id": "1"},
            "output": [{"type": "input_text", "text": "one"}],
        },
    ]
    made = responses(turn("user", "Q"), *items)
    assert pairs(made)[1:] == [("assistant", ""), ("tool", "one"), ("tool", "two")]
    assert len(made.messages[1]["tool_calls"]) == 2


def test_empty_results_and_those_of_images_are_texts() -> None:
    call = turn("assistant", [used("f", "1")])
    image = {
        "type": "image",
        "source": {"type": "base64", "data": "", "media_type": "image/png"},
    }
    for content, seen in (
        (None, ""),
        ([], ""),
        ([image], "[An image, which this model cannot see.]"),
        ([{"type": "document", "source": {"type": "text", "data": "D"}}], "D"),
    ):
        made = messages(turn("user", "Q"), call, turn("user", [result("1", content)]))
        assert pairs(made)[-1] == ("tool", seen)
    failed = messages(
        turn("user", "Q"), call, turn("user", [result("1", is_error=True)])
    )
    assert pairs(failed)[-1] == ("tool", "Error")


def test_a_deferred_tool_is_described_where_it_is_named() -> None:
    """In the list of tools, it would change the prefix that all turns share."""
    late = {**TOOL, "name": "late", "defer_loading": True}
    hidden = {**TOOL, "name": "DeferredToolPlaceholder", "defer_loading": True}
    before = messages(turn("user", "Q"), tools=[TOOL, hidden])
    turns = [
        turn("user", "Q"),
        turn("assistant", [used("ToolSearch", "1")]),
        turn("user", [result("1", [{"type": "tool_reference", "tool_name": "late"}])]),
    ]
    after = messages(*turns, tools=[late, TOOL, hidden])
    assert before.tools == after.tools
    assert [tool["function"]["name"] for tool in after.deferred] == [
        *("late", "DeferredToolPlaceholder")
    ]
    assert '"name": "late"' in pairs(after)[-1][1]
    assert "Placeholder" not in json.dumps(after.messages)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {"messages": [turn("user", "Q")]}),
        (CountBody, {"messages": [turn("user", "Q")]}),
        (ResponsesBody, {"input": "Q"}),
    ],
    ids=["chat", "messages", "responses"],
)
def test_a_request_without_a_length_has_the_limit(
    model: Any, body: dict[str, Any]
) -> None:
    limited = Settings(names=("local",), limits=Limits(max_tokens=5))
    made = read_body(model, body).request(limited)
    assert made.options["max_tokens"] == 5
    assert "max_tokens" not in read_body(model, body).request(SETTINGS).options


def test_a_server_without_drafts_takes_a_draft_length_of_0() -> None:
    limited = Settings(names=("local",), limits=Limits(draft_tokens=0))
    for length, status in ((0, 0), (1, 400)):
        body = {"messages": [turn("user", "Q")], "num_draft_tokens": length}
        made = read_body(ChatBody, body)
        assert refusal(lambda: made.request(limited)) == status  # noqa: B023


def allowed(api: str, mode: str, *names: str) -> tuple[list[str], Any]:
    """Return two lists of tools for a request that allows `names` of three tools.

    The first names the tools in the prompt. The second names the tools for a
    required call; it is None if no call is required.
    """
    three = [{**FUNCTION["function"], "name": name} for name in ("f", "g", "h")]
    if api == "chat":
        named: Any = [{"type": "function", "function": {"name": n}} for n in names]
        form: dict[str, Any] = {"allowed_tools": {"mode": mode, "tools": named}}
        tools = [{"type": "function", "function": each} for each in three]
        body: Any = {"messages": [turn("user", "Q")], "tools": tools}
        body["tool_choice"] = {"type": "allowed_tools", **form}
        made = read_body(ChatBody, body).request(SETTINGS)
    else:
        named = [{"type": "function", "name": name} for name in names]
        flat = [{"type": "function", **each} for each in three]
        body = {"input": "Q", "tools": flat}
        form = {"type": "allowed_tools", "mode": mode, "tools": named}
        body["tool_choice"] = form
        made = read_body(ResponsesBody, body).request(SETTINGS)
    calls = made.calls and [each["name"] for each in made.calls]
    return [tool["function"]["name"] for tool in chat_of(made).tools], calls


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_allowed_tools_are_the_only_ones(api: str) -> None:
    assert allowed(api, "auto", "h", "f") == (["f", "h"], None)
    assert allowed(api, "required", "g") == (["g"], ["g"])
    assert allowed(api, "auto") == ([], None)
    for names in (("x",), ()):
        with pytest.raises(ApiError, match="tools are: ") as refused:
            allowed(api, "required", *names)
        assert refused.value.param == "tool_choice"


def test_tools_run_by_a_provider_may_be_allowed_and_are_passed_over() -> None:
    search = {"type": "web_search"}
    tools = [{"type": "function", **FUNCTION["function"]}, search]
    form = {"type": "allowed_tools", "tools": [search, tools[0]]}
    made = responses(turn("user", "Q"), tools=tools, tool_choice=form)
    assert [tool["function"]["name"] for tool in made.tools] == ["f"]
    with pytest.raises(ApiError, match="not run here"):
        responses(turn("user", "Q"), tools=tools, tool_choice=search)
    hosted = {"type": "mcp", "function": {"name": "x"}}
    assert responses(turn("user", "Q"), tools=[hosted, *tools]).tools == made.tools


def test_reasoning_is_replayed_by_every_api() -> None:
    """Other parts that agents put into a message of the model are ignored."""
    blocks = [
        {"type": "thinking", "thinking": "T", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        text("A", citations=None),
    ]
    made = messages(turn("user", "Q"), turn("assistant", blocks))
    assert made.messages[1]["reasoning_content"] == "T"
    more = {
        **dict.fromkeys(("audio", "function_call", "refusal", "tool_calls")),
        **{"reasoning_content": "T", "reasoning_details": [1], "annotations": []},
        **{"cache_control": {"type": "x"}, "id": "x", "colour": "red"},
    }
    replayed = chat(turn("user", "Q"), turn("assistant", None, **more))
    assert replayed.messages[1] == {
        **{"role": "assistant", "content": "", "reasoning_content": "T"}
    }
    items = [
        {
            **{"type": "reasoning", "summary": [], "encrypted_content": None},
            "content": [{"type": "reasoning_text", "text": "T"}],
        },
        turn("assistant", [{"type": "output_text", "text": "A"}], type="message"),
        {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "I"},
    ]
    made = responses(turn("user", "Q"), *items)
    (said,) = made.messages[1:]
    assert (said["content"], said["reasoning_content"]) == ("A", "T")
    assert said["tool_calls"][0]["function"] == {
        "name": "p",
        "arguments": {"input": "I"},
    }


def test_reasoning_without_an_answer_is_not_that_of_a_later_turn() -> None:
    """A response that ends within its thinking consists of reasoning only."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}]}
    answer = turn("assistant", "A")
    made = responses(turn("user", "Q"), thought, turn("user", "R"), answer)
    assert [each.get("reasoning_content") for each in made.messages] == [None] * 3


def test_a_compaction_is_the_text_of_the_turns_before() -> None:
    compacted = [{"type": "compaction", "content": "Before."}, text(" A")]
    made = messages(turn("assistant", compacted), turn("user", "Q"))
    assert pairs(made)[0] == ("assistant", "Before. A")
    failed = [{"type": "compaction", "content": None}, text("A")]
    assert pairs(messages(turn("assistant", failed)))[0] == ("assistant", "A")


@pytest.mark.parametrize("broken", ["{", '{"a": 1', "[1]", "5", '"x"', "{'a': 1}", 7])
def test_broken_arguments_are_named_by_their_message(broken: Any) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": broken}}]
    with pytest.raises(ApiError) as refused:
        chat(turn("user", "Q"), turn("assistant", "", tool_calls=calls))
    field = "messages[1].tool_calls[0].function.arguments"
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize("given", ["", " ", "{}", "null", None, {}])
def test_empty_arguments_are_an_empty_object(given: Any) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": given}}]
    made = chat(turn("user", "Q"), turn("assistant", None, tool_calls=calls))
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    del calls[0]["function"]["arguments"]  # type: ignore[attr-defined]
    assert chat(turn("user", "Q"), turn("assistant", None, tool_calls=calls)) == made


CALLS = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}|ARGUMENTS{% endfor %}]"
    "{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
TEMPLATES = {
    "iterates": TOOLS
    + CALLS.replace(
        "ARGUMENTS",
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    ),
    "concatenates": TOOLS
    + CALLS.replace("ARGUMENTS", "{{ 'A' + c.function.arguments }}"),
    "prints": TOOLS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}"),
    "dumps": TOOLS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"),
    "short ids": TOOLS
    + CALLS.replace(
        "ARGUMENTS",
        "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "{{ c.function.arguments | tojson }}",
    ),
    "no calls": TOOLS + CALLS.partition("{% for c")[0] + "]{% endfor %}",
    "no tools": CALLS.partition("{% for c")[0] + "]{% endfor %}",
    "alternates": STRICT,
}
HISTORY = [
    turn("system", "H"),
    turn("user", "Q"),
    turn("user", "R"),
    turn(
        "assistant",
        "A",
        tool_calls=[
            {"id": "call_1", "function": {"name": "f", "arguments": '{"kxk": "vxv"}'}},
            {"id": "call_2", "function": {"name": "f", "arguments": ""}},
        ],
    ),
    turn("tool", "TWO", tool_call_id="call_2"),
    turn("tool", "ONE", tool_call_id="call_1"),
    turn("user", "S"),
]


def template_of(name: str) -> ChatTemplate:
    """Return a chat template; its byte tokenizer has a parser of tool calls."""
    plain = byte_tokenizer()._tokenizer
    plain.chat_template = TEMPLATES[name]
    wrapped = TokenizerWrapper(
        plain,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )
    return ChatTemplate(wrapped, {})


def test_a_short_chat_does_not_wait_until_a_long_one_is_encoded() -> None:
    template, short = template_of(next(iter(TEMPLATES))), chat(turn("user", "Q"))
    alone, ends = template.rendered(short), [time.monotonic()]
    long, ids = chat(turn("user", "word " * 100_000)), list[int]()
    thread = threading.Thread(target=lambda: ids.extend(template.rendered(long)))
    thread.start()
    while thread.is_alive():
        assert template.rendered(short) == alone
        ends.append(time.monotonic())
    assert len(ids) > 500_000
    longest = max(after - before for before, after in pairwise(ends))
    assert longest < (ends[-1] - ends[0]) / 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_shows_all_of_a_history(name: str) -> None:
    template = template_of(name)
    made = chat(*HISTORY, tools=[FUNCTION])
    shown = template._tokenizer.decode(template.rendered(made))
    places = [shown.find(word) for word in ("H", "Q", "R", "kxk", "vxv", "ONE", "TWO")]
    assert -1 not in places, shown
    assert places[3:] == sorted(places[3:]), shown
    assert "{'kxk'" not in shown


def test_traits_are_what_templates_know() -> None:
    traits = {name: template_of(name).traits for name in TEMPLATES}
    assert traits["iterates"] == traits["dumps"] == Traits()
    assert traits["concatenates"] == traits["prints"] == Traits(text_arguments=True)
    assert traits["short ids"] == Traits(short_ids=True)
    assert traits["no calls"] == Traits(calls=False)
    assert traits["no tools"] == Traits(tools=False, calls=False)
    strict = Traits(tools=False, calls=False, system=False, neighbours=False)
    assert traits["alternates"] == strict


def test_turns_are_joined_where_they_have_to_alternate() -> None:
    strict = Traits(tools=False, calls=False, system=False, neighbours=False)
    made = chat(*HISTORY, tools=[FUNCTION])
    roles = [each["role"] for each in fitted(made.messages, made.tools, strict)]
    assert roles == ["user", "assistant", "user"]
    begins = chat(turn("assistant", "A"), turn("user", "U"))
    roles = [each["role"] for each in fitted(begins.messages, (), strict)]
    assert roles == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("more", "args"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"thinking_budget": 0}, {"enable_thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"preserve": 1}},
            {"enable_thinking": True, "preserve": 1},
        ),
    ],
)
def test_thinking_is_switched_in_every_way(
    more: dict[str, Any], args: dict[str, Any]
) -> None:
    assert chat(turn("user", "Q"), **more).template_args == args


def test_thinking_is_switched_by_messages_and_responses() -> None:
    for kind, on in (("enabled", True), ("adaptive", True), ("disabled", False)):
        made = messages(turn("user", "Q"), thinking={"type": kind})
        assert made.template_args == {"enable_thinking": on}
    made = responses(turn("user", "Q"), reasoning={"effort": "none", "summary": "auto"})
    assert made.template_args == {"enable_thinking": False}
    made = responses(turn("user", "Q"), reasoning={"effort": "high"})
    expected = {"enable_thinking": True, "reasoning_effort": "high"}
    assert made.template_args == expected
    budget = CountBody.model_validate(
        {
            "messages": [turn("user", "Q")],
            "thinking": {"type": "enabled", "budget_tokens": 9},
        }
    )
    assert budget.request(SETTINGS).thinking_budget == 9
