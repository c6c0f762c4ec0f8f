"""Measured costs and acceptance, kept from one process to the next.

One file for each machine, mlx version, target and draft; see `json_files` for
where. What is in it can change how fast a text comes, never the text.
"""

import hashlib
import json
import math
import os
import platform
import warnings
from dataclasses import astuple, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.blas import blas_in_use
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.calibration import PartsTable
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.environment import cache_folder
from mlx_speculation.errors import CostFileWarning
from mlx_speculation.json_files import load_json, write_json

_VERSION = 4
# A saved rate is a first guess, and counts for so many rounds.
SAVED_WEIGHT = 8.0
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
    """What is known of the rounds of one target with one draft."""

    # Seconds, by context and draft length; and which drafts were accepted lately.
    costs: RoundCosts = field(default_factory=RoundCosts)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    path: Path | None = None  # the file; None keeps nothing
    key: dict[str, Any] | None = None  # what the file is for
    _saved: str = ""  # what in the file would be new, see `save_if_new`
    _saved_rates: list[float] = field(default_factory=list)
    # Where the time of calibrated rounds went
    parts: PartsTable = field(default_factory=dict)

    @classmethod
    def read(cls, key: dict[str, Any] | None) -> "Known":
        """Return what is known under a key; nothing is kept under None."""
        folder = cache_folder()
        if key is None or folder is None:
            return cls()
        key = {"machine": machine(), **key}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = folder / "costs" / f"{digest[:32]}.json"
        known = cls(path=path, key=key)
        if not path.exists():
            return known
        try:
            known.costs, rates, known.parts = _checked(load_json(path), key)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"{path} cannot be used ({error}). What rounds cost is measured again.",
                CostFileWarning,
                stacklevel=2,
            )
            return known
        known.rates = AcceptanceRates(rates, SAVED_WEIGHT)
        known._saved, known._saved_rates = known._names(), rates
        return known

    def keep(self, rates: AcceptanceRates) -> None:
        """Learn from a stream that has ended; write the file if something changed."""
        self.rates = rates
        self.save_if_new()

    def save(self) -> None:
        """Write the file, all or nothing."""
        if self.path is None:
            return
        rates = self.rates.rates(self.rates.known)
        content = {
            "version": _VERSION,
            "key": self.key,
            "seconds": self.costs.table(),
            "cold": self.costs.cold,
            "rates": [round(rate, 4) for rate in rates],
            "parts": {
                bucket: {length: astuple(one) for length, one in own.items()}
                for bucket, own in self.parts.items()
            },
        }
        try:
            write_json(self.path, content)
        except OSError as error:
            warnings.warn(
                f"{self.path} cannot be written ({error}). What rounds cost is "
                "measured again by the next process. MLX_SPECULATION_CACHE names "
                "another folder.",
                CostFileWarning,
                stacklevel=2,
            )
            self.path = None
            return
        self._saved, self._saved_rates = self._names(), rates

    def save_if_new(self) -> None:
        """Write the file when a length or context was measured that is not in it.

        Likewise when the rates are others than those in it.
        """
        if self.path is None:
            return
        rates = self.rates.rates(len(self._saved_rates))
        pairs = zip(rates, self._saved_rates, strict=True)
        if self._names() != self._saved or any(abs(a - b) > NEWS for a, b in pairs):
            self.save()

    def _names(self) -> str:
        return repr([(b, sorted(costs)) for b, costs in self.costs.table().items()])


def _checked(content: Any, key: Any) -> tuple[RoundCosts, list[float], PartsTable]:
    """Return costs, rates and parts from a file, every field checked."""
    if content["version"] != _VERSION or content["key"] != key:
        raise ValueError("it is of another version, machine or model")
    costs = {
        int(bucket): {int(length): float(seconds) for length, seconds in table.items()}
        for bucket, table in content["seconds"].items()
    }
    for bucket, table in costs.items():
        for length, seconds in table.items():
            if bucket < 0 or length < 0 or not 0 < seconds < math.inf:
                raise ValueError(f"length {length} costs {seconds} seconds")
        if table and 0 not in table:
            raise ValueError("the cost of a plain step is not in it")
    cold = float(content["cold"])
    if not 0 <= cold < math.inf:
        raise ValueError(f"a cold step costs {cold} seconds")
    rates = [float(rate) for rate in content["rates"]]
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"the rates are {rates}")
    parts: PartsTable = {}
    for bucket, own in content["parts"].items():
        for length, given in own.items():
            draft, verify, sampler, host = map(float, given)  # four, or an error
            one = RoundSeconds(draft, verify, sampler, host)
            if not all(0 <= part < math.inf for part in astuple(one)):
                raise ValueError(f"the parts of length {length} are {given}")
            parts.setdefault(int(bucket), {})[int(length)] = one
    return RoundCosts(costs, cold=cold), rates, parts
