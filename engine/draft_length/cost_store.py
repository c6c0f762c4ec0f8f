"""Storage of calibrated costs, for later processes.

Each machine, mlx version, target and draft has a file. It affects the speed of a text,
never the text. What streams learn is not stored: it would save about 1 % of the time of
the first 200 tokens, and measurements of a busy hour would be used long after it.
"""

import math
import os
import platform
from dataclasses import astuple, dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_speculation.blas import blas_in_use
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.calibration import Calibration, PartsTable
from mlx_speculation.engine.draft_length.costs import CostTable, RoundCosts
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.measured_file import MeasuredFile
from mlx_speculation.models import PART_SIZES

_VERSION = 7


def machine() -> dict[str, Any]:
    """Return the properties of this machine that its speed depends on."""
    return {
        "mlx": version("mlx"),
        "device": str(mx.default_device()),
        "name": mx.device_info().get("device_name", ""),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "blas": blas_in_use() if mx.default_device() == mx.cpu else "",
    }


@dataclass(slots=True)
class Known:
    """Costs and acceptance of rounds of one target with one draft.

    Attributes:
        seconds: the seconds of calibrated rounds.
        parts: the same seconds by part of the round.
        free: whether the draft costs nothing.
        name: the kind of the draft.
        part: how many layers a round's forward submits at once; None: not measured.
    """

    costs: RoundCosts = field(default_factory=RoundCosts)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    seconds: CostTable = field(default_factory=dict)
    parts: PartsTable = field(default_factory=dict)
    free: bool = False
    name: str = "draft"
    part: int | None = None
    file: MeasuredFile | None = None

    @classmethod
    def read(
        cls, key: dict[str, Any] | None, *, free: bool = False, name: str = "draft"
    ) -> "Known":
        """Return the calibrated costs stored under a key; None: they are not stored."""
        key = key and {"machine": machine(), **key}
        file = MeasuredFile(
            "costs", _VERSION, key, "What rounds cost is measured again."
        )
        known = file.read(_parsed) or cls()
        known.file, known.free, known.name = file, free, name
        return known

    def take(self, measured: Calibration) -> CostTable:
        """Learn from a calibration, and write the file; return all known costs."""
        table = measured.costs.table()
        self.costs.take(table)
        self.seconds |= table
        self.parts |= measured.parts
        parts = {
            bucket: {length: astuple(one) for length, one in each.items()}
            for bucket, each in self.parts.items()
        }
        if self.file is not None:
            kept = {"seconds": self.seconds, "parts": parts, "part": self.part}
            self.file.write(kept)
        return self.costs.table()


def _parsed(fields: Any) -> Known:
    """Return the costs in the fields of a file.

    Raises:
        ValueError: a number is out of range.
    """
    costs = {
        int(bucket): {int(length): seconds for length, seconds in each.items()}
        for bucket, each in fields["seconds"].items()
    }
    parts = {
        int(bucket): {
            int(length): RoundSeconds(draft, verify, sampler, host)
            for length, (draft, verify, sampler, host) in each.items()
        }
        for bucket, each in fields["parts"].items()
    }
    if not all(0 < one < math.inf for each in costs.values() for one in each.values()):
        raise ValueError("the seconds of a round are 0 or less, or infinite")
    if not all(0 <= part < math.inf for each in parts.values() for part in _each(each)):
        raise ValueError("the seconds of a part of a round are negative or infinite")
    if any(each and min(each) != 0 for each in costs.values()):
        raise ValueError("the cost of a plain step is not in it")
    if fields["part"] not in (None, *PART_SIZES):
        raise ValueError(f"a part has {fields['part']} layers")
    kept = RoundCosts(kept=costs)
    return Known(kept, seconds=costs, parts=parts, part=fields["part"])


def _each(parts: dict[int, RoundSeconds]) -> list[float]:
    return [part for one in parts.values() for part in astuple(one)]
