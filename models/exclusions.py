"""Ways in which models can or cannot be fed, from the tables of `exclusions.toml`.

    together        can be fed in batches, in which shorter rows are padded on the left
    alone           cannot be fed in batches. A model in neither of these two tables
                    has not been tried, and its requests run alone too
    not_causal      a row depends on later tokens, so one forward cannot verify drafts
    depend_on_cuts  a row depends on where a prompt is cut into forwards, so a prompt
                    cannot be resumed from a prefix cache
    key_steps       was tested with the padded keys of `caches/types/padded_kv.py`

Every architecture of mlx-lm 0.32.2 was tried in batches
(tests/engine/batch/test_batch_census.py) and with drafts (tests/engine/test_census.py).
"""

import tomllib
from collections.abc import Collection
from pathlib import Path

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TOGETHER = frozenset[str](_TABLES["together"])
KEY_STEPS = frozenset[str](_TABLES["key_steps"])
ALONE: dict[str, str] = _TABLES["alone"]


def _by_module(table: str) -> dict[str, str]:
    return {f"mlx_lm.models.{name}": why for name, why in _TABLES[table].items()}


NOT_CAUSAL, DEPEND_ON_CUTS = _by_module("not_causal"), _by_module("depend_on_cuts")


def is_one_of(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether a model's class is in one of these modules of mlx_lm.models."""
    package, _, name = type(model).__module__.rpartition(".")
    return package == "mlx_lm.models" and name in names


def takes_key_steps(model: nn.Module) -> bool:
    """Return whether a model was tested with padded keys (`key_steps`)."""
    return is_one_of(model, KEY_STEPS)


def why_alone(model: nn.Module) -> str | None:
    """Return why a model cannot be fed several sequences at once; None: it can."""
    if is_one_of(model, TOGETHER):
        return None
    name = type(model).__module__.rpartition(".")[2]
    tried = is_one_of(model, ALONE)
    return f"{name}: {ALONE[name] if tried else 'it has not been tried in batches'}"


def check_resumable(model: nn.Module) -> None:
    """Raise `InvalidRequestError` for a model of `DEPEND_ON_CUTS` or `NOT_CAUSAL`."""
    check_causal(model, "prefix_cache")
    module = type(model).__module__
    if module in DEPEND_ON_CUTS:
        raise InvalidRequestError(
            f"A prefix_cache was passed, and {module} cannot use one: it "
            f"{DEPEND_ON_CUTS[module]}, so its text depends on where a prompt is cut. "
            "Leave prefix_cache out."
        )


def check_causal(model: nn.Module, passed: str = "draft") -> None:
    """Raise `InvalidRequestError` for a model of `NOT_CAUSAL`.

    The error names `passed`, the argument that needs a causal model.
    """
    module = type(model).__module__
    if module in NOT_CAUSAL:
        raise InvalidRequestError(
            f"A {passed} was passed, and {module} cannot use one: it "
            f"{NOT_CAUSAL[module]}, so a token changes the rows before it. "
            f"Leave {passed} out."
        )
