"""The target of benchmark_batch.py and what drafts for it, as they are or grown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import typer
from benchmark_options import folder_of
from growing import SHAPES, fit_head, grow
from growing_hybrid import HYBRID_SHAPES, fit_mtp_head, grow_hybrid
from mlx_lm.utils import dequantize_model

from mlx_speculation import load
from mlx_speculation.demo import demo_models
from mlx_speculation.engine import EagleDraft, MtpDraft

AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True)
class Models:
    """What the arms are made of.

    Attributes:
        target: verifies.
        tokenizer: of all.
        drafts: what a generator takes, by name.
    """

    target: Any
    tokenizer: Any
    drafts: dict[str, Any]


def load_models(target: str, draft: Path, shape: str, names: list[str]) -> Models:
    """Load a target and what drafts for it.

    Args:
        target: dense, sliding, hybrid or a folder.
        draft: the draft model's folder; it keeps its size.
        shape: what the target and its head are grown to; "as it is": nothing.
        names: of the drafts: model, lookup, eagle for dense, mtp for hybrid.

    Raises:
        typer.BadParameter: there is no draft of such a name.
    """
    small: Any
    small, tokenizer = load(folder_of(target))
    grown = shape != AS_IT_IS
    model: Any = small
    if grown and target == "hybrid":
        model = grow_hybrid(small, HYBRID_SHAPES[shape])
    elif grown:
        model = grow(small, SHAPES[shape])
    drafts: dict[str, Any] = {}
    for name in names:
        if name == "model":
            drafts[name] = _small_draft(draft, grown=grown)
        elif name == "lookup":
            drafts[name] = name
        elif name == "eagle":
            folder = demo_models()[name]
            drafts[name] = (
                fit_head(folder, small, model)
                if grown
                else EagleDraft.from_folder(folder, model)
            )
        elif name == "mtp":
            folder = folder_of(target)
            drafts[name] = (
                fit_mtp_head(folder, small, model)
                if grown
                else MtpDraft.from_folder(folder, model)
            )
        else:
            raise typer.BadParameter(
                f"the drafts are model, lookup, eagle and mtp; there is no {name!r}"
            )
    return Models(model, tokenizer, drafts)


def _small_draft(folder: Path, *, grown: bool) -> Any:
    """Return the draft model, in the precision of a grown target."""
    draft: Any = load(folder)[0]
    if grown:
        draft = dequantize_model(draft)
        draft.set_dtype(mx.bfloat16)
    return draft
