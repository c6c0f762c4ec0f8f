"""training.json, the record of a training, and README.md, the card of its draft."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_speculation.environment import machine, versions
from mlx_speculation.json_files import write_json
from mlx_speculation.training.acceptance_check import ROUND, Acceptance
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.output.speeds import Speeds
from mlx_speculation.training.state import Progress

RECORD = "training.json"
_NAMES = {
    "eagle": "EAGLE-3 head",
    "dflash": "DFlash drafter",
    "dspark": "DSpark drafter",
    "mtp": "MTP head, fine-tuned",
    "draft": "draft model, distilled",
}


def described(
    dialogues: Dialogues, learned: Sequence[Dialogue], files: Sequence[Path]
) -> dict[str, Any]:
    """Return the record's entries on the data; `files`: further data files."""
    return {
        "file": dialogues.file.name,
        "more": [file.name for file in files],
        "dialogues": len(learned),
        "own": sum(each.own_prompt for each in learned),
        "tokens": sum(len(each.tokens) for each in learned),
        "learned": int(sum(each.counts.sum() for each in learned)),
        "held_out": len(dialogues.held_out),
    }


def write_record(
    folder: Path,  # of the draft
    target: str,
    options: Mapping[str, Any],  # see `TrainOptions.fixed`
    progress: Progress,
    data: Mapping[str, Any],  # see `described`
    lookup: Mapping[str, Acceptance],  # acceptance of prompt lookup on the same text
    ended: str,  # see `TrainingResult`
    speeds: Speeds | None,  # None: not measured
) -> dict[str, Any]:
    """Write training.json and README.md, and return the content of training.json."""
    record = {
        "target": target,
        "options": dict(options),
        "steps": {"planned": progress.steps, "taken": progress.step},
        "ended": ended,
        "data": dict(data),
        "best": {"length": progress.best[0], "step": progress.best[1]},
        "evaluations": progress.history,
        "losses": progress.losses,
        "lookup": {name: asdict(each) for name, each in lookup.items()},
        "speeds": None if speeds is None else asdict(speeds),
        "seconds": round(progress.seconds, 1),
        "machine": machine(),
        "versions": versions(),
    }
    write_json(folder / RECORD, record)
    if progress.best[1]:  # else no draft was written
        (folder / "README.md").write_text(_card(record), encoding="utf-8")
    return record


def _card(record: dict[str, Any]) -> str:
    options, data = record["options"], record["data"]
    kept = next(
        each for each in record["evaluations"] if each["step"] == record["best"]["step"]
    )
    rows = []
    for name, rates in kept["acceptance"].items():
        shares = " ".join(f"{share:.2f}" for share in rates["positions"])
        lookup = record["lookup"].get(name)
        beside = "-" if lookup is None else f"{lookup['length']:.2f}"
        rows.append(f"| {name} | {rates['length']:.2f} | {shares} | {beside} |")
    speeds = record["speeds"]
    measured = (
        "Speed was not measured."
        if speeds is None
        else f"Measured when it was made, greedy, on "
        f"{record['machine']['device_name'] or record['machine']['cpu']}: "
        f"{speeds['drafted']:.1f} tokens per second with it, {speeds['plain']:.1f} "
        f"without; {speeds['equal']} of {speeds['texts']} texts are the same."
    )
    taken = record["steps"]["taken"]
    table = "\n".join(rows)
    return f"""---
tags:
- speculative-decoding
- mlx
base_model: {record["target"]}
---

# {_NAMES[options["kind"]]} for {record["target"]}

It drafts for that model alone, and was trained on what the model wrote itself:
{data["dialogues"]} dialogues, {data["tokens"]} tokens in all. In {data["own"]} of the
dialogues the model wrote the prompt, too. This draft has the licence of the model.

    mlx-speculation generate {record["target"]} --draft FOLDER --prompt "..."

Acceptance on {data["held_out"]} held-out dialogues, teacher-forced, with {ROUND}
drafted tokens a round:

| text | mean accepted length | by position | prompt lookup |
|---|---|---|---|
{table}

{measured}

Trained by `mlx-speculation train`, {taken} steps in {record["seconds"]:.0f} s; the kept
weights are those of step {record["best"]["step"]}. `{RECORD}` holds all options,
losses and evaluations.
"""
