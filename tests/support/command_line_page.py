"""Writes docs/command_line.md from the help texts of the commands.

PYTHONPATH=src:tests python -m support.command_line_page docs/command_line.md
"""

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mlx_speculation.cli.app import app

START = """# Command line

Generated from what the commands say with `--help`.

```sh
mlx-speculation generate path/of/target --draft path/of/draft --prompt "def fib(n):"
mlx-speculation chat path/of/target --draft lookup --temp 0.7 --seed 1
mlx-speculation doctor --json
```

Every command but `doctor` and `demo` takes the target as its argument. A model is a
folder in mlx-lm's layout or the name of a repository. `python -m mlx_speculation` is
the same program.

| status | when |
|---|---|
| 0 | done |
| 1 | an error, in one line on standard error; or texts differ |
| 2 | wrong usage, such as an option or a prompt that cannot be used |
| 130, 143 | Ctrl-C, SIGTERM (`serve`: 0). The results so far are kept. \
A second one ends it within 2 s |
| 141 | the reader of the output has left, as in `\\| head` |

With `--json` a command (not `serve` and `report`) prints one JSON object on standard
output and nothing else.
Where costs, copies of OpenBLAS and conventions of heads are kept:
`MLX_SPECULATION_CACHE`, else `~/.cache/mlx-speculation`.
"""
MODEL = ("adapter_path", "trust_remote_code", "blas")
# Groups of options that several commands take, each with a command that has it.
GROUPS = {
    "Model": "generate",
    "Draft and its length": "generate",
    "Sampling, as mlx-lm names it": "generate",
}
# Commands whose own options another page explains.
ELSEWHERE = {
    "serve": "Its options are on [its page](server.md#options).\n",
    "train": "Its options are on [its page](training.md#options).\n",
}


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def panel(parameter: Any) -> str:
    if parameter.name in MODEL:
        return "Model"
    return getattr(parameter, "rich_help_panel", None) or ""


def page() -> str:
    parts = [START, *_shared()]
    for name, command in commands().items():
        parts += [f"## {name}\n", f"{command.help}\n", *_own_options(name, command)]
    return "\n".join(parts)


def _shared() -> Iterator[str]:
    yield "## Options of several commands\n"
    for title, example in GROUPS.items():
        yield f"### {title}\n"
        taken = commands()[example].params
        yield _table([each for each in taken if panel(each) == title])


def _own_options(name: str, command: Any) -> Iterator[str]:
    """Yield the links to the groups that a command takes, and its other options."""
    rest: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.opts[0].startswith("-"):
            rest.setdefault(panel(parameter), []).append(parameter)
    if name in ELSEWHERE:
        yield ELSEWHERE[name]
        return
    same = [title for title in GROUPS if _is_shared(title, rest.get(title, []))]
    if same:
        links = (f"[{title}](#{_anchor(title)})" for title in same)
        yield f"Takes the options of {', '.join(links)}, and these:\n"
    ours = [each for title in rest if title not in same for each in rest[title]]
    ours = [each for each in ours if each.name != "json"]  # explained at the top
    if ours:
        yield _table(ours)


def _is_shared(title: str, taken: list[Any]) -> bool:
    example = commands()[GROUPS[title]].params
    listed = [each.name for each in example if panel(each) == title]
    return [each.name for each in taken] == listed


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _table(parameters: list[Any]) -> str:
    rows = ["| option | default | |", "|---|---|---|"]
    for each in parameters:
        names = ", ".join(f"`{name}`" for name in each.opts)
        text = (each.help or "").replace("|", "\\|")
        if each.envvar:
            text += f" Or set `{each.envvar}`."
        default = f" {_default(each)} ".replace("  ", " ")
        rows.append(f"| {names}{_values(each)} |{default}| {text} |")
    return "\n".join(rows) + "\n"


def _values(parameter: Any) -> str:
    """Return the values that an option may take if its type is a `Literal`."""
    kind = parameter.type_descriptor.annotation
    if typing.get_origin(kind) is not typing.Literal:
        return ""
    return " " + ", ".join(map(str, typing.get_args(kind)))


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.is_flag or value is None or value == () or value == []:
        return "required" if parameter.required else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
