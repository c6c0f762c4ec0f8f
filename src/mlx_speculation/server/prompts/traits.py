"""Probes of a chat template: renders short chats to see what the template supports.

A template may ignore what it does not support, instead of raising an error. So a probe
looks for the words of its messages in the rendered text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
# Renders messages and tools; raises the errors of the template.
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

LONG_ID, SHORT_ID = "call_probe0000000001", "probe0001"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Features of a chat template."""

    system: bool = True  # renders messages of the role system
    neighbours: bool = True  # renders two adjacent messages of one role
    tools: bool = True  # renders descriptions of tools
    calls: bool = True  # renders tool calls, and results of the role tool
    text_arguments: bool = False  # needs arguments of calls as JSON text, not objects
    short_ids: bool = False  # needs call ids of nine letters and digits


def probed(render: Render, *, has_tool_calls: bool) -> Traits:
    """Return a template's traits; `has_tool_calls`: calls can be read in answers."""

    def shown(messages: list[Message], tools: Any = None) -> str:
        try:
            return render(messages, tools)
        except Exception:  # a template may raise any error
            return ""

    system = {"role": "system", "content": "systemprobe"}
    two = [USER, {"role": "user", "content": "secondprobe"}]
    tools = has_tool_calls and "toolprobe" in shown([USER], [TOOL])
    kind = _call_kind(shown) if tools else None
    return Traits(
        system="systemprobe" in shown([system, USER]),
        neighbours="secondprobe" in shown(two),
        tools=tools,
        calls=kind is not None,
        text_arguments=kind is not None and kind[0],
        short_ids=kind is not None and kind[1],
    )


def _call_kind(shown: Callable[..., str]) -> tuple[bool, bool] | None:
    """Return `text_arguments` and `short_ids`; None: the template renders no calls."""
    for short in (False, True):
        for text in (False, True):
            arguments: Any = {"argprobe": "valueprobe"}
            given = '{"argprobe": "valueprobe"}' if text else arguments
            seen = shown(_turns(given, SHORT_ID if short else LONG_ID), [TOOL])
            # A template that concatenates an object renders Python's form of it.
            as_python = "'argprobe'" in seen
            wanted = ("valueprobe", "argprobe", "resultprobe")
            escaped = '{\\"argprobe' in seen
            if all(word in seen for word in wanted) and not as_python and not escaped:
                return text, short
    return None


def _turns(arguments: Any, call_id: str) -> list[Message]:
    function = {"name": "toolprobe", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "resultprobe", "tool_call_id": call_id},
    ]
