"""The result of a training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.training.output.speeds import Speeds


@dataclass(slots=True)
class TrainingResult:
    """Result of a training.

    Attributes:
        folder: the draft's folder.
        ended: "steps", "stale", "time", "interrupt", or "data" (with `data_only`).
        record: the content of training.json; after "data" only its entry "data".
        speeds: measured speeds; None: they were not measured.
        pairing: a line that says how speculation.json was changed, or why it was not.
    """

    folder: Path
    ended: str
    record: dict[str, Any]
    speeds: Speeds | None = None
    pairing: str = ""
