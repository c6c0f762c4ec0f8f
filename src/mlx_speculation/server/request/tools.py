"""Tools of a request, and which of them have to be called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.request.models import short

Tool = dict[str, Any]  # in OpenAI's form: {"type": "function", "function": {...}}


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call, and what it has to call."""

    shown: tuple[Tool, ...] = ()
    # The functions of which one has to be called; None: the model is free.
    needed: tuple[dict[str, Any], ...] | None = None


def function_tool(given: Any, where: str) -> Tool:
    """Return a function with a name, in the form that chat templates know.

    Raises:
        ApiError: it has no name, or its parameters are no schema.
    """
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid(f"{where} is no function with a name.", where)
    parameters = given.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"The parameters of {where} are no JSON schema.", where)
    kept = ("name", "description", "parameters")
    function = {key: given[key] for key in kept if given.get(key) is not None}
    return {"type": "function", "function": function}


def chosen_tools(
    tools: Sequence[Tool],
    choice: Any,  # "auto", "none", "required", or the name of a function in a tuple
    *,
    # Kinds that are not run here, by their names; none can be chosen.
    passed_over: Sequence[str] = (),
) -> Tools:
    """Return the tools that the model is shown, and those that it has to call.

    Raises:
        ApiError: the choice is none, or of a tool that is not there.
    """
    if choice in (None, "auto"):
        return Tools(tuple(tools))
    if choice == "none":
        return Tools()
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, tuple):
        needed = [each for each in functions if each["name"] == choice[0]]
        choice = choice[0]
    elif choice == "required":
        needed = functions
    else:
        raise invalid(
            f"tool_choice is {short(choice)}, and 'auto', 'none', 'required' or a "
            "function's name is needed.",
            "tool_choice",
        )
    if not needed:
        names = ", ".join(repr(each["name"]) for each in functions) or "none"
        more = f" ({', '.join(map(repr, passed_over))}: not run here)"
        raise invalid(
            f"tool_choice is {choice!r}, and the tools are: {names}"
            f"{more if passed_over else ''}.",
            "tool_choice",
        )
    return Tools(tuple(tools), tuple(needed))
