"""What a caller asks of one stream."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_speculation.caches import KVQuantization
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.models import PREFILL_STEP
from mlx_speculation.samplers import Constraint, Sampling


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerateOptions:
    """The options of a stream, as they were passed; not checked yet.

    Attributes are described in `SpeculativeGenerator.stream`.
    """

    max_tokens: int
    sampling: Sampling | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Collection[int] | None = None
    draft_length: int | DraftLengthPolicy | None = None
    max_draft: int | None = None
    prompt_cache: list[Any] | None = None
    cached_tokens: Iterable[int] | None = None
    draft_cache: list[Any] | None = None
    logprobs: int | None = None
    constraint: Constraint | None = None
    explain: bool = False
    prefill_step_size: int = PREFILL_STEP
    prompt_progress: Callable[[int], None] | None = None
    kv_quantization: KVQuantization | None = None
    logprob_rows: bool = False
    yielded_only: bool = False
    level_draft: bool = False

    @property
    def own_caches(self) -> bool:
        """Whether the caller's caches are written to."""
        return self.prompt_cache is not None or self.draft_cache is not None
