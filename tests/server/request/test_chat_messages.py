"""Chats over HTTP: templates, reasoning, tool calls and schemas."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import pythonic
from mlx_lm.tool_parsers.json_tools import parse_tool_call
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.schemas.constraint import call_grammar
from support.models.tiny_models import build
from support.processes.servers import NAME, client_of, get, serving

CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
ALL = f"<think>HM</think>YES{CALL}"
EXTRA = ("<think>", "</think>", ALL, "<end>")
SAID, END = 258, 259
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if messages[0].content == 'RAISE' %}{{ raise_exception('NO') }}{% endif %}"
    "A:{% if thinks %}<think>{% endif %}"
)
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
MARKS = ("<tool_call>", "</tool_call>")
USER: Any = [{"role": "user", "content": "HI"}]


def chat_tokenizer() -> TokenizerWrapper:
    """Make a byte tokenizer with thinking marks, tool calls and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *EXTRA])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="<end>"
    )
    fast.add_tokens(["<think>", "</think>"])  # known ids, now never split
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=parse_tool_call,
    )


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    """Make a generator with the chat tokenizer."""
    model = build("llama", vocab=256 + len(EXTRA))
    return SpeculativeGenerator(
        model, chat_tokenizer(), draft="lookup", draft_length=3, prefix_cache=prefixes
    )


@pytest.fixture(name="chat", scope="module")
def _chat() -> Iterator[Callable[..., Any]]:
    limits = {"max_tokens": 200}
    with (
        serving(make, draft="lookup", limits=limits) as server,
        client_of(server) as client,
    ):

        def ask(**options: Any) -> Any:
            return client.chat.completions.create(
                **{"model": NAME, "messages": USER, **options}
            )

        yield ask
        assert b"its constraint" not in get(server, "/metrics").body


def said(*tokens: int) -> dict[str, Any]:
    """Return options with which the model generates exactly these tokens."""
    bias = {str(token): 100 - 30 * i for i, token in enumerate(tokens)}
    return {
        "logit_bias": bias,
        "presence_penalty": 100,
        "max_tokens": len(tokens),
        "extra_body": {"presence_context_size": 0},
    }


def test_thoughts_text_and_tool_calls_are_kept_apart(chat: Callable[..., Any]) -> None:
    answer = chat(tools=[TOOL], **said(SAID, END))
    choice = answer.choices[0]
    assert choice.message.content == "YES"
    assert choice.message.model_extra["reasoning"] == "HM"
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1}
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == 2


def test_what_only_begins_like_a_mark_is_text(chat: Callable[..., Any]) -> None:
    """A beginning of a mark is held back, and is text if the end token follows."""
    less = sorted(pre_tokenizers.ByteLevel.alphabet()).index("<")
    answer = chat(**said(less, END)).choices[0]
    assert answer.message.content == "<"
    assert answer.finish_reason == "stop"


def test_the_template_makes_the_prompt(chat: Callable[..., Any]) -> None:
    text = "user:HI;A:"
    assert chat(max_tokens=1).usage.prompt_tokens == len(text)
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "I"}]
    in_parts = chat(max_tokens=1, messages=[{"role": "user", "content": parts}])
    assert in_parts.usage.prompt_tokens == len(text)
    with_tool = chat(max_tokens=1, tools=[TOOL]).usage.prompt_tokens
    assert with_tool == len(text) + len("add")
    without = chat(max_tokens=1, tools=[TOOL], tool_choice="none").usage
    assert without.prompt_tokens == len(text)


def test_a_template_that_refuses_says_so(chat: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"refused the messages: .*NO"):
        chat(messages=[{"role": "user", "content": "RAISE"}])


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def test_a_schema_that_cannot_be_used_is_refused(chat: Callable[..., Any]) -> None:
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError, match="JSON schema cannot be") as error:
        chat(response_format=wrong)
    assert error.value.param == "response_format"


@pytest.mark.parametrize(
    ("misplaced", "words"),
    [
        ({"schema": {"type": "object"}}, r"as response_format\.json_schema\.schema"),
        ({"json_schema": {"type": "object"}}, "json_schema must be an object"),
    ],
)
def test_a_misplaced_schema_is_refused_with_its_place(
    misplaced: dict[str, Any], words: str, chat: Callable[..., Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        chat(response_format={"type": "json_schema", **misplaced})


def test_tools_that_cannot_be_used_are_named(chat: Callable[..., Any]) -> None:
    tool = {"name": "paint", "parameters": {"type": "colour"}}
    tools = [{"type": "function", "function": tool}]
    with pytest.raises(openai.BadRequestError, match="grammar of the tools") as error:
        chat(tools=tools, tool_choice="required")
    assert error.value.param == "tools"


def thinking(budget: int | None = None) -> dict[str, Any]:
    """Return options with which the template opens a thinking block."""
    body: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}}
    return {"extra_body": {**body, "thinking_budget": budget}}


@pytest.mark.parametrize("budget", [None, 7])
def test_a_text_fits_its_schema_from_the_end_of_thinking_on(
    chat: Callable[..., Any], budget: int | None
) -> None:
    options = {"temperature": 1, "max_tokens": 160, **thinking(budget)}
    for seed in range(3):
        answer = chat(response_format=FORMAT, seed=seed, **options)
        choice, usage = answer.choices[0], answer.usage.completion_tokens_details
        assert choice.message.model_extra["reasoning_content"]
        assert usage.reasoning_tokens <= (budget or 80) + 1
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content)["b"] in ("x", "y")
            return
    raise AssertionError("no text came to its end")


def test_a_forced_call_comes_after_thinking(chat: Callable[..., Any]) -> None:
    options = {"temperature": 1, "seed": 1, "max_tokens": 160, **thinking(5)}
    choice = chat(tools=TOOLS, tool_choice=NAMED, **options).choices[0]
    assert choice.message.model_extra["reasoning_content"]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("stop", "{}")


def test_thinking_has_a_budget_without_a_schema_too(chat: Callable[..., Any]) -> None:
    options = {"temperature": 1, "seed": 1, "max_tokens": 30, **thinking(5)}
    answer = chat(**options)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6
    assert answer.choices[0].message.content


NUMBER = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}},
    "required": ["n"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("add", NUMBER), ("stop", NOTHING))
]
NAMED: Any = {"type": "function", "function": {"name": "stop"}}


def test_a_call_that_is_required_is_made(chat: Callable[..., Any]) -> None:
    """A constraint makes the call: random weights would hardly produce one."""
    names = set()
    for seed in range(4):
        drawn = {"temperature": 1, "seed": seed, "max_tokens": 150}
        choice = chat(tools=TOOLS[:1], tool_choice="required", **drawn).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments)["n"] in (1, 22)
        assert not choice.message.content
        drawn["temperature"] = 50  # so high that the weights hardly matter
        either = chat(tools=TOOLS, tool_choice="required", **drawn).choices[0]
        names.add(either.message.tool_calls[0].function.name)
    assert names == {"add", "stop"}


def test_a_call_has_the_definitions_of_its_own_tool(chat: Callable[..., Any]) -> None:
    """Each tool's "$ref" is resolved in the schema of that tool."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/N"}},
                    "$defs": {"N": {"enum": [number]}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
        }
        for name, number in (("one", 1), ("two", 2))
    ]
    drawn = {"temperature": 50, "max_tokens": 150, "tool_choice": "required"}
    made = set()
    for seed in range(6):
        (choice,) = chat(tools=tools, seed=seed, **drawn).choices
        (call,) = choice.message.tool_calls
        made.add((call.function.name, call.function.arguments))
    assert made == {("one", '{"n": 1}'), ("two", '{"n": 2}')}


def test_a_call_that_is_named_is_made(chat: Callable[..., Any]) -> None:
    for seed in range(3):
        drawn = {"temperature": 1, "seed": seed, "max_tokens": 60}
        choice = chat(tools=TOOLS, tool_choice=NAMED, **drawn).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("stop", "{}")
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice is 'required', but the tools are: "),
        (
            {"tool_choice": "some", "tools": TOOLS},
            "tool_choice is 'some', but the tools are",
        ),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "jump"}},
                "tools": TOOLS,
            },
            "the tools are: 'add', 'stop'",
        ),
        (
            {"tool_choice": NAMED, "tools": TOOLS, "response_format": FORMAT},
            "Leave one of them out",
        ),
    ],
)
def test_a_call_that_cannot_be_asked_for_is_refused(
    chat: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**options)
    assert said in str(refused.value)
    assert refused.value.param in ("tool_choice",)


def test_calls_that_are_no_json_are_not_forced() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(ApiError, match="writes its calls as 'pythonic'"):
        call_grammar([TOOL["function"]], tokenizer, pythonic.parse_tool_call, MARKS)


def test_special_marks_are_special_in_the_grammar() -> None:
    tokenizer = chat_tokenizer()
    tokenizer._tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    grammar = call_grammar([TOOL["function"]], tokenizer, parse_tool_call, MARKS)
    assert grammar.startswith('lark:start: <tool_call> "\\n" call "\\n" "</tool_call>"')


def test_hints_of_openais_leave_the_text(chat: Callable[..., Any]) -> None:
    expected = chat(max_tokens=4).choices[0].message.content
    hints: dict[str, Any] = {
        "verbosity": "low",
        "reasoning_effort": "high",
        "prediction": {"type": "content", "content": "x"},
        "store": True,
        "extra_body": {"cache_control": {"type": "ephemeral"}, "session_id": "x"},
    }
    for name, value in hints.items():
        answer = chat(max_tokens=4, **{name: value})
        assert answer.choices[0].message.content == expected
