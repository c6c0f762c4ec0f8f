"""The options that benchmarks have in common, and the bundled models by name."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mlx_speculation.blas import BlasName
from mlx_speculation.demo import DEMO_TARGETS, demo_models

TARGETS = [*DEMO_TARGETS]
GROUPS = ["code", "prose", "edit"]


def _known_groups(groups: list[str] | None) -> list[str] | None:
    if unknown := set(groups or ()) - set(GROUPS):
        raise typer.BadParameter(
            f"the groups are {', '.join(GROUPS)}; there is no {min(unknown)!r}"
        )
    return groups


Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target", help="dense, sliding, hybrid, or a folder; by default dense."
    ),
]
Target = Annotated[str, typer.Option(help="dense, sliding, hybrid, or a folder.")]
DraftModel = Annotated[
    str, typer.Option(help="Folder of the draft model; by default the bundled one.")
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="model, compiled (the model, compiled), wrong (its least probable "
        "tokens), lookup, mtp, a bundled head, a folder, or several as a cascade: "
        '"lookup+model".',
    ),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option("--draft-length", min=1, help="Tokens drafted in a round."),
]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group", help="code, prose or edit; by default all.", callback=_known_groups
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0)]
Tokens = Annotated[int, typer.Option(min=1, help="Maximum length of each text.")]
Prompts = Annotated[int, typer.Option(min=1, help="Prompts of each group.")]
Repeats = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int, typer.Option(min=0)]
Blas = Annotated[BlasName, typer.Option(help="BLAS for float32 on a Linux CPU.")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the JSON object to this file.")
]


def folder_of(name: str) -> Path:
    """Return the folder of a bundled model, or a path as it is."""
    if Path(name).is_absolute() or os.sep in name:  # a path, not a name
        return Path(name)
    return demo_models().get(name, Path(name))
