"""Kinds of logits processors: serial, pure, or with a state that can be restored.

`pure` and `ForkableProcessor` are for authors of processors.
"""

from functools import update_wrapper
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.sampling import LogitsProcessor

OF_MLX_LM = "mlx_lm.sample_utils"  # its closures have no state


@runtime_checkable
class ForkableProcessor(Protocol):
    """A logits processor with a state that can be restored.

    It is called for drafted tokens too. Then the state after the call for the last
    emitted token is restored. A state can be restored any number of times.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the processed logits [1, vocab]; writing in place is allowed."""
        ...

    def copy_state(self) -> Any:
        """Return a copy of the state, which later calls must not change."""
        ...

    def restore_state(self, state: Any) -> None:
        """Restore a state from `copy_state`; later it can be restored again."""
        ...


class PureProcessor:
    """A logits processor whose result depends on its arguments alone."""

    def __init__(self, processor: LogitsProcessor) -> None:
        if not callable(processor):
            raise InvalidRequestError(
                f"pure() was given a {type(processor).__name__}, and a callable "
                "(tokens, logits) -> logits is needed."
            )
        self._processor = processor
        update_wrapper(self, processor, updated=())

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Call the processor."""
        return self._processor(tokens, logits)


def pure(processor: LogitsProcessor) -> PureProcessor:
    """Declare that a logits processor's result depends on its arguments alone.

    It is then called for all rows of a round and for drafts, in any order, also for
    tokens that are never emitted. It should not read its arguments on the host
    (`.item()`, `.tolist()`), which is slow.

        @pure
        def no_newline(tokens, logits):
            return logits.at[:, 13].add(-100.0)

    Raises:
        InvalidRequestError: the processor cannot be called.
    """
    return PureProcessor(processor)


def is_pure(processor: LogitsProcessor) -> bool:
    """Return whether the processor is wrapped by `pure` or is mlx-lm's own."""
    if isinstance(processor, PureProcessor):
        return True
    return getattr(processor, "__module__", None) == OF_MLX_LM


def is_forkable(processor: LogitsProcessor) -> bool:
    """Return whether the processor has a state that can be restored."""
    return not is_pure(processor) and isinstance(processor, ForkableProcessor)


def is_serial(processor: LogitsProcessor) -> bool:
    """Return whether the processor must be called only for emitted tokens."""
    return not is_pure(processor) and not is_forkable(processor)
