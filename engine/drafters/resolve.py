"""Loading a target together with what drafts for it.

Drafts by name, for a target that is loaded already.

What is loaded is kept with the target, the last draft alone, so that the next call
finds it: on an object of its own in an attribute of the model, which goes when the
model goes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from mlx_speculation.engine.drafters.quantize import check_quantized, own_weights
from mlx_speculation.engine.drafters.registry import (
    Kind,
    Offer,
    check_convention,
    draft_folder,
    kind_named,
)
from mlx_speculation.engine.drafters.resolve_auto import Choice, choose_draft
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Group,
    MtpConvention,
    Parallel,
    check_model_folder,
    load,
    model_folder,
    quantize_weights,
)
from mlx_speculation.warn import notice

# Drafts that are named, and not loaded from a folder of their own.
NAMED = ("auto", "lookup", "mtp")


class Pair(NamedTuple):
    """A target and its draft.

    Attributes:
        model: the target.
        tokenizer: its tokenizer.
        choice: the draft, and what its folder says of it.
    """

    model: nn.Module
    tokenizer: Any
    choice: Choice


def load_pair(
    path_or_repo: str | Path,
    draft: Any,
    *,
    convention: MtpConvention | None = None,
    quantize_draft: int | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    group: Group | None = None,
    parallel: Parallel = "tensor",
) -> Pair:
    """Load a target, and a draft where `draft` names one.

    Takes what `SpeculativeGenerator.from_pretrained` takes, and raises what it raises.
    What does not fit is refused before the target is loaded.
    """
    folder: Path | None = None
    kind: Kind | None = None
    if draft == "mtp":
        kind = kind_named("mtp")
    elif isinstance(draft, str | Path) and draft not in NAMED:
        folder, kind = draft_folder(draft)
    check_convention(convention, kind, draft)
    if quantize_draft is not None:
        check_quantized(quantize_draft, kind, draft)
    check_model_folder(path_or_repo)
    model, tokenizer = load(
        path_or_repo,
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
        group=group,
        parallel=parallel,
    )
    if group is not None and group.rank() > 0 and kind is kind_named("model"):
        return Pair(model, tokenizer, Choice(None))  # rank 0 drafts alone
    own = model_folder(path_or_repo)
    choice = Choice(draft)
    if draft == "auto":
        choice = choose_draft(own, model, tokenizer)
    elif kind is not None:
        offer = Offer(
            folder or own, own, model, tokenizer, convention, trust_remote_code
        )
        choice = Choice(kind.load(offer))
    if quantize_draft is not None and not isinstance(choice.draft, str):
        quantize_weights(own_weights(choice.draft), quantize_draft)
    return Pair(model, tokenizer, choice)


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
