"""Whether forwards of one shape keep their promise here, as it was measured.

`mlx-speculation check --exact` measures it, and leaves it in a file beside the costs of
rounds, one for each machine, mlx version, target and number of rows. A generator in
exact mode reads it: where rows were seen to differ it refuses to promise that they do
not. Nothing is measured here.
"""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.draft_length.cost_store import machine
from mlx_speculation.engine.drafters.source import shape_of
from mlx_speculation.environment import cache_folder
from mlx_speculation.errors import CostFileWarning, InvalidRequestError
from mlx_speculation.json_files import load_json, write_json

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExactVerdict:
    """What was found of one target."""

    rows: int  # that were compared
    differing: int  # of them, in a bit
    largest: float  # the largest difference of a logit
    context: int  # positions that were tried
    plain_seconds: float  # of a step that is not in exact mode
    exact_seconds: float  # of any step in exact mode, drafted or not

    @property
    def same(self) -> bool:
        """Whether no row differs."""
        return self.differing == 0

    def __str__(self) -> str:
        found = f"{self.differing} of {self.rows} rows differ in a bit"
        if not self.same:
            found += f", the largest difference of a logit is {self.largest:.3g}"
        return found


def save_verdict(model: nn.Module, shape: FixedShape, found: ExactVerdict) -> None:
    """Keep what was found of a model, for later processes on this machine."""
    path, key = _place(model, shape)
    if path is None:
        return
    try:
        write_json(path, {"version": _VERSION, "key": key, "found": asdict(found)})
    except OSError as error:
        warnings.warn(
            f"{path} cannot be written ({error}), and what was found is not kept. "
            "MLX_SPECULATION_CACHE names another folder.",
            CostFileWarning,
            stacklevel=2,
        )


def read_verdict(model: nn.Module, shape: FixedShape) -> ExactVerdict | None:
    """Return what was found of a model here; None: nothing, or it cannot be read."""
    path, key = _place(model, shape)
    if path is None or not path.exists():
        return None
    try:
        content = load_json(path)
        if content["version"] != _VERSION or content["key"] != key:
            return None
        return ExactVerdict(**content["found"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"{path} cannot be used ({error}). Run mlx-speculation check again.",
            CostFileWarning,
            stacklevel=2,
        )
        return None


def check_verdict(model: nn.Module, shape: FixedShape) -> None:
    """Refuse a model whose rows were seen to differ here.

    Raises:
        InvalidRequestError: they were.
    """
    found = read_verdict(model, shape)
    if found is not None and not found.same:
        raise InvalidRequestError(
            f"exact={shape.rows} was passed, and mlx-speculation check --exact "
            f"{shape.rows} has found of this model, on this machine: {found}. Leave "
            "exact out, or check another number of rows."
        )


def _place(model: nn.Module, shape: FixedShape) -> tuple[Path | None, dict[str, Any]]:
    """Return where it is kept, None: nowhere, and what it is for."""
    key = {
        "machine": machine(),
        "target": shape_of(model),
        "rows": shape.rows,
        "step": shape.step,
    }
    folder = cache_folder()
    if folder is None:
        return None, key
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "exact" / f"{digest[:32]}.json", key
