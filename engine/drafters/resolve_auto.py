"""`draft="auto"`: the draft that a target's folder offers.

1. what speculation.json names
2. the MTP head in the folder
3. a lookup, and a notice that says why
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.registry import (
    KINDS,
    Kind,
    Offer,
    draft_folder,
    kind_named,
)
from mlx_speculation.errors import (
    ConventionError,
    ModelFolderError,
    UnsupportedModelError,
)
from mlx_speculation.models import MtpConvention
from mlx_speculation.models.checkpoints import PairFile, convention_of, read_pair
from mlx_speculation.models.mtp import usual_convention


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft that was chosen.

    Attributes:
        draft: what a generator takes.
        length: how many tokens to draft in a round, if the folder says so.
        notices: why it is not another.
    """

    draft: Any
    length: int | None = None
    notices: tuple[str, ...] = ()


def choose_draft(folder: Path, model: nn.Module, tokenizer: Any) -> Choice:
    """Return the draft that a target's folder offers.

    Args:
        folder: the target's.
        model: the target.
        tokenizer: the target's.

    Raises:
        ModelFolderError: speculation.json is wrong, or the draft that it names.
        TokenizerMismatchError: the draft that it names has other token ids.
    """
    pair = read_pair(folder, [kind.name for kind in KINDS])
    if pair is not None:
        return _of_pair(pair, folder, model, tokenizer)
    try:
        head = kind_named("mtp").load(Offer(folder, folder, model, tokenizer))
    except (ModelFolderError, UnsupportedModelError) as error:
        return _lookup(folder, error)
    return Choice(head)


def _of_pair(pair: PairFile, folder: Path, model: nn.Module, tokenizer: Any) -> Choice:
    if pair.draft == "lookup":
        return Choice("lookup", pair.draft_length)
    of_draft, kind = (
        (folder, kind_named("mtp"))
        if pair.folder is None
        else draft_folder(pair.folder)
    )
    _check_kind(pair, kind)
    convention = None if pair.convention is None else _convention(pair, model)
    offer = Offer(of_draft, folder, model, tokenizer, convention)
    try:
        return Choice(kind.load(offer), pair.draft_length)
    except ConventionError as error:
        return _lookup(folder, error, pair.draft_length)


def _check_kind(pair: PairFile, kind: Kind) -> None:
    if pair.kind not in (None, kind.name):
        raise ModelFolderError(
            f"{str(pair.file)!r} has kind = {pair.kind!r}, and {pair.draft!r} is of "
            f"kind {kind.name!r}. Fix it, or leave kind out."
        )
    if pair.convention is not None and not kind.convention:
        raise ModelFolderError(
            f"{str(pair.file)!r} has a convention, and {pair.draft!r} is of kind "
            f"{kind.name!r}. Leave the convention out: it is for MTP heads."
        )


def _convention(pair: PairFile, model: nn.Module) -> MtpConvention:
    return convention_of(pair.convention, str(pair.file), usual_convention(model))


def _lookup(folder: Path, error: Exception, length: int | None = None) -> Choice:
    said = (
        f"draft='auto' takes a lookup, since {str(folder)!r} offers no other draft "
        f"that can be used. {error}"
    )
    return Choice("lookup", length, (said,))
