"""Resolution of the argument `draft=`, in two steps.

    find_draft    turns a name or a path into a `DraftName`, and loads nothing
    resolve       loads a `DraftName`, and wraps a user's model or drafter in a `Draft`

`draft="auto"` adds a lookup to the draft that the target's folder offers:

1. the draft that speculation.json names; if it also sets `draft_length`, no lookup is
   added
2. else the MTP head in the folder
3. else none: the lookup drafts alone. If the folder holds a draft that cannot be used,
   a notice says why

The draft that was loaded last is stored in an attribute of the target model, and freed
with the model. The next generator with the same `DraftName` uses it again.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Drafter
from mlx_speculation.engine.drafters.cascade import CascadeDraft
from mlx_speculation.engine.drafters.draft import (
    Draft,
    FolderDraft,
    TargetInfo,
)
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.foreign_model import ForeignModelDraft
from mlx_speculation.engine.drafters.mtp import MtpDraft
from mlx_speculation.engine.drafters.registry import FOLDER_DRAFTS, draft_folder
from mlx_speculation.engine.drafters.user_drafter import adapted_draft
from mlx_speculation.engine.lookup.drafter import LookupDraft
from mlx_speculation.errors import (
    ConventionError,
    InvalidRequestError,
    ModelFolderError,
    UnsupportedModelError,
)
from mlx_speculation.models import (
    MtpConvention,
    check_bits,
    model_folder,
    quantize_weights,
)
from mlx_speculation.models.checkpoints import PairFile, convention_of, read_pair
from mlx_speculation.models.mtp import usual_convention
from mlx_speculation.warn import notice

ATTRIBUTE = "_mlx_speculation_draft"
# Everything that a generator takes as its draft.
DraftArgument = nn.Module | Drafter | Draft | str | Path


@dataclass(frozen=True, slots=True)
class Resolved:
    """The draft of a `draft=` argument."""

    draft: Draft | None  # None: plain decoding
    # The draft length that the target's folder names; None: it names none
    length: int | None = None
    # Why another draft was not used, and guesses that were made in loading this one
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftName:
    """The name of a draft that is not loaded yet."""

    name: str  # "auto", "lookup", "mtp", a path or a repository
    # The class that loads it; None: no class (a lookup), or the target's folder decides
    loader: type[FolderDraft] | None = None
    folder: Path | None = None  # the draft's folder; None: the target's
    # The target's folder or repository; None: the one that the tokenizer names
    target: str | Path | None = None
    # The convention that an MTP head was trained with; None: it was not passed
    convention: MtpConvention | None = None
    bits: int | None = None  # of the quantized weights; None: they stay as they are
    trust_remote_code: bool = False  # whether to run code in the draft's folder
    history: int | None = None  # `history` of the lookup, see `LookupDraft`


@dataclass(frozen=True, slots=True)
class _Kept:
    """The draft that was loaded last for a model, and its name."""

    named: DraftName
    resolved: Resolved


def find_draft(
    draft: Any,
    *,
    convention: MtpConvention | None = None,
    quantize_draft: int | None = None,
    target: str | Path | None = None,
    trust_remote_code: bool = False,
    history: int | None = None,
) -> Any:
    """Return the `DraftName` of a name or a path; return anything else as it is.

    Raises:
        InvalidRequestError: an option does not apply to this draft.
        ModelFolderError: the folder does not exist, or holds no draft.
    """
    loader: type[FolderDraft] | None = None
    folder: Path | None = None
    if draft == "mtp":
        loader = MtpDraft
    elif isinstance(draft, str | Path) and draft not in ("auto", "lookup"):
        folder, loader = draft_folder(draft)
    if convention is not None and loader is not MtpDraft:
        raise InvalidRequestError(
            f"A convention was passed, and draft is {draft!r}, not 'mtp'. Leave the "
            "convention out: it is for MTP heads."
        )
    if history is not None and draft not in ("auto", "lookup"):
        raise InvalidRequestError(
            f"history is {history}, which needs draft='auto' or 'lookup', but draft is "
            f"{draft!r}. Leave history out, or pass one of these."
        )
    if quantize_draft is not None:
        check_bits(quantize_draft)
        if loader is None and draft != "auto":
            plain = draft is None or isinstance(draft, str)
            result = repr(draft) if plain else f"a {type(draft).__name__}"
            raise InvalidRequestError(
                f"quantize_draft is {quantize_draft}, but draft is {result}, and only "
                "a draft that is loaded from files is quantized. Leave quantize_draft "
                "out; mlx.nn.quantize does the same to a model object."
            )
    if not isinstance(draft, str | Path):
        return draft
    return DraftName(
        name=str(draft),
        loader=loader,
        folder=folder,
        target=target,
        convention=convention,
        bits=quantize_draft,
        trust_remote_code=trust_remote_code,
        history=history,
    )


def resolve(
    draft: Any, target: TargetInfo, *, follower: bool = False, foreign: bool = False
) -> Resolved:
    """Return the `Draft` of a `draft=` argument.

    Args:
        draft: the argument, or the result of `find_draft`.
        target: the target. If `draft` is a name, `target.folder` is replaced by
            `DraftName.target`, or else by the folder of the tokenizer.
        follower: whether another rank drafts. This rank then loads no draft model, but
            does load a head, since all ranks take part in probing it.
        foreign: whether the draft model has another tokenizer than the target.

    Raises:
        InvalidRequestError: `draft` is no draft, or the target's folder is needed and
            not known, or `foreign` is set and `draft` is not the folder of a model.
        ModelFolderError: the named folder is missing, or cannot be used.
        TokenizerMismatchError: target and draft do not share their token ids.
    """
    if isinstance(draft, str | Path):
        draft = find_draft(draft)
    if isinstance(draft, DraftName):
        if foreign:
            draft = _foreign(draft)
        if follower and draft.loader in (ModelDraft, ForeignModelDraft):
            return Resolved(None)
        return _loaded(draft, target)
    result = None
    if draft is not None:
        result = adapted_draft(draft, lambda member: _member(member, target))
    if foreign and (result is None or not result.foreign):
        raise _not_foreign(type(draft).__name__)
    return Resolved(None) if result is None else _said(result)


def _said(draft: Draft) -> Resolved:
    """Return a draft with the notices of its members."""
    notices = (member.notice for member in draft.members() if member.notice)
    return Resolved(draft, notices=tuple(notices))


def _foreign(named: DraftName) -> DraftName:
    """Return the name, with the loader of a draft model with another tokenizer."""
    if named.loader is not ModelDraft:
        raise _not_foreign(repr(named.name))
    return replace(named, loader=ForeignModelDraft)


def _not_foreign(draft: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"draft_vocabulary is 'intersection', and draft is {draft}, which is not the "
        "folder of a draft model with its tokenizer. Pass draft=FOLDER, or leave "
        "draft_vocabulary out."
    )


def _member(draft: Any, target: TargetInfo) -> Draft:
    member = resolve(draft, target).draft
    if member is None:
        raise InvalidRequestError(
            "A member of the cascade is None instead of an mlx-lm model or a "
            "drafter. Leave it out."
        )
    return member


def _loaded(named: DraftName, target: TargetInfo) -> Resolved:
    """Return a named draft, in a cascade with a lookup if its name is "auto"."""
    lookup = LookupDraft(history=named.history)
    if named.name == "lookup":
        return Resolved(lookup)
    resolved = _kept(replace(named, history=None), target)
    if named.name != "auto" or resolved.length is not None:
        return resolved
    result = resolved.draft
    return replace(resolved, draft=CascadeDraft(result, lookup) if result else lookup)


def _kept(named: DraftName, target: TargetInfo) -> Resolved:
    """Return the last generator's draft if the name is the same; else load a draft."""
    kept = getattr(target.model, ATTRIBUTE, None)
    if isinstance(kept, _Kept) and kept.named == named:
        return kept.resolved
    target = _placed(named, target)
    if named.loader is None:
        resolved = _offered(target)
    else:
        folder, trusted = named.folder or target.folder, named.trust_remote_code
        target = replace(target, convention=named.convention, trust_remote_code=trusted)
        resolved = _said(named.loader.load(folder or Path(), target))
    weights = None if resolved.draft is None else resolved.draft.own_weights
    if named.bits is not None and weights is not None:
        quantize_weights(weights, named.bits)
    setattr(target.model, ATTRIBUTE, _Kept(named, resolved))
    return resolved


def _placed(named: DraftName, target: TargetInfo) -> TargetInfo:
    """Return the target with its folder, which must exist if it holds the draft."""
    place = Path(str(getattr(target.tokenizer, "name_or_path", "") or ""))
    if named.target is not None:
        place = model_folder(named.target)
    if named.folder is None and not (place / "config.json").is_file():
        raise InvalidRequestError(
            f"draft is {named.name!r}, which is looked for in the target's folder, but "
            f"{str(place)!r} holds no model. Use "
            "SpeculativeGenerator.from_pretrained(folder, draft=...)."
        )
    return replace(target, folder=place)


def _offered(target: TargetInfo) -> Resolved:
    """Return the draft that a target's folder offers besides a lookup, if any.

    Raises:
        ModelFolderError: speculation.json or the draft that it names is invalid.
        TokenizerMismatchError: the draft that it names has other token ids.
    """
    folder = target.folder
    assert folder is not None
    pair = read_pair(folder, [draft.kind for draft in FOLDER_DRAFTS])
    if pair is not None:
        return _of_pair(pair, folder, target)
    try:
        return Resolved(MtpDraft.load(folder, target))
    except UnsupportedModelError:
        return Resolved(None)
    except ModelFolderError as error:
        return _lookup(f"there is no other draft that can be used. {error}")


def _of_pair(pair: PairFile, folder: Path, target: TargetInfo) -> Resolved:
    if pair.draft == "lookup":
        alone = LookupDraft() if pair.draft_length is not None else None
        return Resolved(alone, pair.draft_length)
    source, loader = folder, FOLDER_DRAFTS[0]
    if pair.folder is not None:
        source, loader = draft_folder(pair.folder)
    _check_kind(pair, loader)
    if pair.convention is not None:
        usual = usual_convention(target.model)
        convention = convention_of(pair.convention, str(pair.file), usual)
        target = replace(target, convention=convention)
    try:
        loaded = _said(loader.load(source, target))
        return replace(loaded, length=pair.draft_length)
    except ConventionError as error:
        why = f"there is no other draft that can be used. {error}"
        return _lookup(why, pair.draft_length)


def _check_kind(pair: PairFile, loader: type[FolderDraft]) -> None:
    if pair.kind not in (None, loader.kind):
        raise ModelFolderError(
            f"{str(pair.file)!r} has kind = {pair.kind!r}, but {pair.draft!r} is of "
            f"kind {loader.kind!r}. Correct kind, or leave it out."
        )
    if pair.convention is not None and loader is not MtpDraft:
        raise ModelFolderError(
            f"{str(pair.file)!r} has a convention, but {pair.draft!r} is of kind "
            f"{loader.kind!r}. Leave the convention out: it is for MTP heads."
        )


def _lookup(why: str, length: int | None = None) -> Resolved:
    said = f"draft='auto' takes a lookup: {why}"
    notice(said)
    return Resolved(None if length is None else LookupDraft(), length, (said,))
