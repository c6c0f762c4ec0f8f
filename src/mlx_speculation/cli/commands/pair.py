"""`pair`: lists the drafts that a target's folder offers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.load_pair import begin
from mlx_speculation.cli.options import DRAFT, Json, ModelOptions
from mlx_speculation.cli.run_app import FAILED
from mlx_speculation.errors import SpeculationError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_speculation.engine.drafters.resolve import Resolved

Resolve = Callable[[str], "Resolved"]


@dataclass(frozen=True, slots=True)
class Offered:
    """One possible draft of a target."""

    draft: str  # the value of --draft, or "speculation.json"
    usable: bool
    detail: str  # a description, or the reason why it is not usable


def pair(
    target: ModelOptions,
    draft: str | None = option(
        None,
        "Also report whether this folder can draft for the target.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    ),
    json: Json = False,
) -> None:
    """Show which drafts a target's folder offers, and which one 'auto' takes.

    The target is loaded, and a head in its folder is tried, as with `--draft auto`.
    """
    screen = Screen(json=json)
    here = begin(target.blas, screen)
    from mlx_speculation.models import check_target, load, model_folder

    check_target(target.model)
    folder = model_folder(target.model)
    trusted = target.trust_remote_code
    with screen.progress(f"loading {folder.name}"):
        model, tokenizer = load(
            folder, adapter_path=target.adapter_path, trust_remote_code=trusted
        )
    resolve = partial(_resolved, folder, model, tokenizer, trusted)
    offers = [
        _offered("speculation.json", lambda: _file(folder)),
        _offered("mtp", lambda: _head(folder, model)),
        _offered("lookup", lambda: "what followed the same tokens before"),
    ]
    if draft is not None:
        offers.append(_offered(draft, lambda: _folder(draft, resolve)))
    with screen.progress("trying what auto takes"):
        auto = _offered("auto", lambda: _auto(folder, resolve))
    title = escape(target.model)
    table = Table("draft", "usable", "what it is, or why not", title=title)
    for offer in [*offers, auto]:
        usable = "yes" if offer.usable else "no"
        table.add_row(escape(offer.draft), usable, escape(offer.detail))
    screen.table(table)
    screen.object(
        command="pair",
        model=target.model,
        folder=folder,
        offers=offers,
        auto=auto,
        **here,
    )
    if not offers[-1].usable:
        raise typer.Exit(FAILED)


def _offered(draft: str, describe: Callable[[], str]) -> Offered:
    """Return a draft with its description, or with the error of `describe`."""
    try:
        return Offered(draft, True, describe())
    except SpeculationError as error:
        return Offered(draft, False, str(error))


def _file(folder: Path) -> str:
    from mlx_speculation.engine.drafters.registry import FOLDER_DRAFTS
    from mlx_speculation.models.checkpoints import read_pair

    result = read_pair(folder, [draft.kind for draft in FOLDER_DRAFTS])
    if result is None:
        raise SpeculationError("there is none")
    more = {
        "kind": result.kind,
        "convention": None if result.convention is None else dict(result.convention),
        "draft_length": result.draft_length,
    }
    shown = [f", {key} {value}" for key, value in more.items() if value is not None]
    return f"names {result.draft!r}{''.join(shown)}"


def _head(folder: Path, target: "nn.Module") -> str:
    """Describe the MTP head of a folder, without trying it."""
    from mlx_speculation.models.mtp import find_mtp_head

    result = find_mtp_head(folder, target)
    files = result.files
    where = files.source if files.in_shards else f"the sidecar {files.source}"
    return (
        f"a head of the {result.family.name} family in {where}: {len(files.tensors)} "
        f"tensors, {files.layers} layer{'s' if files.layers > 1 else ''}"
    )


def _folder(draft: str, resolve: Resolve) -> str:
    result = resolve(draft)
    kind = None if result.draft is None else result.draft.kind
    return ". ".join(
        [f"of kind {kind!r}; shares the target's token ids", *result.notices]
    )


def _resolved(
    folder: Path, target: "nn.Module", tokenizer: Any, trusted: bool, draft: str
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


def _auto(folder: Path, resolve: Resolve) -> str:
    """Describe the choice of --draft auto, and the reason."""
    from mlx_speculation.engine.drafters.draft import members_of

    choice = resolve("auto")
    members = members_of(choice.draft)
    guessed = " ".join(each.notice for each in members if each.notice)
    if choice.notices and not guessed:
        return " ".join(choice.notices)
    if (folder / "speculation.json").exists():
        why = "speculation.json names it"
    elif all(each.free for each in members):
        why = "the folder offers nothing else"
    else:
        why = "the head in the folder agrees with the target"
    length = "" if choice.length is None else f", {choice.length} tokens a round"
    detail = f"takes {' and '.join(each.kind for each in members)}{length}: {why}"
    return f"{detail}. {guessed}" if guessed else detail
