"""Drafts by name, for a target that is loaded already.

What is loaded is kept with the target, the last draft alone, so that the next call
finds it: on an object of its own in an attribute of the model, which goes when the
model goes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.automatic import Choice, choose_draft
from mlx_speculation.engine.kinds import Offer, draft_folder, kind_named
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import notice

ATTRIBUTE = "_mlx_speculation_draft"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The draft that was loaded last for a model, and by which name."""

    name: str
    choice: Choice


def named_draft(name: str | Path, model: nn.Module, tokenizer: Any) -> Choice:
    """Return the draft of a name: loaded, or as the last call has loaded it.

    Args:
        name: "lookup", "mtp" or "auto", or a folder or repository.
        model: the target.
        tokenizer: the target's. It knows the folder that it was loaded from, where
            "mtp" and "auto" look.

    Raises:
        InvalidRequestError: the target's folder is not known.
        ModelFolderError: what is named is not there, or cannot be used.
        TokenizerMismatchError: target and draft do not share their token ids.
    """
    if name == "lookup":
        return Choice("lookup")
    kept = getattr(model, ATTRIBUTE, None)
    if isinstance(kept, _Kept) and kept.name == str(name):
        return kept.choice
    choice = _loaded(name, model, tokenizer)
    for said in choice.notices:
        notice(said)
    setattr(model, ATTRIBUTE, _Kept(str(name), choice))
    return choice


def _loaded(name: str | Path, model: nn.Module, tokenizer: Any) -> Choice:
    own = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    if name in ("mtp", "auto") and not (own / "config.json").is_file():
        raise InvalidRequestError(
            f"draft_model is {name!r}, which stands in the target's folder, and the "
            f"tokenizer was loaded from {str(own)!r}, where there is no model. Use "
            "SpeculativeGenerator.from_pretrained(folder, draft=...)."
        )
    if name == "auto":
        return choose_draft(own, model, tokenizer)
    if name == "mtp":
        kind, folder = kind_named("mtp"), own
    else:
        folder, kind = draft_folder(name)
    return Choice(kind.load(Offer(folder, own, model, tokenizer)))
