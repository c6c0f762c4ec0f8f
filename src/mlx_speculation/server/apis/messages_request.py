"""Bodies of the Messages API, and what coding agents put into them.

cache_control    is passed over, wherever it stands: it moves from turn to turn
billing line     a system block of the client's own accounts, with values that change
                 from request to request: it is left out
deferred tools   stand outside of the tools that the model is shown, and are
                 described where a `tool_reference` names them: what was read of the
                 turns before stays as it was
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import Call, Chat, Conversation, GenerationRequest
from mlx_speculation.server.request import options as read
from mlx_speculation.server.request.images import image_part
from mlx_speculation.server.request.models import RequestModel, short
from mlx_speculation.server.request.options import Count, Object, TextOptions
from mlx_speculation.server.request.tools import (
    Tool,
    Tools,
    chosen_tools,
    function_tool,
)
from mlx_speculation.server.request.transcript import IMAGE_NOTE, Part

BILLING = re.compile(r"\Ax-anthropic-[\w-]+:[^\n]*\n*")
DROPPED = ("redacted_thinking", "server_tool_use", "fallback")
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class Message(RequestModel):
    """One turn."""

    role: str
    content: str | list[Object] = ""


class Thinking(RequestModel):
    """Whether the model thinks first, and for how long."""

    type: str
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class Format(RequestModel):
    """The form that the text has to have."""

    type: str
    json_schema: Object | None = Field(None, alias="schema")


class OutputConfig(RequestModel):
    """Effort, and the form of the text."""

    effort: str | None = None
    format: Format | None = None


class Choice(RequestModel):
    """Which tools may be called, or have to be."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountBody(TextOptions):
    """A request to count the tokens of a prompt."""

    messages: list[Message] = Field(min_length=1)
    system: str | list[Object] = ""
    tools: list[Object] = Field(default_factory=list)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """A request for the next message."""

    max_tokens: Count | None = None
    stop_sequences: list[str] = Field(default_factory=list)


def messages_request(body: CountBody, settings: Settings) -> GenerationRequest:
    """Check a request.

    Raises:
        ApiError: names the field that is wrong.
    """
    tools, deferred, passed_over = _tools(body.tools)
    choice = body.tool_choice
    chosen = _chosen(tools + deferred, choice, passed_over)
    shown = tuple(tool for tool in chosen.shown if tool in tools)
    messages, images = _Reader(body, deferred, settings).conversation.messages()
    schema = _schema(body.output_config)
    read.without_both(schema, chosen.needed)
    args, budget = _thinking(body)
    most, asked = settings.limits.max_tokens, getattr(body, "max_tokens", None)
    return GenerationRequest(
        chat=Chat(
            messages=messages,
            tools=shown,
            deferred=tuple(deferred),
            template_args=args,
            images=images,
        ),
        stream=body.stream,
        # A client asks for what its own model has; it gets what there is.
        max_tokens=min(asked, most) if asked and most else asked or most or None,
        sampling=read.sampling(body, settings),
        stop=read.stops(getattr(body, "stop_sequences", None), "stop_sequences"),
        schema=schema,
        calls=chosen.needed,
        most_calls=1 if choice and choice.disable_parallel_tool_use else None,
        thinking_budget=budget,
        **read.drafts(body, settings),
    )


def _thinking(body: CountBody) -> tuple[Object, int | None]:
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return read.thinking_args(None, effort), None
    on = body.thinking.type != "disabled"
    budget = body.thinking.budget_tokens if on else None
    return read.thinking_args(on, effort), budget or None


def _schema(given: OutputConfig | None) -> Object | None:
    if given is None or given.format is None or given.format.type == "text":
        return None
    if given.format.type != "json_schema" or given.format.json_schema is None:
        raise invalid(
            "output_config.format is no json_schema with a schema.",
            "output_config.format",
        )
    return read.checked_schema(given.format.json_schema, "output_config.format")


def _tools(given: Sequence[Object]) -> tuple[list[Tool], list[Tool], list[str]]:
    """Return tools for the model, deferred ones, and names of those not run here."""
    tools: list[Tool] = []
    deferred: list[Tool] = []
    passed_over: list[str] = []
    for i, tool in enumerate(given):
        if tool.get("type") not in (None, "custom"):
            passed_over.append(str(tool.get("name") or tool["type"]))
            continue
        described = {**tool, "parameters": tool.get("input_schema")}
        made = function_tool(described, f"tools[{i}]")
        (deferred if tool.get("defer_loading") else tools).append(made)
    return tools, deferred, passed_over


def _chosen(
    tools: Sequence[Tool], choice: Choice | None, passed_over: Sequence[str]
) -> Tools:
    kind = "auto" if choice is None else choice.type
    if kind not in ("auto", "any", "none", "tool"):
        raise invalid(
            f"tool_choice.type is {short(kind)}, and auto, any, none or tool is "
            "needed.",
            "tool_choice",
        )
    wanted: Any = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        wanted = (str(choice.name) if choice else "",)
    return chosen_tools(tools, wanted, passed_over=passed_over)


class _Reader:
    """Reads the turns of a body into a conversation."""

    def __init__(
        self, body: CountBody, deferred: Sequence[Tool], settings: Settings
    ) -> None:
        self._settings, self._images = settings, 0
        self._deferred = {tool["function"]["name"]: tool for tool in deferred}
        self.conversation = Conversation(between="\n")
        self.conversation.system(_system_text(body.system, "system"))
        for i, message in enumerate(body.messages):
            self._turn(message, f"messages[{i}]")

    def _turn(self, message: Message, where: str) -> None:
        content = message.content
        if message.role == "system":
            self.conversation.system(_system_text(content, where))
            return
        if message.role not in ("user", "assistant"):
            raise invalid(
                f"{where}.role is {short(message.role)}, and user, assistant or system "
                "is needed.",
                f"{where}.role",
            )
        blocks = content if isinstance(content, list) else [_text_block(content)]
        if message.role == "user":
            self._user(blocks, where)
        else:
            self._assistant(blocks, where)

    def _user(self, blocks: Sequence[Object], where: str) -> None:
        """Add the results of tools first, then what the user says."""
        parts: list[Part] = []
        results = 0
        for i, block in enumerate(blocks):
            place = f"{where}.content[{i}]"
            if block.get("type") == "tool_result":
                self._result(block, place)
                results += 1
            else:
                parts += self._parts(block, place)
        if parts or not results:
            self.conversation.user(parts)

    def _result(self, block: Object, where: str) -> None:
        call, content = block.get("tool_use_id"), block.get("content")
        if call not in self.conversation.called:
            raise invalid(
                f"{where} is the result of {short(call)}, and no tool_use before it "
                "has that id.",
                where,
            )
        blocks = content if isinstance(content, list) else [_text_block(content or "")]
        parts: list[Part] = []
        for i, each in enumerate(blocks):
            parts += self._parts(each, f"{where}.content[{i}]", result=True)
        if block.get("is_error") and not any(part.get("text") for part in parts):
            parts = [*parts, {"type": "text", "text": "Error"}]
        self.conversation.result(str(call), parts)

    def _parts(self, block: Any, where: str, *, result: bool = False) -> Iterator[Part]:
        """Yield a block as parts of a content."""
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            yield {"type": "text", "text": block["text"]}
        elif kind == "image":
            yield self._image(block, where, result=result)
        elif kind == "document":
            yield {"type": "text", "text": _document(block, where)}
        elif kind == "search_result":
            texts = [str(block.get("title", "")), str(block.get("source", ""))]
            texts += [str(each.get("text", "")) for each in block.get("content") or ()]
            yield {"type": "text", "text": "\n".join(filter(None, texts))}
        elif kind == "tool_reference":
            yield {"type": "text", "text": self._reference(block)}
        elif kind not in DROPPED and not str(kind).endswith("_tool_result"):
            raise invalid(f"{where} is of the type {short(kind)}, unknown here.", where)

    def _image(self, block: Object, where: str, *, result: bool) -> Part:
        if result and not self._settings.reads_images:
            return {"type": "text", "text": IMAGE_NOTE}
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        url = source.get("url")
        if source.get("type") == "base64":
            if source.get("media_type") not in IMAGE_TYPES:
                raise invalid(
                    f"{where}.source.media_type is {short(source.get('media_type'))}, "
                    f"and one of {', '.join(IMAGE_TYPES)} is needed.",
                    where,
                )
            url = f"data:{source['media_type']};base64,{source.get('data')}"
        part = image_part(url, where, self._settings, self._images)
        self._images += 1
        return part

    def _reference(self, block: Object) -> str:
        """Describe a tool that was not among those that the model was shown."""
        name = str(block.get("tool_name"))
        tool = self._deferred.get(name)
        if tool is None:
            return f"The tool {name} can be called now."
        described = json.dumps(tool, ensure_ascii=False)
        return f"This tool can be called now:\n{described}"

    def _assistant(self, blocks: Sequence[Object], where: str) -> None:
        texts, thoughts, calls = [], [], []
        for i, block in enumerate(blocks):
            place, kind = f"{where}.content[{i}]", block.get("type")
            if kind == "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            elif kind == "tool_use":
                calls.append(_call(block, place))
            elif kind == "text" and isinstance(block.get("text"), str):
                texts.append(block["text"])
            elif kind not in DROPPED and not str(kind).endswith("_tool_result"):
                raise invalid(
                    f"{place} is of the type {short(kind)}, unknown here.", place
                )
        self.conversation.assistant(
            "".join(texts), reasoning="".join(thoughts), calls=calls
        )


def _call(block: Object, where: str) -> Call:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(block.get("id"), str):
        raise invalid(f"{where} has no name and id.", where)
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid(f"{where}.input is no object.", f"{where}.input")
    return Call(block["id"], name, arguments or {})


def _document(block: Object, where: str) -> str:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    text: Any = source.get("data") if source.get("type") == "text" else None
    if source.get("type") == "content":
        content = source.get("content")
        blocks = content if isinstance(content, list) else [_text_block(content)]
        text = "\n".join(str(each.get("text", "")) for each in blocks)
    if not isinstance(text, str):
        raise invalid(
            f"{where} is a document that is no plain text. PDFs and files are not "
            "taken.",
            where,
        )
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _system_text(content: str | list[Object], where: str) -> str:
    """Return instructions without the client's accounts."""
    blocks = content if isinstance(content, list) else [_text_block(content)]
    texts = []
    for i, block in enumerate(blocks):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise invalid(f"{where}[{i}] is no text block.", where)
        texts.append(BILLING.sub("", block["text"]))
    return "\n\n".join(text for text in texts if text)


def _text_block(text: Any) -> Object:
    return {"type": "text", "text": text}
