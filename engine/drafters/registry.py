"""The kinds of drafts that stand in a folder, and how each is loaded: one table.

A folder says by its config.json what it is. A new kind is one line in `KINDS`, before
"model", which fits what nobody else claims.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.dflash import DFlashDraft
from mlx_speculation.engine.drafters.eagle import EagleDraft
from mlx_speculation.engine.drafters.gemma_assistant import AssistantDraft
from mlx_speculation.engine.drafters.mtp import MtpDraft
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    MtpConvention,
    check_model_folder,
    check_same_ids,
    is_there,
    load,
    model_folder,
    read_config,
)
from mlx_speculation.models.dflash import is_dflash
from mlx_speculation.models.eagle import is_eagle
from mlx_speculation.models.gemma_assistant import is_assistant
from mlx_speculation.models.mtp import is_split_head


@dataclass(frozen=True, slots=True)
class Offer:
    """What a draft is loaded from, and for.

    Attributes:
        folder: the draft's.
        target: the target's, which may be the same.
        model: the target.
        tokenizer: the target's.
        convention: what a head was trained with, if somebody has named it.
        trust_remote_code: whether code in the draft's folder may run.
    """

    folder: Path
    target: Path
    model: nn.Module
    tokenizer: Any
    convention: MtpConvention | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of draft.

    Attributes:
        name: what speculation.json calls it.
        fits: gets what a folder's config.json holds, and says whether it is one.
        load: makes of an offer what a generator takes as its draft.
        whole: whether the folder has to hold a model that generates by itself.
        convention: whether an offer's convention is of use to it.
    """

    name: str
    fits: Callable[[dict[str, Any]], bool]
    load: Callable[[Offer], Any]
    whole: bool = False
    convention: bool = False


def _load_mtp(offer: Offer) -> MtpDraft:
    return MtpDraft.from_folder(
        offer.target,
        offer.model,
        convention=offer.convention,
        tokenizer=offer.tokenizer,
        split=None if offer.folder == offer.target else offer.folder,
    )


def _load_dflash(offer: Offer) -> DFlashDraft:
    return DFlashDraft.from_folder(offer.folder, offer.model)


def _load_eagle(offer: Offer) -> EagleDraft:
    return EagleDraft.from_folder(offer.folder, offer.model, tokenizer=offer.tokenizer)


def _load_assistant(offer: Offer) -> AssistantDraft:
    return AssistantDraft.from_folder(
        offer.folder, offer.model, tokenizer=offer.tokenizer
    )


def _load_model(offer: Offer) -> nn.Module:
    trusted = offer.trust_remote_code
    model, tokenizer = load(offer.folder, trust_remote_code=trusted)
    check_same_ids(offer.tokenizer, tokenizer)
    return model


KINDS: tuple[Kind, ...] = (
    Kind("mtp", is_split_head, _load_mtp, convention=True),
    Kind("dflash", is_dflash, _load_dflash),
    Kind("eagle", is_eagle, _load_eagle),
    Kind("assistant", is_assistant, _load_assistant),
    Kind("model", lambda config: True, _load_model, whole=True),
)


def kind_named(name: str) -> Kind:
    """Return the kind of a name."""
    return next(kind for kind in KINDS if kind.name == name)


def kind_of(config: dict[str, Any]) -> Kind:
    """Return the kind of a folder with this config.json."""
    return next(kind for kind in KINDS if kind.fits(config))


def draft_folder(path_or_repo: str | Path) -> tuple[Path, Kind]:
    """Return the folder of a draft, fetched if a repository is named, and its kind.

    Raises:
        ModelFolderError: there is no such folder, or it is none of a draft.
    """
    folder = Path(path_or_repo).expanduser()
    if not is_there(folder / "config.json"):
        folder = model_folder(path_or_repo)
    kind = kind_of(read_config(folder))
    if kind.whole:
        check_model_folder(folder)
    return folder, kind


def check_convention(
    convention: MtpConvention | None, kind: Kind | None, draft: Any
) -> None:
    """Refuse a convention that nobody would read."""
    if convention is not None and (kind is None or not kind.convention):
        raise InvalidRequestError(
            f"A convention was passed, and draft is {draft!r}, not 'mtp'. Leave the "
            "convention out: it is for MTP heads."
        )
