"""Token ids of a chat, the state in which its answer begins, and the answer's marks.

This module imports mlx-lm's whole server.
"""

import threading
from dataclasses import replace
from functools import cached_property
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.answer_parts import NORMAL, REASONING
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.prompts.fitted import Traits, fitted, probed
from mlx_speculation.server.request.request import Chat
from mlx_speculation.server.request.transcript import Message, text_of

# Encoding a chat with more characters takes seconds; other chats do not wait for it.
LONG_CHAT = 300_000


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
        has_calls = bool(self._tokenizer.has_tool_calling)
        return probed(self._text, has_tool_calls=has_calls)

    def machine(self, tools: bool) -> Any:
        """Return what finds the marks of an answer to a chat with or without tools."""
        return self._with_calls if tools else self._plain

    def rendered(self, chat: Chat) -> list[int]:
        """Return the token ids of a chat without its images; raise `refused`."""
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
        """Return the state of `answer_parts` in which an answer begins."""
        tokenizer = self._tokenizer
        thinks = tokenizer.has_thinking and (
            tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
        )
        usual = REASONING if thinks else NORMAL
        return str(tokenizer.response_initial_state or usual)

    def _text(self, messages: list[Message], tools: Any) -> str:
        args = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
        made = self._tokenizer.apply_chat_template(messages, **args, **self._args)
        return str(made)


def refused(error: Exception) -> ApiError:
    """Return the error that a client gets if a template has raised."""
    if isinstance(error, InvalidRequestError):
        return invalid(str(error), "messages")
    return invalid(
        f"The chat template refused the messages: {type(error).__name__}: "
        f"{str(error)[:200]}",
        "messages",
    )
