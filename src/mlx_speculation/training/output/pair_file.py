"""Names a draft in the target's speculation.json, so that `draft="auto"` takes it."""

from pathlib import Path

from mlx_speculation.json_files import write_json
from mlx_speculation.models.checkpoints.speculation_json import NAME


def pair_with(target: Path, draft: Path, kind: str) -> str:
    """Write speculation.json, unless there is one; return what was done, in a line.

    Args:
        target: the target's folder.
        draft: the draft's; only one inside of the target's, or beside it, can be named.
        kind: "eagle", "mtp" or "model".
    """
    file, target, draft = target / NAME, target.resolve(), draft.resolve()
    if draft.is_relative_to(target):
        name = draft.relative_to(target).as_posix()
    elif draft.is_relative_to(target.parent):
        name = f"../{draft.relative_to(target.parent).as_posix()}"
    else:
        return (
            f"draft='auto' finds drafts in {str(target)!r} or beside it: move the "
            f"folder there, and write {NAME}, or pass draft={str(draft)!r}."
        )
    if file.exists():
        return f"{str(file)!r} is there already, and was left as it is."
    try:
        write_json(file, {"draft": name, "kind": kind})
    except OSError as error:
        return f"{str(file)!r} could not be written: {error.strerror}."
    return f"{str(file)!r} names it: draft='auto' takes it from now on."
