"""A prompt cache as in mlx-lm: a list of the target's caches, and maybe the draft's.

make_prompt_cache(model)                               the target's caches
make_prompt_cache(model) + make_prompt_cache(draft)    the target's and the draft's
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import KVQuantization, check_supported, position
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import checked_quantization

KEPT_FIRST = 4  # positions that mlx-lm's caches of a limited size never drop


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of one text."""

    target: list[Any] | None  # None: new ones
    draft: list[Any] | None  # None: new ones
    passed: list[Any] | None  # the caller's list

    @classmethod
    def of(
        cls,
        model: nn.Module,
        drafts: Sequence[nn.Module],
        passed: Any,
        max_size: int | None,
    ) -> "Caches":
        """Split the caller's list of caches, or make caches of a limited size."""
        if passed is None and max_size is None:
            return cls(None, None, None)
        if passed is None:
            hint = f": the first {KEPT_FIRST} tokens always stay"
            size = checked_count("max_kv_size", max_size, KEPT_FIRST + 1, hint)
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
        layers = len(make_prompt_cache(model))
        if len(drafts) == 1 and len(passed) > layers:
            check_supported(passed)  # refuses a cache that is in the list twice
            return cls(passed[:layers], passed[layers:], passed)
        return cls(passed, None, passed)

    @property
    def held(self) -> int:
        """Number of positions that the target's caches hold."""
        return 0 if self.target is None else position(self.target) or 0

    def write_back(self) -> None:
        """Put the current caches, some of which were replaced, in the caller's list."""
        if self.passed is not None and self.passed is not self.target:
            self.passed[:] = [*(self.target or ()), *(self.draft or ())]


def limited(
    model: nn.Module,
    reach: int,
    passed: list[Any] | None = None,
    *,
    max_kv_size: int | None,
    kv_bits: int | None,
    kv_group_size: int,
    quantized_kv_start: int,
) -> tuple[Caches, KVQuantization | None]:
    """Return the caches for `reach` new positions, and the caches' quantization.

    Raises:
        InvalidRequestError: a limit is invalid, or `max_kv_size` was passed for a model
            that makes its own caches, for which mlx-lm ignores the limit.
    """
    caches = Caches.of(model, (), passed, max_kv_size)
    if max_kv_size is not None and hasattr(model, "make_cache"):
        raise InvalidRequestError(
            f"max_kv_size is {max_kv_size}, but {type(model).__module__} makes its own "
            "caches, whose size mlx-lm does not limit. Leave max_kv_size out."
        )
    quantization = quantization_of(kv_bits, kv_group_size, quantized_kv_start)
    reach += caches.held
    return caches, checked_quantization(model, quantization, caches.target, reach)


def quantization_of(
    bits: int | None, group_size: int, start: int
) -> KVQuantization | None:
    """Return the `KVQuantization` of mlx-lm's three keywords; None without bits."""
    if bits is None:
        return None
    checked_count("kv_bits", bits, 1)
    checked_count("kv_group_size", group_size, 1)
    checked_count("quantized_kv_start", start, 0)
    return KVQuantization(bits, group_size, start)
