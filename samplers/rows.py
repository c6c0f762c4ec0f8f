"""Which tokens precede each row of some logits, and where the next one stands.

A row of logits chooses the token after a prefix of one sequence. Position decides the
noise, the prefix decides what processors do with the row. Some tokens of the prefix
are on the device only: drafts, and a choice that nobody has read yet.

    known   t_0 .. t_n      committed, on the host
    ahead   d_1 d_2 d_3     on the device, not read
    count   4               rows follow t_n, d_1, d_2, d_3: the positions n + 1 .. n + 4
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Rows:
    """The last `count` prefixes of `known` and `ahead` together, one for each row.

    Attributes:
        known: the token ids that the host knows.
        ahead: uint32 [m], the tokens after them, not read; None where there are none.
        count: how many rows, from 1 to all prefixes that are not empty, and with
            `start` above 0 the empty one too.
        start: how many tokens precede the known ones that nobody named.
        allowed: bool [count, ids], which ids each row may choose; None: all.
    """

    known: Sequence[int]
    ahead: mx.array | None = None
    count: int = 1
    start: int = 0
    allowed: mx.array | None = None

    @property
    def lead(self) -> int:
        """How many tokens are ahead of the known ones."""
        return 0 if self.ahead is None else self.ahead.shape[0]

    @property
    def positions(self) -> range:
        """The position of the token that each row chooses, counted from 0."""
        stop = self.start + len(self.known) + self.lead + 1
        return range(stop - self.count, stop)

    @property
    def round_start(self) -> int:
        """The position of the first token that the host does not know."""
        return self.start + len(self.known)
