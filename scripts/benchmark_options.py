"""What the benchmark scripts share: options, the bundled prompts, and progress.

Imports no mlx, so that the BLAS can be chosen after it.
"""

from pathlib import Path
from typing import Annotated

import typer

from mlx_speculation.blas import BlasName
from mlx_speculation.demo import DEMO_TARGETS, DemoPrompt, demo_models, demo_prompts

TARGETS = list(DEMO_TARGETS)
GROUPS = ["code", "prose", "edit"]
TEMPERATURES = [0.0, 1.0]


def _known_groups(groups: list[str] | None) -> list[str] | None:
    if unknown := set(groups or ()) - set(GROUPS):
        raise typer.BadParameter(
            f"the groups are {', '.join(GROUPS)}; there is no {min(unknown)!r}"
        )
    return groups


Target = Annotated[
    list[str] | None,
    typer.Option(help="dense, sliding, hybrid, or a folder; by default all three."),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Folder of the draft model; by default the bundled."),
]
Head = Annotated[
    list[str] | None, typer.Option(help="Folder of a further head of the target.")
]
Group = Annotated[
    list[str] | None,
    typer.Option(
        help="code, prose or edit; by default all three.", callback=_known_groups
    ),
]
Temperature = Annotated[
    list[float] | None, typer.Option(min=0.0, help="By default 0 and 1.")
]
Seed = Annotated[int, typer.Option(min=0)]
Blas = Annotated[BlasName, typer.Option(help="What multiplies float32 on a Linux CPU.")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write the JSON object here too.")
]


def folder_of(name: str) -> Path:
    """Return the folder of a bundled model, or the given one."""
    return demo_models()[name] if name in (*TARGETS, "draft") else Path(name)


def texts_of(group: str, count: int) -> list[DemoPrompt]:
    """Return the first prompts of a group."""
    return [text for text in demo_prompts() if text.group == group][:count]


def progress(line: str) -> None:
    """Say what is being done, beside the results."""
    typer.secho(line, err=True, dim=True)
