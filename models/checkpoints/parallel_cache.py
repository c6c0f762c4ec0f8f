"""The caches of a head that makes all drafts of a round in one forward.

With n known tokens before the newest one, a round over positions m to n - 1 writes
their keys and values, then those of what is drafted behind them: a block, or slots of
masks. A commit keeps positions m to n - 1, whatever is accepted, since they are of
committed text; the others go.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from mlx_speculation.caches import (
    Keep,
    Snapshot,
    Speculation,
    restore,
    states,
    with_slack,
)
from mlx_speculation.models.checkpoints.draft_head import (
    ChooseNext,
    HeadState,
    TokensOf,
    fed_again,
    first_rows,
)


class ParallelHead(Protocol):
    """A head on its target that makes all drafts in one forward."""

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each of its layers."""
        ...

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> None:
        """Write the keys and values of positions of committed text.

        Args:
            hidden: what is read of them, [texts, positions, dim].
            tokens: the one after each, ids [texts, positions].
            caches: what they are written to.
        """
        ...

    def draft(
        self,
        hidden: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Write positions of committed text, at least one, and draft behind them.

        Args:
            hidden: see `history`.
            tokens: likewise; the last one is the newest.
            caches: what they are written to, and then what is drafted.
            count: how many drafts, at most the head's depth.
            choose: gets logits [texts, n] for each draft in turn, returns it, [texts].
        """
        ...


class ParallelCache:
    """The caches of a head, from position `first` on; used as `MtpCache` are.

    Args:
        mtp: the head on its target.
        first: the first position that they will hold.

    Attributes:
        mtp: as passed.
        caches: those of its layers.
    """

    def __init__(self, mtp: ParallelHead, first: int = 0) -> None:
        self.mtp = mtp
        self.caches = with_slack(mtp.new_caches())
        self._round: Speculation | NoRows | None = None
        self.first = self.end = first
        self._before = self._after = first

    @property
    def lag(self) -> int:
        """Positions by which a layer lags the first one: none."""
        return 0

    @property
    def held(self) -> list[Any]:
        """The caches, for a count of bytes."""
        return self.caches

    @property
    def again(self) -> int:
        """The number of last tokens that are fed again; see `fed_again`."""
        return fed_again([self.caches])

    @property
    def layers(self) -> list[list[Any]]:
        """The caches, as those of one layer: a row keeps as many of all."""
        return [self.caches]

    @property
    def state(self) -> HeadState:
        """What they hold."""
        return HeadState((self.end,), (None,))

    def take(self, layers: list[list[Any]], state: HeadState) -> None:
        """Hold other caches in place of these."""
        self.caches = with_slack(layers[0])
        self.end = self._before = self._after = state.ends[0]
        self._round = None

    def kept(self) -> tuple[list[Any], int] | None:
        """Return caches and how many rows each holds; see `MtpCache`."""
        return None if self.first else first_rows(self.caches, self.end)

    def resume(self, snapshot: Snapshot) -> None:
        """Hold the rows that `kept` has returned, of a beginning of the text."""
        restore(snapshot, self.caches)
        self.end = self._before = self._after = snapshot.stop

    def feed(self, hidden: mx.array, stop: int, tokens_of: TokensOf) -> None:
        """Write positions of committed text, and keep them; see `HeadCache`."""
        tokens = tokens_of(0, self.end, stop - self.end)
        with speculation_of(self.caches, whole=True) as speculation:
            self.mtp.history(hidden, tokens, speculation.caches)
            speculation.commit(stop - self.end)
        self.end = self._before = self._after = stop
        self._round = None
        mx.eval(states(self.caches))

    def draft(
        self,
        hidden: mx.array,  # of positions [end, stop), at least one
        stop: int,  # the position of the newest token
        tokens_of: TokensOf,  # gives the tokens after these positions
        choose: ChooseNext,  # gets logits of the next draft, returns it, [1]
        count: int,  # how many drafts to make; no more than the head's depth
    ) -> None:
        """Open a round: write positions, and draft behind them; see `HeadCache`."""
        self._before, self._after = self.end, stop
        self._round = speculation_of(self.caches)
        tokens = tokens_of(0, self.end, stop - self.end)
        self.mtp.draft(hidden, tokens, self._round.caches, count, choose)

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


class NoRows(AbstractContextManager["NoRows"]):
    """A speculation of a head without caches, such as one that reads the target's."""

    caches = ()

    def commit(self, keep: Keep) -> None:
        """Keep nothing."""

    def rollback(self) -> None:
        """Undo nothing."""

    def __exit__(self, *error: object) -> None: ...


def speculation_of(caches: list[Any], *, whole: bool = False) -> Speculation | NoRows:
    """Open a speculation on the caches of a head, if it has any."""
    return Speculation(caches, whole=whole) if caches else NoRows()
