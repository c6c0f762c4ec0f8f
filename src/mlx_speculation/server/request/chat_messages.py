"""The messages and tools of a chat, in the form that chat templates take."""

from dataclasses import dataclass
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.request.fields import Fields

# Templates read what else a message of these holds, so the names are those they know.
KNOWN = ("role", "name", "tool_call_id", "reasoning", "reasoning_content")


def checked_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages, each with one text as its content.

    Images are refused: mlx-lm's server would fetch them from wherever a client says.
    """
    given = fields.list("messages")
    if not given:
        raise fields.wrong("messages", given, "a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"{where} is no object.", where)
    inner = Fields(given, f"{where}.")
    message: dict[str, Any] = {}
    for name in KNOWN:
        if (value := inner.text(name)) is not None:
            message[name] = value
    if "role" not in message:
        raise invalid(f"{where} has no role.", f"{where}.role")
    message["content"] = _content(inner.take("content", ""), where)
    calls = inner.list("tool_calls")
    if calls is not None:
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    for name in ("refusal", "audio", "function_call", "annotations"):
        inner.only(name, [])
    inner.end()
    return message


def _content(given: Any, where: str) -> str:
    """Return one text of a content that may be in parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(f"{where}.content is no text.", f"{where}.content")
    texts = []
    for part in given:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise invalid(
                f"{where}.content holds a part that is no text. Images, audio and "
                "files are not taken.",
                f"{where}.content",
            )
        texts.append(text)
    return "".join(texts)


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments", ""), str | dict)
    ):
        raise invalid(f"{where} is no call of a function.", where)
    return {**given, "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call, and what it has to call."""

    offered: list[dict[str, Any]] | None  # for the chat template; None: nothing
    # The functions of which one has to be called; None: the model is free.
    needed: tuple[dict[str, Any], ...] | None


def checked_tools(fields: Fields) -> Tools:
    """Return the tools of a chat, and those that `tool_choice` asks for."""
    tools = fields.list("tools") or []
    functions = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{i}] is no function with a name.", f"tools[{i}]")
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid(
                f"The parameters of tools[{i}] are no JSON schema.", f"tools[{i}]"
            )
        functions.append(function)
    choice = fields.take("tool_choice", "auto")
    if choice == "none":
        return Tools(None, None)
    if choice == "auto":
        return Tools(tools or None, None)
    wanted = functions
    if choice != "required":
        name = _chosen(fields, choice)
        wanted = [each for each in functions if each["name"] == name]
    if not wanted:
        names = ", ".join(repr(each["name"]) for each in functions) or "none"
        raise invalid(
            f"tool_choice is {choice!r}, and the tools are: {names}.", "tool_choice"
        )
    return Tools(tools, tuple(wanted))


def _chosen(fields: Fields, choice: Any) -> str:
    """Return the name of the function that has to be called."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise fields.wrong(
            "tool_choice", choice, "'auto', 'none', 'required' or a function's name"
        )
    return name
