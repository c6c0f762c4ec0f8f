"""Groups of options: a dataclass parameter of a command becomes one option a field.

typer takes flat functions only. With this a command says `pair: PairOptions` and shares
these options with the other commands.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

Parameter = inspect.Parameter


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, whose groups' fields are options."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in given:
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            flat += _fields(parameter.annotation)
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**own)
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__module__ = command.__module__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _fields(group: Any) -> list[Parameter]:
    """Return a group's fields as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
