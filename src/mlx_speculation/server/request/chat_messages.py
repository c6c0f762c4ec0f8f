"""The messages and tools of a chat, in the form that chat templates take."""

from dataclasses import dataclass
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.fields import Fields
from mlx_speculation.server.request.images import checked_image

# Templates read what else a message of these holds, so the names are those they know.
KNOWN = ("role", "name", "tool_call_id", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a chat, without its images and with them."""

    texts: list[dict[str, Any]]  # each with one text as its content
    # The same with image parts in their places; empty: there are no images
    placed: tuple[dict[str, Any], ...] = ()
    images: tuple[bytes, ...] = ()  # the files, in the order of their parts


def checked_messages(fields: Fields, settings: Settings) -> Messages:
    """Return the messages.

    mlx-lm's server gets the texts alone: it would fetch images from wherever a client
    says.
    """
    given = fields.list("messages")
    if not given:
        raise fields.wrong("messages", given, "a list of at least one message")
    images: list[bytes] = []
    placed = [
        _message(message, f"messages[{i}]", images, settings)
        for i, message in enumerate(given)
    ]
    if not images:
        return Messages(placed)
    texts = [{**each, "content": _text_of(each["content"])} for each in placed]
    return Messages(texts, tuple(placed), tuple(images))


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """Return a content without its images."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _message(
    given: Any, where: str, images: list[bytes], settings: Settings
) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"{where} is no object.", where)
    inner = Fields(given, f"{where}.")
    message: dict[str, Any] = {}
    for name in KNOWN:
        if (value := inner.text(name)) is not None:
            message[name] = value
    if "role" not in message:
        raise invalid(f"{where} has no role.", f"{where}.role")
    content = inner.take("content", "")
    message["content"] = _content(content, where, images, settings)
    calls = inner.list("tool_calls")
    if calls is not None:
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    for name in ("refusal", "audio", "function_call", "annotations"):
        inner.only(name, [])
    inner.end()
    return message


def _content(
    given: Any, where: str, images: list[bytes], settings: Settings
) -> str | list[dict[str, Any]]:
    """Return one text of a content that may be in parts; with images, the parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(f"{where}.content is no text.", f"{where}.content")
    parts: list[dict[str, Any]] = []
    before = len(images)
    for i, part in enumerate(given):
        text = part.get("text") if isinstance(part, dict) else None
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            if len(images) >= settings.limits.images:
                raise invalid(
                    f"A request may have {settings.limits.images} images. Send fewer, "
                    "or start the server with a larger --max-images.",
                    "messages",
                )
            images.append(checked_image(part, f"{where}.content[{i}]", settings))
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            raise invalid(
                f"{where}.content holds a part that is no text and no image. Audio and "
                "files are not taken.",
                f"{where}.content",
            )
    return _text_of(parts) if len(images) == before else parts


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
