"""The data that a record describes, and the speeds that it names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.errors import ConventionError, SpeculationError
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.output.pair_file import pair_with
from mlx_speculation.training.output.speeds import Speeds, measure_speeds


def described(
    dialogues: Dialogues, learned: Sequence[Dialogue], files: Sequence[Path]
) -> dict[str, Any]:
    """Return what the record says of the data, of further files by name alone."""
    return {
        "file": dialogues.file.name,
        "more": [file.name for file in files],
        "dialogues": len(learned),
        "own": sum(each.own for each in learned),
        "tokens": sum(len(each.tokens) for each in learned),
        "learned": int(sum(each.counts.sum() for each in learned)),
        "held_out": len(dialogues.held_out),
    }


def measured(
    model: nn.Module,
    tokenizer: Any,
    trainee: Trainee,
    held: Sequence[Dialogue],
    folder: Path,
    out: Path,
    until: float | None,
) -> tuple[Speeds | None, str]:
    """Measure speeds, and name the draft in speculation.json if it pays.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        trainee: what was trained.
        held: dialogues whose prompts are answered.
        folder: the target's.
        out: the draft's.
        until: when to end, of `time.monotonic`; None: when all texts are written.

    Returns:
        The speeds, None where they are not known, and a line on speculation.json.
    """
    try:
        source = trainee.source(out)
        speeds = measure_speeds(model, tokenizer, source, held, until=until)
    except ConventionError as error:  # it has learned next to nothing
        return None, f"It drafts no better than by chance. {error}"
    except SpeculationError as error:  # the record is written all the same
        return None, f"Its speed could not be measured. {error}"
    if speeds is None:
        return None, (
            "The time is up, and its speed was not measured: `mlx-speculation "
            "benchmark` does that."
        )
    if not speeds.pays:
        return speeds, "It does not pay here, so speculation.json does not name it."
    kind = "model" if trainee.kind == "draft" else trainee.kind
    return speeds, pair_with(folder, out, kind)
