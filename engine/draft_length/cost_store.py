"""Storage of calibrated costs, for later processes.

Each combination of machine, mlx version, target and draft has a file. What streams
learn is not stored: storing it would save only about 1 % of the time of the first 200
tokens, and measurements of a busy machine would be used long afterwards.
"""

import math
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_speculation.blas import blas_in_use
from mlx_speculation.engine.draft_length.calibration import PartsTable
from mlx_speculation.engine.draft_length.costs import CostTable, RoundCosts
from mlx_speculation.engine.lookup.survival import AcceptanceRates
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.measured_file import MeasuredFile
from mlx_speculation.models import PART_SIZES

_VERSION = 8


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


@dataclass(slots=True, eq=False)
class Source:
    """A source of drafts for one target: costs of its rounds, and its acceptance."""

    costs: RoundCosts = field(default_factory=RoundCosts)  # which streams measure
    # Acceptance by position in the draft, which streams learn
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    free: bool = False  # its proposals cost nothing, and precede the rule's choice
    name: str = "draft"  # the kind of its drafts
    measured: PartsTable = field(default_factory=dict)  # times of calibrated rounds
    # How many layers a round's forward submits at once; None: not measured
    part: int | None = None
    # Stores the calibrated times; None: they are not stored
    file: MeasuredFile | None = None

    @classmethod
    def read(
        cls, key: dict[str, Any] | None, *, free: bool = False, name: str = "draft"
    ) -> "Source":
        """Return a source with the costs stored under a key; None: no stored costs."""
        key = key and {"machine": machine(), **key}
        file = MeasuredFile(
            "costs", _VERSION, key, "The cost of rounds is measured again."
        )
        measured, part = file.read(_parsed) or ({}, None)
        costs = RoundCosts(kept=_totals(measured))
        return cls(costs, free=free, name=name, measured=measured, part=part, file=file)

    def take(self, measured: PartsTable) -> CostTable:
        """Learn from a calibration, and write the file; return all known costs."""
        self.costs.take(_totals(measured))
        self.measured |= measured
        if self.file is not None:
            self.file.write({"parts": self.measured, "part": self.part})
        return self.costs.table()


def _totals(measured: PartsTable) -> CostTable:
    """Return the seconds of whole rounds."""
    return {
        bucket: {length: one.total for length, one in each.items()}
        for bucket, each in measured.items()
    }


def _parsed(fields: Any) -> tuple[PartsTable, int | None]:
    """Return the times and the part of a file; raise ValueError if out of range."""
    measured = {
        int(bucket): {int(n): RoundSeconds._make(one) for n, one in each.items()}
        for bucket, each in fields["parts"].items()
    }
    rounds = [one for each in measured.values() for one in each.values()]
    if not all(0 <= part < math.inf for one in rounds for part in one):
        raise ValueError("the seconds of a part of a round are negative or infinite")
    if not all(one.total for one in rounds):
        raise ValueError("a round has a time of 0 seconds")
    if any(each and min(each) != 0 for each in measured.values()):
        raise ValueError("the cost of a plain step is missing")
    if fields["part"] not in (None, *PART_SIZES):
        raise ValueError(f"part is {fields['part']}, not one of {PART_SIZES}")
    return measured, fields["part"]
