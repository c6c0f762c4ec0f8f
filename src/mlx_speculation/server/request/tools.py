"""Tools of a request in the forms of all APIs, and which may or must be called.

namespace   its tools get flat names, NAMESPACE__NAME, in the chat template
custom      a tool that takes a text becomes a function with the argument "input"
deferred    left out of the template's list, and described where a message refers to it
other kinds, which the provider's servers would run, are ignored
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, Field

from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.request.models import Loose, Object, RequestModel

Function = dict[str, Any]
Tool = dict[str, Any]  # in OpenAI's form: {"type": "function", "function": Function}
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class Named(RequestModel):
    """The name of a tool."""

    name: Loose = ""
    namespace: Loose = ""

    @property
    def flat(self) -> str:
        """The name of the tool in the chat template."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


class NestedModel(Named):
    """An object that may hold its fields under the name of its type."""

    type: str = "function"

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Flatten the object."""
        for kind in ("function", "custom", "allowed_tools"):
            inner = values.get(kind)
            if values.get("type", kind) == kind and isinstance(inner, Mapping):
                values |= {**inner, "type": kind}


class ToolBody(NestedModel):
    """A tool, or a namespace of tools."""

    description: str | None = None
    parameters: Object | None = Field(
        None, validation_alias=AliasChoices("parameters", "input_schema")
    )
    defer_loading: bool = False
    tools: list["ToolBody"] = Field([])

    @property
    def custom(self) -> bool:
        """True if the tool takes a text."""
        return self.type == "custom" and self.parameters is None


class Choice(NestedModel):
    """The tools that may be called, or of which one has to be called."""

    mode: str = "auto"
    tools: list["Choice"] = Field([])
    disable_parallel_tool_use: bool = False


class Toolbox:
    """The tools of a request."""

    def __init__(self, given: Sequence[ToolBody]) -> None:
        self._shown: list[Tool] = []
        self.deferred: list[Tool] = []  # not in the template's list
        self.kinds: dict[str, ToolBody] = {}  # tools that can be called, by flat names
        self._functions: dict[str, Function] = {}  # the same, as functions
        self._passed_over: list[str] = []
        for i, tool in enumerate(given):
            if tool.type == "namespace":
                for j, inner in enumerate(tool.tools):
                    inner.namespace = tool.name
                    self._add(inner, f"tools[{i}].tools[{j}]")
            else:
                tool.namespace = ""
                self._add(tool, f"tools[{i}]")

    def chosen(
        self, choice: str | Choice | None
    ) -> tuple[Sequence[Tool], Sequence[Function] | None]:
        """Return the tools to show, and the functions of which one has to be called.

        The functions are None if no call is needed. Raise ApiError for an unknown tool.
        """
        if not isinstance(choice, Choice):
            choice = Choice.model_validate({"type": choice or "auto"})
        mode, shown, functions = choice.type, self._shown, self._functions
        if mode == "allowed_tools":
            names = {self._named(each) for each in choice.tools}
            shown = [tool for tool in shown if tool["function"]["name"] in names]
            functions = {name: it for name, it in functions.items() if name in names}
            mode = choice.mode
        if mode in ("auto", "none"):
            return shown if mode == "auto" else [], None
        if mode not in ("required", "any"):
            name = self._named(choice, forced=True)
            functions = {name: functions[name]}
        if not functions:
            raise self._unknown(mode, functions)
        return shown, [*functions.values()]

    def _named(self, choice: Choice, *, forced: bool = False) -> str:
        """Return the flat name of a known tool; empty: the tool's kind is ignored."""
        name = choice.flat
        runs = choice.type in ("function", "custom", "tool")
        if runs and name in self._functions:
            return name
        if runs or forced:
            raise self._unknown(name or choice.type, self._functions)
        return ""

    def _unknown(self, name: str, functions: Collection[str]) -> ApiError:
        names = ", ".join(map(repr, functions)) or "none"
        if self._passed_over:
            names += f" ({', '.join(map(repr, self._passed_over))}: not run here)"
        return invalid(
            f"tool_choice is {name[:200]!r}, but the tools are: {names}.", "tool_choice"
        )

    def _add(self, tool: ToolBody, where: str) -> None:
        if tool.type not in ("function", "custom"):
            self._passed_over.append(tool.name or tool.type)
            return
        if not tool.name:
            raise invalid(f"{where} is a tool without a name.", where)
        name, parameters = tool.flat, INPUT if tool.custom else tool.parameters
        given = {"description": tool.description, "parameters": parameters}
        function = {"name": name, **{k: v for k, v in given.items() if v is not None}}
        self.kinds[name] = tool
        self._functions[name] = function
        tools = self.deferred if tool.defer_loading else self._shown
        tools.append({"type": "function", "function": function})
