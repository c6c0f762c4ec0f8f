"""`pair`: lists the drafts that a target's folder offers, and the choice of `auto`."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.load_pair import begin
from mlx_speculation.cli.options import (
    DRAFT,
    AdapterPath,
    Blas,
    Json,
    Model,
    TrustRemoteCode,
)
from mlx_speculation.environment import versions
from mlx_speculation.errors import SpeculationError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_speculation.engine.drafters.resolve import Resolved


@dataclass(frozen=True, slots=True)
class Offered:
    """One possible draft of a target."""

    draft: str  # the value of --draft, or "speculation.json"
    usable: bool
    detail: str  # a description, or the reason why it is not usable


def pair(
    model: Model,
    draft: str | None = option(
        None,
        "Also report whether this folder can draft for the target.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    ),
    adapter_path: AdapterPath = None,
    trust_remote_code: TrustRemoteCode = False,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Show which drafts a target's folder offers, and which one 'auto' takes.

    The target is loaded, and a head in its folder tried, as `--draft auto` does.
    """
    screen = Screen(json=json)
    begin(blas, screen)
    from mlx_speculation.models import check_target, load, model_folder

    check_target(model)
    folder = model_folder(model)
    with screen.busy(f"loading {folder.name}"):
        target, tokenizer = load(
            folder, adapter_path=adapter_path, trust_remote_code=trust_remote_code
        )
    offers = [_file(folder), _head(folder, target), _LOOKUP]
    if draft is not None:
        offers.append(_folder(draft, folder, target, tokenizer, trust_remote_code))
    with screen.busy("trying what auto takes"):
        auto = _auto(folder, target, tokenizer)
    table = Table("draft", "usable", "what it is, or why not", title=escape(str(model)))
    for offer in [*offers, auto]:
        usable = "yes" if offer.usable else "no"
        table.add_row(escape(offer.draft), usable, escape(offer.detail))
    screen.table(table)
    screen.object(
        command="pair",
        model=model,
        folder=folder,
        offers=offers,
        auto=auto,
        versions=versions(),
    )
    if not offers[-1].usable and draft is not None:
        raise typer.Exit(1)


_KINDS = {
    "lookup": "a lookup",
    "model": "a draft model",
    "mtp": "an MTP head",
    "eagle": "an EAGLE-3 head",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash drafter",
    "dflash2": "a DFlash2 drafter",
    "dspark": "a DSpark drafter",
    "assistant": "a Gemma 4 assistant",
}
_LOOKUP = Offered(
    "lookup", True, "what followed the same tokens before; for every target"
)


def _file(folder: Path) -> Offered:
    """Return the draft that speculation.json names."""
    from mlx_speculation.engine.drafters.registry import FOLDER_DRAFTS
    from mlx_speculation.models.checkpoints import read_pair

    name = "speculation.json"
    try:
        result = read_pair(folder, [draft.kind for draft in FOLDER_DRAFTS])
    except SpeculationError as error:
        return Offered(name, False, str(error))
    if result is None:
        return Offered(name, False, "there is none")
    more = {
        "kind": result.kind,
        "convention": None if result.convention is None else dict(result.convention),
        "draft_length": result.draft_length,
    }
    said = "".join(
        f", {key} {value}" for key, value in more.items() if value is not None
    )
    return Offered(name, True, f"names {result.draft!r}{said}")


def _head(folder: Path, target: "nn.Module") -> Offered:
    """Return the MTP head of a folder and its files, without trying it."""
    from mlx_speculation.models.mtp import find_mtp_head

    try:
        result = find_mtp_head(folder, target)
    except SpeculationError as error:
        return Offered("mtp", False, str(error))
    files = result.files
    where = files.source if files.in_shards else f"the sidecar {files.source}"
    detail = (
        f"a head of the {result.family.name} family in {where}: {len(files.tensors)} "
        f"tensors, {files.layers} layer{'s' if files.layers > 1 else ''}"
    )
    return Offered("mtp", True, detail)


def _folder(
    draft: str, folder: Path, target: "nn.Module", tokenizer: Any, trusted: bool
) -> Offered:
    """Return whether the draft of --draft can draft for the target."""
    try:
        result = _resolved(draft, folder, target, tokenizer, trusted)
    except SpeculationError as error:
        return Offered(draft, False, str(error))
    kind = None if result.draft is None else result.draft.kind
    said = [f"of kind {kind!r}, with the target's token ids", *result.notices]
    return Offered(draft, True, ". ".join(said))


def _resolved(
    draft: str, folder: Path, target: "nn.Module", tokenizer: Any, trusted: bool = False
) -> "Resolved":
    """Find, load and check a draft for the target."""
    from mlx_speculation.engine.drafters.draft import TargetInfo
    from mlx_speculation.engine.drafters.resolve import find_draft, resolve
    from mlx_speculation.models import TokenIds, logit_width, wrapped

    named = find_draft(draft, target=folder, trust_remote_code=trusted)
    highest = min(TokenIds.of(tokenizer).width, logit_width(target)) - 1
    info = TargetInfo(target, wrapped(tokenizer), folder, highest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows the notices
        return resolve(named, info)


def _auto(folder: Path, target: "nn.Module", tokenizer: Any) -> Offered:
    """Return the choice of --draft auto, and the reason."""
    from mlx_speculation.engine.drafters.draft import members_of

    try:
        choice = _resolved("auto", folder, target, tokenizer)
    except SpeculationError as error:
        return Offered("auto", False, str(error))
    members = members_of(choice.draft)
    taken = " and ".join(_named(each) for each in members)
    length = "" if choice.length is None else f", {choice.length} tokens a round"
    guessed = " ".join(each.notice for each in members if each.notice)
    if choice.notices and not guessed:
        return Offered("auto", True, " ".join(choice.notices))
    if (folder / "speculation.json").exists():
        why = "speculation.json names it"
    elif all(each.free for each in members):
        why = "the folder offers nothing else"
    else:
        why = "the head in the folder agrees with the target"
    detail = f"takes {taken}{length}: {why}"
    return Offered("auto", True, f"{detail}. {guessed}" if guessed else detail)


def _named(draft: Any) -> str:
    """Return the name of a draft's kind."""
    return _KINDS.get(draft.kind, f"a {type(draft).__name__}")
