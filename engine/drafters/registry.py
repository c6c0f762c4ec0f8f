"""The sources that are loaded from a folder: one table.

A folder says by its config.json what it is. A new kind is one line in `SOURCES`, before
`ModelSource`, which fits what nobody else claims.
"""

from pathlib import Path
from typing import Any, Protocol

from mlx_speculation.engine.drafters.dflash import DFlashDraft
from mlx_speculation.engine.drafters.draft_model import ModelSource
from mlx_speculation.engine.drafters.eagle import EagleDraft
from mlx_speculation.engine.drafters.gemma_assistant import AssistantDraft
from mlx_speculation.engine.drafters.mtp import MtpDraft
from mlx_speculation.engine.drafters.source import DraftSource, TargetInfo
from mlx_speculation.models import (
    MtpConvention,
    check_model_folder,
    is_there,
    model_folder,
    read_config,
)


class LoadedSource(Protocol):
    """A class of sources that are loaded from a folder.

    Attributes:
        kind: what speculation.json calls it.
    """

    kind: str

    def fits(self, config: dict[str, Any], /) -> bool:
        """Return whether a folder with this config.json is one."""
        ...

    def load(
        self,
        folder: Path,
        target: TargetInfo,
        convention: MtpConvention | None = None,
        trust_remote_code: bool = False,
    ) -> DraftSource:
        """Load it.

        Args:
            folder: the draft's; for an MTP head perhaps the target's.
            target: what it is to draft for.
            convention: what an MTP head was trained with, if somebody has named it.
            trust_remote_code: whether code in the folder of a model may run.

        Raises:
            ModelFolderError: the folder holds none, or not all of one.
            SpeculationError: it does not fit the target.
        """
        ...


SOURCES: tuple[LoadedSource, ...] = (
    MtpDraft,
    DFlashDraft,
    EagleDraft,
    AssistantDraft,
    ModelSource,
)


def source_of_config(config: dict[str, Any]) -> LoadedSource:
    """Return what loads a folder with this config.json."""
    return next(source for source in SOURCES if source.fits(config))


def draft_folder(path_or_repo: str | Path) -> tuple[Path, LoadedSource]:
    """Return the folder of a draft, fetched if a repository is named, and its source.

    Raises:
        ModelFolderError: there is no such folder, or it is none of a draft.
    """
    folder = Path(path_or_repo).expanduser()
    if not is_there(folder / "config.json"):
        folder = model_folder(path_or_repo)
    source = source_of_config(read_config(folder))
    if source is ModelSource:
        check_model_folder(folder)
    return folder, source
