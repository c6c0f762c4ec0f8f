"""The typer application of all commands.

A command may have a parameter such as `pair: PairOptions`, whose fields are options.
typer needs a parameter for each option: `flattened` makes functions that have those.
Fields and parameters are declared with `option`, or with an annotation of typer.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from mlx_speculation.cli.commands.benchmark import benchmark
from mlx_speculation.cli.commands.calibrate import calibrate
from mlx_speculation.cli.commands.chat import chat
from mlx_speculation.cli.commands.check import check
from mlx_speculation.cli.commands.demo import demo
from mlx_speculation.cli.commands.doctor import doctor
from mlx_speculation.cli.commands.generate import generate
from mlx_speculation.cli.commands.pair import pair
from mlx_speculation.cli.commands.report import report
from mlx_speculation.cli.commands.serve import serve
from mlx_speculation.cli.commands.train import train
from mlx_speculation.cli.run_app import guarded

Parameter = inspect.Parameter


def _version(wanted: bool) -> None:
    if wanted:
        from mlx_speculation import __version__

        typer.echo(f"mlx-speculation {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Accept the options before the name of a command."""


app = typer.Typer(
    help="Faster text from mlx-lm models, and the same text.",
    no_args_is_help=True,
    add_completion=False,
)
app.callback(help=app.info.help)(_common)
COMMANDS = (
    generate,
    chat,
    serve,
    benchmark,
    check,
    calibrate,
    pair,
    train,
    report,
    doctor,
    demo,
)


def _help(command: Callable[..., None]) -> str:
    """Return a docstring with one line for each paragraph."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer, with a parameter for each field of a dataclass."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in given:
        if is_dataclass(parameter.annotation):
            group = groups[parameter.name] = parameter.annotation
            hints = get_type_hints(group, include_extras=True)
            flat += [_parameter(x.name, hints[x.name], x, group) for x in fields(group)]
        elif isinstance(default := parameter.default, Field):
            flat.append(_parameter(parameter.name, parameter.annotation, default, None))
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            members = {
                x.name: values.pop(_identifier(_names(x.name, x, group)))
                for x in fields(group)
            }
            values[name] = group(**members)
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__module__ = command.__module__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _parameter(name: str, hint: Any, field: "Field[Any]", group: Any) -> Parameter:
    """Return a field as a parameter that is named after its option."""
    names = _names(name, field, group)
    option = {**field.metadata.get("option", {})}
    if option:
        del option["names"]
        panel = option.pop("panel") or getattr(group, "panel", None)
        hint = Annotated[hint, typer.Option(*names, rich_help_panel=panel, **option)]
    return Parameter(
        _identifier(names),
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if field.default is MISSING else field.default,
        annotation=hint,
    )


def _names(name: str, field: "Field[Any]", group: Any) -> Sequence[str]:
    """Return an option's names; by default the name of its field or parameter."""
    given: Sequence[str] = field.metadata.get("option", {}).get("names", ())
    return given or (getattr(group, "prefix", "--") + name.replace("_", "-"),)


def _identifier(names: Sequence[str]) -> str:
    return names[0].removeprefix("--").replace("-", "_")


for command in COMMANDS:
    app.command(help=_help(command))(guarded(flattened(command)))
