"""Groups of options: a dataclass parameter of a command becomes one option a field.

typer takes flat functions only. With this a command says `pair: PairOptions` and shares
these options with the other commands. A field is an `option`, or is annotated as typer
wants it.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

Parameter = inspect.Parameter


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, whose groups' fields are options."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in given:
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            flat += _parameters(parameter.annotation)
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {field.name: values.pop(_flat_name(field)) for field in fields(group)}
            values[name] = group(**own)
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__module__ = command.__module__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _names(field: "Field[Any]") -> tuple[str, ...]:
    """Return the names of a field's option."""
    given = field.metadata.get("option", {}).get("names")
    return given or (f"--{field.name.replace('_', '-')}",)


def _flat_name(field: "Field[Any]") -> str:
    """Return a name that no field of another group has: that of the option."""
    return _names(field)[0].removeprefix("--").replace("-", "_")


def _parameters(group: Any) -> list[Parameter]:
    """Return a group's fields as parameters."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        hint, option = hints[field.name], {**field.metadata.get("option", {})}
        if option:
            del option["names"]
            panel = option.pop("panel") or getattr(group, "panel", None)
            made = typer.Option(*_names(field), rich_help_panel=panel, **option)
            hint = Annotated[hint, made]
        default = Parameter.empty if field.default is MISSING else field.default
        name, kind = _flat_name(field), Parameter.KEYWORD_ONLY
        found.append(Parameter(name, kind, default=default, annotation=hint))
    return found
