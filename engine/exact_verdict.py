"""Verdict on exact mode: do the bits of a row depend on its place in the forward?

`mlx-speculation check --exact N` writes the verdict beside the costs of rounds, to one
file for each machine, mlx version, target and N. A generator in exact mode refuses a
model whose rows have differed.
"""

from dataclasses import asdict, dataclass

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.draft_length.costs import machine
from mlx_speculation.engine.drafters.draft import shape_of
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.measured_file import MeasuredFile

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExactVerdict:
    """Verdict on one target."""

    rows: int  # how many rows of logits were compared
    differing: int  # rows that differ in a bit
    largest: float  # the largest difference of a logit
    context: int  # the longest context that was tried, in positions
    plain_seconds: float  # time of a step without exact mode
    exact_seconds: float  # time of a step in exact mode

    @property
    def same(self) -> bool:
        """Return whether no row differs."""
        return self.differing == 0

    def __str__(self) -> str:
        result = f"{self.differing} of {self.rows} rows differ in a bit"
        if not self.same:
            result += f", the largest difference of a logit is {self.largest:.3g}"
        return result


def save_verdict(model: nn.Module, shape: FixedShape, result: ExactVerdict) -> None:
    """Store the verdict on a model for later processes on this machine."""
    _file(model, shape).write({"found": asdict(result)})


def read_verdict(model: nn.Module, shape: FixedShape) -> ExactVerdict | None:
    """Return the stored verdict on a model; None: there is no readable one."""
    return _file(model, shape).read(lambda fields: ExactVerdict(**fields["found"]))


def check_verdict(model: nn.Module, shape: FixedShape) -> None:
    """Raise InvalidRequestError if rows of a model have differed on this machine."""
    result = read_verdict(model, shape)
    if result is not None and not result.same:
        raise InvalidRequestError(
            f"exact={shape.rows} does not hold for this model on this machine: "
            f"mlx-speculation check --exact {shape.rows} has found that {result}. "
            "Leave exact out, or check another number of rows."
        )


def _file(model: nn.Module, shape: FixedShape) -> MeasuredFile:
    key = {
        "machine": machine(),
        "target": shape_of(model),
        "rows": shape.rows,
        "step": shape.step,
    }
    lost = "The verdict is lost until mlx-speculation check --exact runs again."
    return MeasuredFile("exact", _VERSION, key, lost)
