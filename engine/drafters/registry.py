"""The sources that are loaded from a folder: one table.

A folder says by its config.json what it is. A new kind is one line in `SOURCES`, before
`ModelSource`, which fits what nobody else claims.
"""

from pathlib import Path
from typing import Any

from mlx_speculation.engine.drafters.dflash import DFlashDraft
from mlx_speculation.engine.drafters.draft_model import ModelSource
from mlx_speculation.engine.drafters.eagle import EagleDraft
from mlx_speculation.engine.drafters.gemma_assistant import AssistantDraft
from mlx_speculation.engine.drafters.mtp import MtpDraft
from mlx_speculation.engine.drafters.source import FolderSource
from mlx_speculation.models import (
    check_model_folder,
    is_there,
    model_folder,
    read_config,
)

SOURCES: tuple[type[FolderSource], ...] = (
    MtpDraft,
    DFlashDraft,
    EagleDraft,
    AssistantDraft,
    ModelSource,
)


def source_of_config(config: dict[str, Any]) -> type[FolderSource]:
    """Return what loads a folder with this config.json."""
    return next(source for source in SOURCES if source.fits(config))


def draft_folder(path_or_repo: str | Path) -> tuple[Path, type[FolderSource]]:
    """Return the folder of a draft, fetched if a repository is named, and its source.

    Raises:
        ModelFolderError: there is no such folder, or it is none of a draft.
    """
    folder = Path(path_or_repo).expanduser()
    if not is_there(folder / "config.json"):
        check_model_folder(path_or_repo, "mtp", "lookup", "auto")
        folder = model_folder(path_or_repo)
    source = source_of_config(read_config(folder))
    if source is ModelSource:
        check_model_folder(folder)
    return folder, source
