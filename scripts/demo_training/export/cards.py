"""The demo folder's last files: tokenizer copies, model cards and `training.json`."""

import json
import shutil
from pathlib import Path
from typing import Any

from demo_training.data.prepare import write_json
from demo_training.nets.shapes import SHAPES, Shape

KINDS = {
    "dense": "a Qwen 3 model with full attention",
    "sliding": "a Gemma 3 text model with a window of 96 tokens in four of six layers",
    "hybrid": "a Qwen 3.5 model: four gated delta layers, two of full attention, "
    "and a one-layer `mtp.*` head for multi-token prediction",
    "draft": "a Qwen 3 model with two layers, distilled from the three targets",
}
CARD = """---
license: psf-2.0
library_name: mlx
language: en
---

# {name}

{kind}. {parameters:,} parameters, stored in {bits} bits (groups of {group}).
A demonstration and test model of mlx-speculation: it writes recognisable Python and
English, and knows nothing.

## Source and licence

Trained from nothing on text that comes with Python {python}: the standard library's
files, `pydoc_data/topics.py` and docstrings. Copyright © Python Software Foundation,
under the PSF License Version 2; files with a licence notice of their own were left out.
`corpus.json` beside this folder lists every text with its hash. No other data was used.

## Training

By `scripts/train.py demo` on one NVIDIA H200, seed {seed}: {steps:,} steps,
{tokens:,} tokens, {seconds} s with other trainings on the same GPU.

Held-out loss (nats per token), before and after quantization:

{losses}
{extra}
"""
DRAFT_EXTRA = """
Agreement with each target's greedy continuations of held-out text (64 windows a group,
128 tokens), before and after quantization of the draft, and mean accepted tokens per
round of four:

{table}
"""
HEAD_EXTRA = """
The head ({parameters:,} parameters) takes the state after the final norm. Agreement
with the target's greedy text, after quantization, for the first and the second draft:
{groups}. Its norms are stored as the factor itself (converted layout).
"""


def finish(work: Path, out: Path, demo: Path) -> None:
    """Completes the demo folder from what the trainings wrote.

    Args:
        work: Holds the tokenizer.
        out: Holds a folder for each model and the trainings' records.
        demo: The package's demo folder.
    """
    records = {name: read(out / f"{name}.json") for name in (*SHAPES, "head")}
    corpus = read(demo / "corpus.json")
    for name, shape in SHAPES.items():
        folder = demo / name
        shutil.copytree(out / name, folder, dirs_exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(work / file, folder / file)
        text = card(shape, records, corpus["python"])
        (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(demo / "training.json", {"machine": "one NVIDIA H200", **records})


def read(path: Path) -> dict[str, Any]:
    """A JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def card(shape: Shape, records: dict[str, Any], python: str) -> str:
    """A model card."""
    record = records[shape.name]
    before, after = record["held_out_loss"], record["held_out_loss_quantized"]
    rows = [f"| {g} | {before[g]:.3f} | {after[g]:.3f} |" for g in before]
    losses = "\n".join(["| text | float | quantized |", "|---|---|---|", *rows])
    extra = ""
    if shape.name == "draft":
        extra = DRAFT_EXTRA.format(table=agreement_table(record))
    elif shape.name == "hybrid":
        head = records["head"]
        found = head["agreement_quantized"]
        groups = ", ".join(
            f"{g} {100 * e['first']:.0f} % and {100 * e['second']:.0f} %"
            for g, e in found.items()
        )
        extra = HEAD_EXTRA.format(parameters=head["parameters"], groups=groups)
    kind = KINDS[shape.name]
    return (
        CARD.format(
            name=f"mlx-speculation demo: {shape.name}",
            kind=kind[0].upper() + kind[1:],
            bits=shape.bits,
            group=shape.group,
            python=python,
            losses=losses,
            extra=extra,
            **{
                k: record[k]
                for k in ("parameters", "seed", "steps", "tokens", "seconds")
            },
        ).rstrip()
        + "\n"
    )


def agreement_table(record: dict[str, Any]) -> str:
    """One row per target and group."""
    rows = [
        "| target | text | before | after | accepted of 4 |",
        "|---|---|---|---|---|",
    ]
    for target, groups in record["agreement_quantized"].items():
        for group, after in groups.items():
            before = record["agreement"][target][group]["agreement"]
            rows.append(
                f"| {target} | {group} | {100 * before:.1f} % "
                f"| {100 * after['agreement']:.1f} % | {after['accepted_4']:.2f} |"
            )
    return "\n".join(rows)
