"""The data and speeds that a record describes, and the pairing of a draft that pays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.errors import ConventionError, SpeculationError
from mlx_speculation.json_files import write_json
from mlx_speculation.models.checkpoints.speculation_json import NAME
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.output.speeds import Speeds, measure_speeds


def described(
    dialogues: Dialogues, learned: Sequence[Dialogue], files: Sequence[Path]
) -> dict[str, Any]:
    """Return the record's entries on the data; `files` are further files of data."""
    return {
        "file": dialogues.file.name,
        "more": [file.name for file in files],
        "dialogues": len(learned),
        "own": sum(each.own_prompt for each in learned),
        "tokens": sum(len(each.tokens) for each in learned),
        "learned": int(sum(each.counts.sum() for each in learned)),
        "held_out": len(dialogues.held_out),
    }


def measured(
    model: nn.Module,
    tokenizer: Any,
    trainee: Trainee,
    dialogues: Sequence[Dialogue],
    folder: Path,
    out: Path,
    until: float | None,
) -> tuple[Speeds | None, str]:
    """Measure speeds, and name the draft in speculation.json if it pays.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        trainee: the trained drafter.
        dialogues: dialogues whose prompts are answered.
        folder: the target's folder.
        out: the draft's folder.
        until: the latest end, as a time of `time.monotonic`; None: no limit.

    Returns:
        The speeds, or None if they were not measured, and a line on speculation.json.
    """
    try:
        source = trainee.source(out)
        speeds = measure_speeds(model, tokenizer, source, dialogues, until=until)
    except ConventionError as error:  # the head has learned almost nothing
        return None, f"It drafts no better than by chance. {error}"
    except SpeculationError as error:  # not raised: the training itself is complete
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


def pair_with(target: Path, draft: Path, kind: str) -> str:
    """Name a draft in the target's speculation.json, so that `draft="auto"` uses it.

    Args:
        target: the target's folder.
        draft: the draft's folder, inside of the target's folder or of its parent.
        kind: the kind of the draft in speculation.json, such as "eagle" or "model".

    Returns:
        A line for the user. An existing speculation.json is not changed.
    """
    file, target, draft = target / NAME, target.resolve(), draft.resolve()
    if draft.is_relative_to(target):
        name = draft.relative_to(target).as_posix()
    elif draft.is_relative_to(target.parent):
        name = f"../{draft.relative_to(target.parent).as_posix()}"
    else:
        return (
            f"draft='auto' finds drafts in {str(target)!r} or beside it: move the "
            f"folder there, and write {NAME}, or pass draft={str(draft)!r}."
        )
    if file.exists():
        return f"{str(file)!r} is there already, and was left as it is."
    try:
        write_json(file, {"draft": name, "kind": kind})
    except OSError as error:
        return f"{str(file)!r} could not be written: {error.strerror}."
    return f"{str(file)!r} names it: draft='auto' takes it from now on."
