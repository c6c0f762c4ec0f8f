"""A prompt cache in mlx-lm's sense: the target's, and perhaps the draft's behind it.

make_prompt_cache(model)                               the target's
make_prompt_cache(model) + make_prompt_cache(draft)    both, as mlx-lm's speculation
                                                       takes them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import KVQuantization, check_supported, position
from mlx_speculation.engine.mlx_lm_compat.api import (
    check_quantizable,
    make_prompt_cache,
)
from mlx_speculation.errors import InvalidRequestError

KEPT_FIRST = 4  # positions that mlx-lm's caches of a limited size never drop


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of one text.

    Attributes:
        target: the target's; None: new ones.
        draft: the draft model's; None: new ones.
        passed: the caller's list; None: there is none.
    """

    target: list[Any] | None
    draft: list[Any] | None
    passed: list[Any] | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        drafts: Sequence[nn.Module],
        passed: Any,
        max_size: int | None,
    ) -> "Caches":
        """Sort the caller's caches, or make those of a limited size.

        Args:
            model: the target.
            drafts: the draft models; caches of one alone can be passed.
            passed: the caller's list, or None.
            max_size: of new caches; None: as the models make them.

        Raises:
            InvalidRequestError: the size is none, or the caches are no list.
        """
        if passed is None and max_size is None:
            return cls(None, None, None)
        if passed is None:
            size = _checked_size(max_size)
            return cls(
                make_prompt_cache(model, size),
                make_prompt_cache(drafts[0], size) if len(drafts) == 1 else None,
                None,
            )
        if not isinstance(passed, list):
            raise InvalidRequestError(
                f"prompt_cache is a {type(passed).__name__}, and the list that "
                "mlx_lm.models.cache.make_prompt_cache(model) returns is needed."
            )
        own = len(make_prompt_cache(model))
        if len(drafts) == 1 and len(passed) > own:
            check_supported(passed)  # no cache may stand in it twice
            return cls(passed[:own], passed[own:], passed)
        return cls(passed, None, passed)

    @property
    def held(self) -> int:
        """How many positions the target's caches hold."""
        return 0 if self.target is None else position(self.target) or 0

    def write_back(self) -> None:
        """Let the caller's list hold the caches that have replaced others."""
        if self.passed is not None and self.passed is not self.target:
            self.passed[:] = [*(self.target or ()), *(self.draft or ())]


def checked_quantization(
    model: nn.Module,
    caches: Caches,
    reach: int,
    bits: int | None,
    group_size: int,
    start: int,
) -> KVQuantization | None:
    """Return how the target's caches are quantized; None: not in this text.

    Args:
        model: the target.
        caches: of the text.
        reach: how many positions they hold at the end, at most.
        bits: of a number; None: nothing is quantized.
        group_size: numbers that share a scale.
        start: positions from which on.

    Raises:
        InvalidRequestError: they cannot be quantized so.
    """
    if bits is None:
        return None
    for name, value, low in (
        ("kv_bits", bits, 1),
        ("kv_group_size", group_size, 1),
        ("quantized_kv_start", start, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidRequestError(
                f"{name} is {value!r}, and a whole number of at least {low} is needed."
            )
    if reach < start:
        return None
    quantization = KVQuantization(bits, group_size, start)
    check_quantizable(model, quantization, caches.target)
    return quantization


def _checked_size(size: Any) -> int:
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and size > KEPT_FIRST:
        return int(size)
    raise InvalidRequestError(
        f"max_kv_size is {size!r}, and a whole number above {KEPT_FIRST} is needed, "
        "since so many of the first tokens always stay."
    )
