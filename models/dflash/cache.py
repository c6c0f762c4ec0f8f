"""The context of a drafter of blocks: what of it the caches hold, and rounds behind it.

With n known tokens before the newest one, a round over positions m to n - 1 writes
their keys and values, then those of a block behind them. A commit keeps positions m to
n - 1, whatever is accepted, since they are of committed text; the block's go.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.caches import Speculation, states
from mlx_speculation.models.checkpoints.draft_head import ChooseNext, TokensOf
from mlx_speculation.models.dflash.head import DFlash


class DFlashContext:
    """The caches of a drafter, from position `first` on; used as `MtpCache` are.

    Args:
        dflash: the drafter on its target.
        first: the first position that they will hold.
    """

    def __init__(self, dflash: DFlash, first: int = 0) -> None:
        self._dflash = dflash
        self._caches = dflash.head.new_caches()
        self._round: Speculation | None = None
        self.first = self.end = first
        self._before = self._after = first

    @property
    def lag(self) -> int:
        """How far a layer is behind the first one: all are written together."""
        return 0

    @property
    def held(self) -> list[Any]:
        """The caches, for a count of bytes."""
        return self._caches

    def feed(self, hidden: mx.array, stop: int, tokens_of: TokensOf) -> None:
        """Write context of committed text, and keep it; see `HeadCache`."""
        with Speculation(self._caches, whole=True) as speculation:
            self._dflash.history(hidden, speculation.caches)
            speculation.commit(stop - self.end)
        self.end = self._before = self._after = stop
        self._round = None
        mx.eval(states(self._caches))

    def draft(
        self,
        hidden: mx.array,  # of positions [end, stop), at least one
        stop: int,  # the position of the newest token
        tokens_of: TokensOf,  # gives the newest token
        choose: ChooseNext,  # gets logits [1, vocab] of the next draft, returns it, [1]
        count: int,  # how many drafts to make; no more than the head's depth
    ) -> mx.array | None:
        """Open a round: write context, and draft behind it; see `HeadCache`."""
        self._before, self._after = self.end, stop
        self._round = Speculation(self._caches)
        newest = tokens_of(0, stop - 1, 1)
        caches = self._round.caches
        return self._dflash.draft(hidden, newest, caches, count, choose)

    def commit(self) -> None:
        """Keep what of the round is of committed text."""
        if self._round is not None and self.end < self._after:
            self._round.commit(self._after - self.end)
            self._before, self.end = self.end, self._after

    def rollback(self) -> None:
        """Undo the round, also after its commit. Never raises."""
        if self._round is not None:
            self._round.rollback()
        self.end = self._after = self._before
        self._round = None
