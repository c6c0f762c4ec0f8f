"""speculation.json: a file in a target's folder that names the target's draft.

    {"draft": "../small"}
    {"draft": "mtp", "convention": {"hidden": "before_norm"}, "draft_length": 2}

    draft         "mtp", "lookup", or a folder inside the target's or beside it
    kind          the kind of draft in the folder; by default the draft's config.json
                  tells it
    convention    for an MTP head: some of hidden, recycled, order and norms
    draft_length  tokens to draft in a round, unless the caller passes a number

Other keys, repeated keys, and paths or links that lead elsewhere are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.convention import convention_of
from mlx_speculation.models.config_json import read_json

NAME = "speculation.json"
FIELDS = ("draft", "kind", "convention", "draft_length")
NAMED = ("mtp", "lookup")
LARGEST = 1 << 16  # bytes of the file
_ADVICE = "Correct it, or pass another draft= than 'auto'."


@dataclass(frozen=True, slots=True)
class PairFile:
    """Contents of speculation.json; None: not stated."""

    file: Path
    draft: str  # "mtp", "lookup", or the draft's folder as the file has it
    folder: Path | None = None  # the draft's folder; None: `draft` is "mtp" or "lookup"
    kind: str | None = None
    convention: Mapping[str, Any] | None = None  # its fields, checked
    draft_length: int | None = None


def read_pair(folder: Path, kinds: Collection[str]) -> PairFile | None:
    """Return the content of speculation.json in a target's folder; None: no such file.

    Raises:
        ModelFolderError: the file cannot be read, or has an unknown key or value.
    """
    file = folder / NAME
    if not file.exists() and not file.is_symlink():
        return None
    fields = read_json(file, most=LARGEST, unique_keys=True, advice=_ADVICE)
    unknown = sorted(fields.keys() - set(FIELDS))
    if unknown:
        raise _wrong(
            file, f"the field {unknown[0]!r}", f"only {', '.join(FIELDS)} are known"
        )
    draft = fields.get("draft")
    if not isinstance(draft, str) or not draft:
        raise _wrong(
            file,
            f"draft = {draft!r}",
            '"mtp", "lookup" or the path of a folder is needed',
        )
    kind, length = fields.get("kind"), fields.get("draft_length")
    allowed = {draft} if draft in NAMED else set(kinds) - {"lookup"}
    if kind is not None and (not isinstance(kind, str) or kind not in allowed):
        raise _wrong(
            file, f"kind = {kind!r}", f"one of {', '.join(sorted(allowed))} is needed"
        )
    if length is not None and (type(length) is not int or length < 0):
        raise _wrong(
            file, f"draft_length = {length!r}", "a whole number of at least 0 is needed"
        )
    convention = fields.get("convention")
    if convention is not None:
        convention_of(convention, str(file))
        if draft == "lookup":
            both = 'a convention and draft = "lookup"'
            raise _wrong(file, both, "one of them at most is allowed")
    return PairFile(
        file,
        draft,
        None if draft in NAMED else _folder(file, draft),
        kind,
        convention,
        length,
    )


def _folder(file: Path, draft: str) -> Path:
    target = file.parent.resolve()
    near = "a folder inside the target's, or next to it, is needed"
    if PurePosixPath(draft).is_absolute():
        raise _wrong(
            file,
            f"draft = {draft!r}",
            'a folder inside the target\'s, such as "draft", or next to it, such as '
            '"../draft", is needed',
        )
    try:
        result = (target / draft).resolve()
        is_folder = result.is_dir()
    except (OSError, ValueError) as error:  # the name is too long or invalid
        raise _wrong(
            file, f"draft = {draft[:60]!r}, which is not a valid path", near
        ) from error
    if result == target or target.parent not in result.parents:
        raise _wrong(file, f"draft = {draft!r}, which leads to {str(result)!r}", near)
    if not is_folder:
        raise _wrong(file, f"draft = {draft!r}, and there is no such folder", near)
    return result


def _wrong(file: Path, result: str, wanted: str) -> ModelFolderError:
    return ModelFolderError(f"{str(file)!r} has {result}, and {wanted}. {_ADVICE}")
