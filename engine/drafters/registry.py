"""The table of drafts that are loaded from a folder.

The config.json of a folder tells the kind of draft. If the tensor names in the folder
belong to another kind, they decide. A new kind needs one line in `FOLDER_DRAFTS`,
before `ModelDraft`, which fits every folder.
"""

from pathlib import Path
from typing import Any

from mlx_speculation.engine.drafters.block_drafters import (
    DFlash2Draft,
    DFlashDraft,
    DSparkDraft,
)
from mlx_speculation.engine.drafters.draft import FolderDraft
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.eagle import EagleDraft, PEagleDraft
from mlx_speculation.engine.drafters.gemma_assistant import AssistantDraft
from mlx_speculation.engine.drafters.mtp import MtpDraft
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import (
    check_model_folder,
    is_there,
    model_folder,
    read_config,
)
from mlx_speculation.models.checkpoints import kind_by_tensors, tensor_names
from mlx_speculation.models.dspark import gguf_file

FOLDER_DRAFTS: tuple[type[FolderDraft], ...] = (
    MtpDraft,
    DSparkDraft,
    DFlash2Draft,
    DFlashDraft,
    PEagleDraft,
    EagleDraft,
    AssistantDraft,
    ModelDraft,
)


def draft_of_config(config: dict[str, Any]) -> type[FolderDraft]:
    """Return the class that loads a folder with this config.json."""
    return next(draft for draft in FOLDER_DRAFTS if draft.fits(config))


def draft_of_folder(folder: Path) -> type[FolderDraft]:
    """Return the class that loads a folder, by its config.json and its tensor names.

    Raises:
        ModelFolderError: config.json is missing, or not a JSON object.
    """
    claimed = draft_of_config(read_config(folder))
    kind = kind_by_tensors(tensor_names(folder), claimed.kind)
    return next(draft for draft in FOLDER_DRAFTS if draft.kind == kind)


def draft_folder(path_or_repo: str | Path) -> tuple[Path, type[FolderDraft]]:
    """Return a draft's folder and class; download the folder if a repository is named.

    Raises:
        ModelFolderError: the folder does not exist, or holds no draft.
    """
    folder = Path(path_or_repo).expanduser()
    if gguf_file(folder) is not None:
        return folder, DSparkDraft
    if not is_there(folder / "config.json"):
        if str(path_or_repo).lower() in ("none", "off", "no"):
            raise ModelFolderError(
                f"There is no draft {str(path_or_repo)!r}. Leave the draft out for "
                "plain decoding."
            )
        check_model_folder(path_or_repo, "mtp", "lookup", "auto")
        folder = model_folder(path_or_repo)
    draft = draft_of_folder(folder)
    if draft is ModelDraft:
        check_model_folder(folder)
    return folder, draft
