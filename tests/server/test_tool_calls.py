"""Tool calls in a model's text: parsed where possible, otherwise kept as content."""

import importlib
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import openai
import pytest
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import pre_tokenizers

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.server.answer_parts import (
    AnswerParser,
    Part,
    Text,
    ToolCall,
    joined,
    read_calls,
)
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.processes.servers import NAME, client_of, serving

NOW: tuple[str, dict[str, Any]] = ("now", {})
ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": "x"})
# For each parser of mlx-lm: texts between the marks, and the calls in them.
CALLS: dict[str, list[tuple[str, list[tuple[str, dict[str, Any]]]]]] = {
    "json_tools": [
        ('{"name": "now"}', [NOW]),
        ('\n{"name": "now", "arguments": null}\n', [NOW]),
        ('{"name": "now", "arguments": ""}', [NOW]),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', [ADD]),
        ('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": "x"}}', [ADD]),
        (
            '[{"name": "now"}, {"name": "add", "arguments": {"a": 1, "b": "x"}}]',
            [NOW, ADD],
        ),
    ],
    "qwen3_coder": [
        ("<function=now></function>", [NOW]),
        (
            "\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
            "</parameter>\n</function>",
            [ADD],
        ),
    ],
    "pythonic": [("[now()]", [NOW]), ("[now(), add(a=1, b='x')]", [NOW, ADD])],
    "mistral": [("now[ARGS]{}", [NOW]), ('[{"name": "now"}]', [NOW])],
    "glm47": [
        ("now", [NOW]),
        (
            "add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
            "<arg_value>x</arg_value>",
            [ADD],
        ),
    ],
    "kimi_k2": [
        (
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|>",
            [NOW],
        )
    ],
    "minimax_m2": [('<invoke name="now"></invoke>', [NOW])],
}
BROKEN: dict[str, list[str]] = {
    "json_tools": [
        *("[1]", '"f"', "1", "null", "", " ", "[]", "{}", "NaN", '{"name": "now"'),
        *('{"arguments": {}}', '{"name": 1, "arguments": {}}', '{"name": ""}'),
        *('{"name": "now", "arguments": []}', '{"name": "now", "arguments": 0}'),
        *('{"name": "now", "arguments": [1]}', '{"name": "now", "arguments": "x"}'),
        *('{"name": "now", "arguments": {"a": NaN}}', '[{"name": "now"}, 1]'),
        *('{"name": null}', '{"name": "now"} {"name": "now"}', "[" * 100_000),
    ],
    "qwen3_coder": ["", "<function=now>", "<function=></function>", '{"name": "now"}'],
    "pythonic": ["", "[", "now", "[1]", "[now(a={1, 2})]", "[now(a=b'x')]"],
    "mistral": ["now", "[1]", '{"name": "now"}', "now[ARGS]{", "now[ARGS][1]"],
    "glm47": ["", " ", '{"name": "now"}', "[1]"],
    "kimi_k2": ["", "x", "functions.now:0<|tool_call_argument_begin|>[1]"],
    "minimax_m2": ["", "<invoke>", '<invoke name=""></invoke>'],
    "gemma4": ["", "call:", "call:now", "call:now{a:}"],
    "longcat": ["", "x", "[1]", "{", "<longcat_arg_key>"],
    "function_gemma": ["", "call", "call:now"],
    "minicpm5": ["", "x"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def parser_of(kind: str) -> Any:
    """Return a parser module of mlx-lm."""
    return importlib.import_module(f"mlx_lm.tool_parsers.{kind}")


def with_calls(wrapped: TokenizerWrapper, kind: str) -> TokenizerWrapper:
    """Return a tokenizer whose tool calls have the format `kind`."""
    module = parser_of(kind)
    return TokenizerWrapper(
        wrapped._tokenizer,
        BPEStreamingDetokenizer,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
    )


@cache
def machine_of(kind: str) -> Any:
    return make_text_state_machine(with_calls(byte_tokenizer(), kind))


def divided(kind: str, pieces: list[str], **options: Any) -> list[Part]:
    """Return the parts of an answer that arrives in these pieces."""
    read = partial(read_calls, parser=parser_of(kind).parse_tool_call, tools=TOOLS)
    parser = AnswerParser(machine_of(kind), read=read, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.end()])


def cuts(text: str) -> Iterator[list[str]]:
    """Yield a text whole, by characters, and cut in two at each place."""
    yield [text]
    if len(text) < 500:
        yield [*text]
        yield from ([text[:i], text[i:]] for i in range(1, len(text)))


def named(parts: list[Part]) -> list[tuple[str, Any]]:
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def content(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize(
    ("kind", "text", "calls"),
    [(kind, *case) for kind, cases in CALLS.items() for case in cases],
)
def test_calls_are_read_however_they_come(
    kind: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    module = parser_of(kind)
    for after in ("", " B") if module.tool_call_end else ("",):
        whole = f"A {module.tool_call_start}{text}{module.tool_call_end}{after}"
        for pieces in cuts(whole):
            parts = divided(kind, pieces)
            assert (content(parts), named(parts)) == (f"A {after}", calls), pieces


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in BROKEN.items() for text in texts]
)
def test_what_is_no_call_is_content_with_its_marks(kind: str, text: str) -> None:
    module = parser_of(kind)
    begin, end = module.tool_call_start, module.tool_call_end
    for whole in (f"A {begin}{text}", f"A {begin}{text}{end} B"):
        for pieces in cuts(whole):
            assert divided(kind, pieces) == [Text(whole)], pieces


def test_a_call_that_cannot_be_read_costs_no_other_one() -> None:
    good, bad = '<tool_call>{"name": "now"}</tool_call>', "<tool_call>[1]</tool_call>"
    for pieces in cuts(f"A{good}B{bad}C{good}D"):
        parts = divided("json_tools", pieces)
        assert (content(parts), named(parts)) == (f"AB{bad}CD", [NOW, NOW])
        parts = divided("json_tools", pieces, most_calls=1)
        assert (content(parts), named(parts)) == (f"AB{bad}CD", [NOW])


def test_a_name_that_a_parser_makes_up_calls_nothing() -> None:
    """mlx-lm's parser for GLM makes up the name "unknown"."""
    assert read_calls("", parser_of("glm47").parse_tool_call) is None
    assert read_calls("x", lambda *_: {"name": "unknown", "arguments": {}}) is None
    assert read_calls("x", None) is None


SAID = [
    '<tool_call>{"name": "now"}</tool_call>',
    *(f"<tool_call>{text}</tool_call>" for text in ("[1]", '"f"', '{"name":', "{}")),
    '<tool_call>{"name": "now"}</tool_call>OK<tool_call>{"name": "now"}</tool_call>',
    *("A<tool_", 'call>{"name":', ' "now"', "}</tool_call>"),
    *("A<tool_", "call>[1", "]</tool", "_call>B"),
    "<end>",
]
PIECES, REST = SAID[6:10], SAID[10:14]
FIRST = 256


def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
    """Make a generator whose tokens after the bytes are the texts of SAID."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    extra = tuple("".join(t for t, _ in alphabet.pre_tokenize_str(s)) for s in SAID)
    extra = tuple(f"{text}" for text in dict.fromkeys(extra))
    tokenizer = with_calls(byte_tokenizer(extra), "json_tools")
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.eos_token_ids = [FIRST + len(extra) - 1]
    return SpeculativeGenerator(build("llama", vocab=FIRST + len(extra)), tokenizer)


@pytest.fixture(name="say", scope="module")
def _say() -> Iterator[Callable[..., Any]]:
    texts = list(dict.fromkeys(SAID))
    limits = {"prompt_tokens": 2000}
    with (
        serving(make, draft=None, limits=limits) as server,
        client_of(server) as client,
    ):

        def say(*said: str, chat: bool = True, **options: Any) -> Any:
            tokens = [FIRST + texts.index(text) for text in (*said, "<end>")]
            forced = {str(token): 100 - 15 * i for i, token in enumerate(tokens)}
            body = {"presence_context_size": 0}
            same: dict[str, Any] = {
                **{"model": NAME, "logit_bias": forced, "presence_penalty": 100},
                **{"max_tokens": len(tokens), "extra_body": body, **options},
            }
            if not chat:
                return client.completions.create(prompt="HI", **same)
            message: Any = {"role": "user", "content": "HI"}
            return client.chat.completions.create(messages=[message], **same)

        yield say


def test_whatever_a_model_says_is_answered(say: Callable[..., Any]) -> None:
    for text in SAID[:5]:
        choice = say(text, tools=TOOLS).choices[0]
        if "now" in text:
            (call,) = choice.message.tool_calls
            assert (call.function.name, call.function.arguments) == ("now", "{}")
            assert choice.finish_reason == "tool_calls"
        else:
            assert choice.message.content == text
            assert choice.message.tool_calls is None
            assert choice.finish_reason == "stop"
        assert say(text, chat=False).choices[0].text == text


@pytest.mark.parametrize(("said", "content"), [(PIECES, "A"), (REST, "".join(REST))])
def test_a_stream_gives_back_what_it_held_back(
    say: Callable[..., Any], said: list[str], content: str
) -> None:
    stream = say(*said, tools=TOOLS, stream=True)
    choices = [packet.choices[0] for packet in stream]
    assert "".join(each.delta.content or "" for each in choices) == content
    calls = [call for each in choices for call in each.delta.tool_calls or ()]
    made = content == "A"
    shown = [(call.index, call.function.name, bool(call.id)) for call in calls]
    assert shown == [(0, "now", True), (0, None, False)] * made
    assert "".join(call.function.arguments for call in calls) == "{}" * made
    assert choices[-1].finish_reason == ("tool_calls" if made else "stop")
    assert choices[1].delta.content == "A"  # the text did not wait for the rest


def test_one_call_at_most_where_none_may_be_parallel(say: Callable[..., Any]) -> None:
    for parallel, count in ((True, 2), (False, 1)):
        for stream in (False, True):
            options = {"parallel_tool_calls": parallel, "stream": stream}
            answer = say(SAID[5], tools=TOOLS, **options)
            choices = [each.choices[0] for each in (answer if stream else [answer])]
            messages = [each.delta if stream else each.message for each in choices]
            calls = [call for each in messages for call in each.tool_calls or ()]
            assert len([call for call in calls if call.function.name]) == count
            assert "".join(each.content or "" for each in messages) == "OK"
    with pytest.raises(openai.BadRequestError, match="valid boolean"):
        say(SAID[5], tools=TOOLS, parallel_tool_calls="no")
