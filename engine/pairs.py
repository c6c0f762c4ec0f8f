"""Loading a target together with what drafts for it."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from mlx_speculation.engine.automatic import Choice, choose_draft
from mlx_speculation.engine.cheaper import check_quantized, own_weights
from mlx_speculation.engine.kinds import (
    Kind,
    Offer,
    check_contract,
    draft_folder,
    kind_named,
)
from mlx_speculation.models import (
    Contract,
    Group,
    Parallel,
    check_model_folder,
    load,
    model_folder,
    quantize_weights,
)

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
    contract: Contract | None = None,
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
    check_contract(contract, kind, draft)
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
        offer = Offer(folder or own, own, model, tokenizer, contract, trust_remote_code)
        choice = Choice(kind.load(offer))
    if quantize_draft is not None and not isinstance(choice.draft, str):
        quantize_weights(own_weights(choice.draft), quantize_draft)
    return Pair(model, tokenizer, choice)
