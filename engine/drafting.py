"""What proposes tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.samplers import Rows

# (logits [rows, vocab], what precedes each row) -> uint32 [rows]
Choose = Callable[[mx.array, Rows], mx.array]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, uint32 [k], not read back to the host."""

    tokens: mx.array

    @property
    def length(self) -> int:
        """How many tokens were proposed."""
        return self.tokens.shape[0]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one open stream at a time.

    `begin` comes first. The calls of a round are `propose`, then `settle` or
    `discard`, also when nothing was proposed. Rounds in which no draft is wanted make
    no call, so a drafter finds its place from the sequence.
    """

    def begin(self, sequence: Sequence) -> None:
        """Start on a new sequence, and forget the last one. Called by prefill."""
        ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Propose at most `limit` tokens that follow the sequence; none is an answer.

        `choose` holds the request's filters and noise; a drafter draws nothing
        itself. Committed state stays as it was until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens. If it fails, it has kept none."""
        ...

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        ...
