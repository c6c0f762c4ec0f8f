"""Measured costs and acceptance, kept from one process to the next.

One file for each machine, mlx version, target and draft. What is in it can change how
fast a text comes, never the text.
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
# A rate that differs by more from the saved one is saved.
NEWS = 0.2


def machine() -> dict[str, Any]:
    """Return what decides how fast this process computes."""
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
    """What is known of the rounds of one target with one draft.

    Attributes:
        free: whether it proposes at no cost.
        name: its kind.
        part: layers of a part of a round's forward; None: not measured.
    """

    costs: RoundCosts = field(default_factory=RoundCosts)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    parts: PartsTable = field(default_factory=dict)  # of calibrated rounds
    free: bool = False
    name: str = "draft"
    part: int | None = None
    file: MeasuredFile | None = None
    _saved: list[float] = field(default_factory=list)  # the rates in the file

    @classmethod
    def read(
        cls, key: dict[str, Any] | None, *, free: bool = False, name: str = "draft"
    ) -> "Known":
        """Return what is known under a key; nothing is kept under None."""
        key = key and {"machine": machine(), **key}
        file = MeasuredFile(
            "costs", _VERSION, key, "What rounds cost is measured again."
        )
        known = file.read(_parsed) or cls()
        known.file, known.costs.news = file, False
        known.free, known.name = free, name
        known._saved = known.rates.rates(known.rates.known)
        return known

    def keep(self, rates: AcceptanceRates) -> None:
        """Learn from a stream that has ended; write the file if something changed."""
        self.rates = rates
        self.save_if_new()

    def take(self, measured: Calibration) -> CostTable:
        """Learn from a calibration, and write the file; return all that is known."""
        self.parts |= measured.parts
        self.costs.take(measured.costs.table())
        self.save()
        return self.costs.table()

    def save(self) -> None:
        """Write the file, all or nothing."""
        self.costs.news, self._saved = False, self.rates.rates(self.rates.known)
        parts = {
            bucket: {length: astuple(one) for length, one in own.items()}
            for bucket, own in self.parts.items()
        }
        rates = [round(rate, 4) for rate in self._saved]
        if self.file is not None:
            seconds = self.costs.table()
            self.file.write(
                {"seconds": seconds, "rates": rates, "parts": parts, "part": self.part}
            )

    def save_if_new(self) -> None:
        """Write the file when a length, a context or a rate is news to it."""
        pairs = zip(self.rates.rates(len(self._saved)), self._saved, strict=True)
        if self.costs.news or any(abs(now - saved) > NEWS for now, saved in pairs):
            self.save()


def _parsed(fields: Any) -> Known:
    """Return what the fields of a file say.

    Raises:
        ValueError: a number cannot be.
    """
    costs = {
        int(bucket): {int(length): seconds for length, seconds in own.items()}
        for bucket, own in fields["seconds"].items()
    }
    parts = {
        int(bucket): {
            int(length): RoundSeconds(draft, verify, sampler, host)
            for length, (draft, verify, sampler, host) in own.items()
        }
        for bucket, own in fields["parts"].items()
    }
    rates = list(fields["rates"])
    if not all(0 < one < math.inf for own in costs.values() for one in own.values()):
        raise ValueError("a round in it takes no time, or all")
    if not all(0 <= part < math.inf for own in parts.values() for part in _each(own)):
        raise ValueError("a part of a round in it takes less than no time, or all")
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"the rates are {rates}")
    if any(own and min(own) != 0 for own in costs.values()):
        raise ValueError("the cost of a plain step is not in it")
    if fields["part"] not in (None, *PART_SIZES):
        raise ValueError(f"a part has {fields['part']} layers")
    return Known(RoundCosts(costs), AcceptanceRates(rates), parts, part=fields["part"])


def _each(parts: dict[int, RoundSeconds]) -> list[float]:
    return [part for one in parts.values() for part in astuple(one)]
