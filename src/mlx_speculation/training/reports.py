"""The result of a training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.training.output.speeds import Speeds


@dataclass(slots=True)
class TrainingResult:
    """Result of a training.

    Attributes:
        folder: the draft's.
        ended: "steps", "stale", "time", "interrupt", or "data": no step was wanted.
        record: what training.json holds; of "data" what is said of them alone.
        speeds: measured here; None: they were not.
        pairing: what was done about speculation.json.
    """

    folder: Path
    ended: str
    record: dict[str, Any]
    speeds: Speeds | None = None
    pairing: str = ""
