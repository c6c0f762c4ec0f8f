"""Token ids of a chat, whose messages are fitted to the tokenizer's template.

What a template does not support is replaced:

system      a system message becomes the beginning of the first user turn
tools       the system message describes them, and calls and results are texts, in the
            form that models of the Hermes kind were trained on
neighbours  adjacent messages of one role are joined, so that user and model take turns

Short chats are rendered to see what a template supports. It may ignore what it does not
support, so these probes look for the words of their messages in the rendered text. This
module imports mlx-lm's whole server.
"""

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.answer_parts import NORMAL, REASONING
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.request.options import Chat
from mlx_speculation.server.request.transcript import Message, joined, text_of

# Encoding a chat with more characters takes seconds; shorter chats do not wait for it.
LONG_CHAT = 300_000

TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
CALL = "<tool_call>\n{}\n</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

USER: Message = {"role": "user", "content": "userprobe"}
TOOL = {
    "type": "function",
    "function": {
        "name": "toolprobe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"argprobe": {"type": "string"}},
        },
    },
}
ID = "call_probe0000000001"
FUNCTION = {"name": "toolprobe", "arguments": {"argprobe": "valueprobe"}}
CALLS = [{"id": ID, "type": "function", "function": FUNCTION}]
HISTORY: list[Message] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "resultprobe", "tool_call_id": ID},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Features of a chat template."""

    system: bool = True  # renders messages of the role system
    neighbours: bool = True  # renders two adjacent messages of one role
    tools: bool = True  # renders descriptions of tools
    calls: bool = True  # renders tool calls, and results of the role tool
    text_arguments: bool = False  # needs arguments of calls as JSON text, not objects
    short_ids: bool = False  # needs call ids of nine letters and digits


def fitted(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], traits: Traits
) -> list[Message]:
    """Return messages that a template with these traits renders completely."""
    form = _formed if traits.calls else _in_words
    messages = [form(message, traits) for message in messages]
    if tools and not traits.tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        head: Message = {"role": "system", "content": TOOLS.format(listed)}
        if messages[0]["role"] == "system":
            head = joined(messages.pop(0), head, "\n\n")
        messages.insert(0, head)
    if not traits.system and messages and messages[0]["role"] == "system":
        first = [{**messages[0], "role": "user"}, *messages[1:2]]
        messages = [*_taking_turns(first), *messages[2:]]
    return messages if traits.neighbours else _taking_turns(messages)


def _in_words(message: Message, traits: Traits) -> Message:
    """Return a message in which tool calls, or a tool's result, are text."""
    if message["role"] == "tool":
        return {"role": "user", "content": RESULT.format(message["content"])}
    if not message.get("tool_calls"):
        return message
    calls = [
        CALL.format(json.dumps(call["function"], ensure_ascii=False))
        for call in message["tool_calls"]
    ]
    more = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [text for text in (message["content"], *calls) if text]
    return {**more, "content": "\n".join(texts)}


def _formed(message: Message, traits: Traits) -> Message:
    """Return a message whose calls have the form that the template takes."""
    formed = dict(message)
    if traits.short_ids and "tool_call_id" in message:
        formed["tool_call_id"] = _short(message["tool_call_id"])
    if calls := [{**call} for call in message.get("tool_calls", ())]:
        formed["tool_calls"] = calls
    for call in calls:
        if traits.short_ids:
            call["id"] = _short(call["id"])
        if traits.text_arguments:
            text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            call["function"] = {**call["function"], "arguments": text}
    return formed


def _short(name: str) -> str:
    """Return nine letters and digits that stand for an id."""
    if SHORT_ID.fullmatch(name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _taking_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages with adjacent turns of the user, or of the model, joined."""
    turns: list[Message] = []
    for message in messages:
        before = turns[-1] if turns else {"role": "system"}
        role = message["role"]
        if role == before["role"] and role in ("user", "assistant"):
            turns[-1] = joined(before, message, "\n\n")
        elif role == "assistant" and before["role"] == "system":
            turns += [{"role": "user", "content": ""}, message]
        elif role == "user" and before["role"] == "tool":
            # After a result only the model may speak.
            said = {"content": text_of(message["content"])}
            turns[-1] = joined(before, said, "\n\n")
        else:
            turns.append(message)
    return turns


def _whole(seen: str) -> bool:
    whole = all(word in seen for word in ("valueprobe", "argprobe", "resultprobe"))
    # A template that concatenates an object renders Python's form of it.
    return whole and "'argprobe'" not in seen and '{\\"argprobe' not in seen


class ChatTemplate:
    """The chat template of one tokenizer; any thread may use it."""

    def __init__(self, tokenizer: TokenizerWrapper, args: dict[str, Any]) -> None:
        self._tokenizer, self._args = tokenizer, args
        self._lock, self._lock_of_long = threading.Lock(), threading.Lock()
        self._has_template = bool(tokenizer.has_chat_template)
        calls = tokenizer
        if not tokenizer.has_tool_calling:  # the system message describes the tools
            calls = TokenizerWrapper(
                tokenizer._tokenizer,
                tool_call_start=json_tools.tool_call_start,
                tool_call_end=json_tools.tool_call_end,
                tool_parser=json_tools.parse_tool_call,
                response_format={"transitions": tokenizer.response_transitions},
            )
        self.tool_parser = calls.tool_parser  # reads calls in answers
        self.call_marks = calls.tool_call_start, calls.tool_call_end
        self._plain = make_text_state_machine(tokenizer)
        self._with_calls = make_text_state_machine(calls)

    @cached_property
    def traits(self) -> Traits:
        """Traits of the template, probed at the first chat."""
        if not self._has_template:
            return Traits(tools=False, calls=False)
        system = {"role": "system", "content": "systemprobe"}
        two = [USER, {"role": "user", "content": "secondprobe"}]
        # Tools are supported only if calls can also be read in answers
        tools = bool(self._tokenizer.has_tool_calling)
        tools = tools and "toolprobe" in self._shown([USER], [TOOL])
        kinds = (
            Traits(short_ids=short, text_arguments=text)
            for short in (False, True)
            for text in (False, True)
            if tools
        )
        texts = (
            (kind, self._shown(fitted(HISTORY, [TOOL], kind), [TOOL])) for kind in kinds
        )
        return replace(
            next((kind for kind, text in texts if _whole(text)), Traits(calls=False)),
            system="systemprobe" in self._shown([system, USER]),
            neighbours="secondprobe" in self._shown(two),
            tools=tools,
        )

    def machine(self, tools: bool) -> Any:
        """Return the state machine that reads an answer, and finds calls if `tools`."""
        return self._with_calls if tools else self._plain

    def rendered(self, chat: Chat) -> list[int]:
        """Return the token ids of a chat without its images; may raise ApiError."""
        texts = [
            {**each, "content": text_of(each["content"])} for each in chat.messages
        ]
        long, tokenizer = len(repr(texts)) > LONG_CHAT, self._tokenizer
        try:
            with self._lock_of_long if long else self._lock:
                messages, args = self.fit(replace(chat, messages=tuple(texts)))
                if not self._has_template:
                    return list(tokenizer.encode(convert_chat(messages)))
                args["add_generation_prompt"] = True
                return [*map(int, tokenizer.apply_chat_template(messages, **args))]
        except Exception as error:  # a template may raise any error
            raise refused(error) from error

    def fit(self, chat: Chat) -> tuple[list[Message], dict[str, Any]]:
        """Return messages that the template renders completely, and its arguments."""
        args = {**self._args, **chat.template_args}
        if chat.tools and self.traits.tools:
            args["tools"] = list(chat.tools)
        return fitted(chat.messages, chat.tools, self.traits), args

    def state_after(self, tokens: list[int]) -> str:
        """Return the state of `AnswerParser` in which an answer to `tokens` begins."""
        tokenizer = self._tokenizer
        thinks = tokenizer.has_thinking and (
            tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
        )
        usual = REASONING if thinks else NORMAL
        return str(tokenizer.response_initial_state or usual)

    def _shown(self, messages: list[Message], tools: Any = None) -> str:
        args = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
        try:
            made = self._tokenizer.apply_chat_template(messages, **args, **self._args)
        except Exception:  # a template may raise any error
            return ""
        return str(made)


def refused(error: Exception) -> ApiError:
    """Return the error that a client gets if a template has failed."""
    if isinstance(error, InvalidRequestError):
        return invalid(str(error), "messages")
    return invalid(
        f"The chat template refused the messages: {type(error).__name__}: "
        f"{str(error)[:200]}",
        "messages",
    )
