"""The result of a training, and the callbacks that report its progress."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.training.output.speeds import Speeds
from mlx_speculation.training.state import Progress


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


@dataclass(slots=True)
class Reports:
    """Progress callbacks; by default they do nothing.

    Attributes:
        say: called with a line.
        data: called with how many dialogues there are, of how many.
        step: called with the progress and the newest mean loss.
        evaluated: called with the progress after each evaluation.
        phase: called with the name of what begins.
    """

    phase: Callable[[str], None] = lambda name: None
    say: Callable[[str], None] = lambda line: None
    data: Callable[[int, int], None] = lambda done, whole: None
    step: Callable[[Progress, float], None] = lambda progress, loss: None
    evaluated: Callable[[Progress], None] = lambda progress: None
