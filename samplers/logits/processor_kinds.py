"""Kinds of logits processors: serial, pure, or with a state that can be put back.

`processors` says what follows from each. This module is for those who write them.
"""

from functools import update_wrapper
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.sampling import LogitsProcessor

OF_MLX_LM = "mlx_lm.sample_utils"  # whose closures have no state


@runtime_checkable
class ForkableProcessor(Protocol):
    """A logits processor with a state that can be put back.

    It is called for rows of drafts too. After a round the state is restored to where
    the last emitted token's call has left it, and before a draft is made to where it
    was before the round. A state is restored any number of times.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the processed logits [1, vocab]; they may be written in place."""
        ...

    def copy_state(self) -> Any:
        """Return the state, which later calls must not change. Changes nothing."""
        ...

    def restore_state(self, state: Any) -> None:
        """Go back to a state of `copy_state`, and leave it fit to be restored again."""
        ...


class PureProcessor:
    """A logits processor whose result depends on its arguments alone; see `pure`."""

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

    It is then called for all rows of a round at once, and for drafts: also for tokens
    that are never emitted, and in any order. It must not read its arguments on the
    host (`.item()`, `.tolist()`), or it works but is slow.

        @pure
        def no_newline(tokens, logits):
            return logits.at[:, 13].add(-100.0)

    Raises:
        InvalidRequestError: it cannot be called.
    """
    return PureProcessor(processor)


def is_pure(processor: LogitsProcessor) -> bool:
    """Return whether all rows can be processed at once."""
    if isinstance(processor, PureProcessor):
        return True
    return getattr(processor, "__module__", None) == OF_MLX_LM


def is_forkable(processor: LogitsProcessor) -> bool:
    """Return whether it has a state, and can put it back."""
    return not is_pure(processor) and isinstance(processor, ForkableProcessor)


def is_serial(processor: LogitsProcessor) -> bool:
    """Return whether it may be called for emitted tokens only."""
    return not is_pure(processor) and not is_forkable(processor)
