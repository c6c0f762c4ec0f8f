"""Bodies of the Responses API: items in, and the tools of Codex and of OpenAI's SDK.

    namespace   its tools are flattened for the chat template; calls get both names back
    custom      a tool that takes a text is a function with the argument "input"
    other kinds are run by OpenAI's servers, and passed over

No response is stored: fields that name an earlier one are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from mlx_speculation.server.request.transcript import (
    IMAGE_NOTE,
    Part,
    read_arguments,
)

STATEFUL = {  # fields that name what was stored before
    "previous_response_id": "previous_response_not_found",
    "conversation": "unsupported_parameter",
    "prompt": "unsupported_parameter",
}
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class Effort(RequestModel):
    """Whether the model thinks first."""

    effort: str | None = None


class TextFormat(RequestModel):
    """The form that the text has to have."""

    type: str = "text"
    json_schema: Object | None = Field(None, alias="schema")


class TextConfig(RequestModel):
    """How the text has to be."""

    format: TextFormat | None = None


class ResponsesBody(TextOptions):
    """A request for the next items."""

    input: str | list[Object]
    instructions: str | None = None
    tools: list[Object] = Field(default_factory=list)
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Effort | None = None
    max_output_tokens: Count | None = None
    metadata: Object = Field(default_factory=dict)

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Refuse what needs a store."""
        for name, code in STATEFUL.items():
            if name in values:
                raise invalid(
                    f"{name} is given, and this server stores no responses. Send the "
                    "items of the turns before in input.",
                    name,
                    code=code,
                )
        if values.get("background"):
            raise invalid("background is not offered here. Leave it out.", "background")


@dataclass(frozen=True, slots=True)
class Kind:
    """A tool under the name that the chat template has for it."""

    name: str
    namespace: str | None = None
    custom: bool = False  # it takes a text


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request, and what its calls are to be called."""

    request: GenerationRequest
    kinds: dict[str, Kind]  # by the flat name


def responses_request(body: ResponsesBody, settings: Settings) -> ResponsesRequest:
    """Check a request.

    Raises:
        ApiError: names the field that is wrong.
    """
    read.checked_model(body.model, settings)
    tools = _Tools(body.tools)
    chosen = tools.chosen(body.tool_choice)
    messages, images = _Reader(body, settings).conversation.messages()
    schema = _schema(body.text)
    read.without_both(schema, chosen.needed)
    effort = None if body.reasoning is None else body.reasoning.effort
    on = None if effort is None else effort != "none"
    most = settings.limits.max_tokens
    read.at_most(body.max_output_tokens, most, "max_output_tokens", "max-tokens-limit")
    request = GenerationRequest(
        chat=Chat(
            messages=messages,
            tools=chosen.shown,
            template_args=read.thinking_args(on, effort),
            images=images,
        ),
        stream=body.stream,
        max_tokens=body.max_output_tokens or most or None,
        sampling=read.sampling(body, settings),
        schema=schema,
        calls=chosen.needed,
        most_calls=None if body.parallel_tool_calls else 1,
        **read.drafts(body, settings),
    )
    return ResponsesRequest(request, tools.kinds)


def _schema(given: TextConfig | None) -> Object | None:
    form = None if given is None else given.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.type != "json_schema" or form.json_schema is None:
        raise invalid("text.format is no json_schema with a schema.", "text.format")
    return read.checked_schema(form.json_schema, "text.format")


def flat(name: str, namespace: Any) -> str:
    """Return the name of a tool that stands in a namespace, or in none."""
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


class _Tools:
    """The tools of a body."""

    def __init__(self, given: Sequence[Object]) -> None:
        self.shown: list[Tool] = []
        self.kinds: dict[str, Kind] = {}
        self._passed_over: list[str] = []
        for i, tool in enumerate(given):
            where = f"tools[{i}]"
            if tool.get("type") == "namespace":
                for j, inner in enumerate(tool.get("tools") or ()):
                    self._add(inner, f"{where}.tools[{j}]", str(tool.get("name")))
            else:
                self._add(tool, where, None)

    def chosen(self, choice: Any) -> Tools:
        """Return what the model is shown, and what it has to call."""
        shown = self.shown
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            names = [_named(each) for each in choice.get("tools") or ()]
            shown = [tool for tool in shown if tool["function"]["name"] in names]
            choice = choice.get("mode", "auto")
        elif isinstance(choice, dict):
            if choice.get("type") not in ("function", "custom"):
                choice = {**choice, "name": choice.get("name") or choice.get("type")}
            choice = (_named(choice),)
        return chosen_tools(shown, choice, passed_over=self._passed_over)

    def _add(self, tool: Any, where: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            self._passed_over.append(str(kind))
            return
        custom = kind == "custom"
        described = {**tool, "parameters": INPUT} if custom else tool
        made = function_tool(described, where)
        name = flat(tool["name"], namespace)
        self.kinds[name] = Kind(tool["name"], namespace, custom)
        self.shown.append({**made, "function": {**made["function"], "name": name}})


def _named(choice: Any) -> str:
    name = choice.get("name") if isinstance(choice, dict) else None
    return flat(str(name), choice.get("namespace")) if name else ""


class _Reader:
    """Reads the items of a body into a conversation."""

    _outputs: ClassVar = ("function_call_output", "custom_tool_call_output")

    def __init__(self, body: ResponsesBody, settings: Settings) -> None:
        self._settings, self._images, self._thought = settings, 0, ""
        self.conversation = Conversation(between="\n")
        self.conversation.system(body.instructions or "")
        given = body.input
        items = (
            [{"role": "user", "content": given}] if isinstance(given, str) else given
        )
        if not items:
            raise invalid("input holds nothing.", "input")
        for i, item in enumerate(items):
            self._item(item, f"input[{i}]")

    def _item(self, item: Object, where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            field = f"{where}.arguments"
            self._call(item, read_arguments(item.get("arguments"), field), where)
        elif kind == "custom_tool_call":
            self._call(item, {"input": str(item.get("input", ""))}, where)
        elif kind in self._outputs:
            parts = self._parts(item.get("output"), f"{where}.output", result=True)
            self.conversation.result(str(item.get("call_id")), parts)
        elif kind == "reasoning":
            self._thought += _thought(item)
        else:
            advice = "This server stores no items: send them whole."
            raise invalid(
                f"{where} is of the type {short(kind)}, which is not taken here. "
                f"{advice if kind == 'item_reference' else 'Leave it out.'}",
                where,
            )

    def _message(self, item: Object, where: str) -> None:
        role = item.get("role")
        parts = self._parts(item.get("content"), f"{where}.content")
        texts = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if role in ("system", "developer"):
            self.conversation.system(texts)
        elif role == "user":
            self.conversation.user(parts)
        elif role == "assistant":
            self._said(texts)
        else:
            raise invalid(
                f"{where}.role is {short(role)}, and user, assistant, system or "
                "developer is needed.",
                f"{where}.role",
            )

    def _call(self, item: Object, arguments: Object, where: str) -> None:
        name, call = item.get("name"), item.get("call_id")
        if not isinstance(name, str) or not isinstance(call, str):
            raise invalid(f"{where} has no name and call_id.", where)
        self._said("", [Call(call, flat(name, item.get("namespace")), arguments)])

    def _said(self, text: str, calls: Sequence[Call] = ()) -> None:
        """Add what the model has said to its turn."""
        thought, self._thought = self._thought, ""
        self.conversation.assistant(text, reasoning=thought, calls=calls, joined=True)

    def _parts(self, given: Any, where: str, *, result: bool = False) -> list[Part]:
        if given is None or isinstance(given, str):
            return [{"type": "text", "text": given or ""}]
        if not isinstance(given, list):
            raise invalid(f"{where} is no text and no list of parts.", where)
        parts: list[Part] = []
        for i, part in enumerate(given):
            place = f"{where}[{i}]"
            kind = part.get("type") if isinstance(part, dict) else None
            text = (
                part.get("refusal" if kind == "refusal" else "text") if kind else None
            )
            known = ("input_text", "output_text", "text", "refusal", "summary_text")
            if kind in known and isinstance(text, str):
                parts.append({"type": "text", "text": text})
            elif kind == "input_image":
                parts.append(self._image(part, place, result=result))
            else:
                raise invalid(
                    f"{place} is of the type {short(kind)}, and texts and images are "
                    "taken.",
                    place,
                )
        return parts

    def _image(self, part: Object, where: str, *, result: bool) -> Part:
        if result and not self._settings.reads_images:
            return {"type": "text", "text": IMAGE_NOTE}
        made = image_part(part.get("image_url"), where, self._settings, self._images)
        self._images += 1
        return made


def _thought(item: Object) -> str:
    """Return the reasoning that a client sends back."""
    for name in ("content", "summary"):
        texts = [
            str(part.get("text", ""))
            for part in item.get(name) or ()
            if isinstance(part, dict)
        ]
        if any(texts):
            return "".join(texts)
    return ""
