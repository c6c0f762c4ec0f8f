"""The tokens of one request, and where they stand."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.samplers import Rows


@dataclass(slots=True)
class Sequence:
    """The known tokens: those in the passed cache, the prompt, and the emitted ones.

    Attributes:
        tokens: the known token ids.
        start: how many tokens precede them that nobody named (a prompt cache that was
            passed without `cached_tokens`).
    """

    tokens: list[int]
    start: int = 0

    def rows(self, ahead: mx.array | None = None, count: int = 1) -> Rows:
        """Return what precedes `count` rows, the last of which follows `ahead`."""
        return Rows(self.tokens, ahead, count, self.start)
