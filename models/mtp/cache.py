"""The caches of a head, for one text and for the texts of a batch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import mlx.core as mx

from mlx_speculation.caches import (
    Snapshot,
    TreeRows,
    extend_all,
    merged,
    restore,
    tree_views,
    with_slack,
)
from mlx_speculation.models.checkpoints.draft_head import (
    ChooseNext,
    HeadOnTarget,
    HeadOutput,
    HeadState,
    ParallelHead,
    fed_again,
    first_rows,
)
from mlx_speculation.models.lanes.draft_tree import tree_forward
from mlx_speculation.models.mtp.rounds import HeadRound, HeadRows, beneath, cut, less

T = TypeVar("T")


class HeadCache(HeadRows):
    """The caches of a head for one text, from position `first` on.

    `layers` are new caches for each layer. A head that reads the target's caches has
    none. For `key_steps` see `Speculation`.
    """

    def __init__(
        self,
        mtp: ParallelHead,
        layers: list[list[Any]],
        first: int = 0,
        *,
        key_steps: bool = False,
    ) -> None:
        self.mtp: Any = mtp
        self.first, self._key_steps = first, key_steps
        self.take(layers, HeadState((first,) * len(layers), (None,) * len(layers)))

    @property
    def end(self) -> int:
        """The next position to write."""
        return self.ends[0][0]

    @property
    def state(self) -> HeadState:
        """The ends and the waiting states of the layers; see `HeadState`."""
        return HeadState(tuple(ends[0] for ends in self.ends), tuple(self.waiting))

    @property
    def again(self) -> int:
        """The number of last tokens to feed again at a resumption; see `fed_again`."""
        return fed_again(self.layers)

    def kept(self) -> tuple[list[Any], int] | None:
        """Return views of rows from position 0 on, and their number; None: no views."""
        rows = min(self.state.ends)
        return None if self.first else first_rows([*chain(*self.layers)], rows)

    def resume(self, snapshot: Snapshot) -> None:
        """Restore a snapshot of rows that `kept` returned, for a prefix of the text."""
        restore(snapshot, [*chain(*self.layers)])
        layers, stop = len(self.layers), snapshot.stop
        self._hold(HeadState((stop,) * layers, (None,) * layers))

    def take(self, layers: list[list[Any]], state: HeadState) -> None:
        """Replace the held caches and their state by these."""
        self.layers = [with_slack(caches) for caches in layers]
        self._hold(state)

    def _hold(self, state: HeadState) -> None:
        self.ends = [[end] for end in state.ends]
        self.waiting = [*state.waiting]
        self._round: HeadRound | None = None

    def feed(self, hidden: mx.array, stop: int, text: list[int]) -> None:
        """Write positions of committed text and keep them; on an error keep none.

        `hidden` has the input states at positions [end, stop), [1, stop - end, dim].
        """
        self._round = None
        HeadRound(self, self.mtp, whole=True).read(hidden, [text], [stop])

    def draft(
        self,
        hidden: mx.array,
        stop: int,
        text: list[int],
        choose: ChooseNext,
        count: int,
    ) -> None:
        """Open a round: write positions of committed text, and draft `count` tokens.

        `hidden` has the input states at positions [end, stop), at least one. `stop` is
        the newest token's position. `choose` gets logits [1, vocab] and returns the
        next drafted token, [1].
        """
        self._round = HeadRound(self, self.mtp, key_steps=self._key_steps)
        self._round.draft(hidden, [text], [stop], count, choose)

    def commit(self) -> None:
        """Keep the round's positions of committed text."""
        if self._round is not None:
            self._round.commit()

    def rollback(self) -> None:
        """Undo the round, even after its commit. Never raises."""
        if self._round is not None:
            self._round.rollback()
        self._round = None


class MtpCache(HeadCache):
    """The caches of a head that drafts token by token."""

    def __init__(self, mtp: HeadOnTarget, first: int = 0) -> None:
        layers = mtp.head.new_caches()
        layers = layers if mtp.head.chained else layers[:1]  # those in use
        super().__init__(mtp, layers, first, key_steps=True)

    def draft_tree(self, hidden: mx.array, stop: int, text: list[int]) -> "TreeRound":
        """Open a round for a tree; not for a chained head."""
        self._round = HeadRound(self, self.mtp, key_steps=True)
        return TreeRound(self.mtp, *self._round.step(hidden, text, stop))


class TreeRound:
    """Runs the nodes of a tree after the newest position, level by level.

    All nodes of a level have the same position. Nodes attend to the committed
    positions, which `caches` already have, to their ancestors and to themselves.
    `logits` are those of the nodes that were run last, [nodes, vocab]; before the first
    level, those of the root.
    """

    def __init__(
        self, mtp: HeadOnTarget, caches: Sequence[Any], out: HeadOutput
    ) -> None:
        self._mtp, self._caches = mtp, caches
        self._recycled = out.recycled[:, -1:]
        self.logits = out.logits[:, -1]
        self._level = self._columns = 0

    def run(self, tokens: mx.array, above: mx.array, seen: mx.array) -> None:
        """Run the nodes of a level; the arguments are those of `tree_growth.Level`."""
        depths = mx.zeros(tokens.shape[1], mx.int32)
        rows = TreeRows(seen, depths, self._level - self._columns)
        hidden = self._recycled[:, above]
        with tree_forward(rows):
            out = self._mtp.rows(hidden, tokens, tree_views(self._caches, rows))
        self._recycled, self.logits = out.recycled, out.logits[0]
        self._level, self._columns = self._level + 1, seen.shape[1]


class BatchHeadCache(HeadRows):
    """The caches of a head for several rows; `firsts` has each row's first position."""

    def __init__(self) -> None:
        self.layers, self.ends, self.waiting = [], [], []
        self.firsts: list[int] = []

    def join(self, each: Sequence[HeadCache]) -> None:
        """Append copies of the rows of other caches. An error changes nothing."""
        rows = len(self.firsts)
        joining = [merged(caches) for caches in _by_layer(one.layers for one in each)]
        ends = [[*layer] for layer in _by_layer(one.state.ends for one in each)]
        waiting = [[*layer] for layer in _by_layer(one.state.waiting for one in each)]
        if rows:
            ends = [old + more for old, more in zip(self.ends, ends, strict=True)]
            for layer, old in enumerate(self.waiting):
                waiting[layer][:0] = [None] * rows if old is None else [old]
        stacked = [beneath(parts) for parts in waiting]
        if rows:
            extend_all([*chain(*self.layers)], [*chain(*joining)])
        else:
            self.layers = joining
        self.ends, self.waiting = ends, stacked
        self.firsts = self.firsts + [cache.first for cache in each]

    def leave(self, stay: Sequence[int]) -> None:
        """Keep only these rows, at least one, in this order."""
        indices = mx.array(list(stay))
        mx.eval(indices)
        for cache in chain(*self.layers):
            cache.filter(indices)
        self.waiting = [
            None if part is None else part[indices] for part in self.waiting
        ]
        self.ends = [[ends[row] for row in stay] for ends in self.ends]
        self.firsts = [self.firsts[row] for row in stay]

    def extract(self, row: int) -> tuple[int, list[list[Any]], HeadState]:
        """Return a row's first position, and copies of its caches and state."""
        ends = tuple(layer[row] for layer in self.ends)
        lags = less(ends[:1] + ends[:-1], ends)  # how far behind the previous layer
        waiting = tuple(
            None if part is None else cut(part[row : row + 1], [0], [lag])
            for part, lag in zip(self.waiting, lags, strict=True)
        )
        layers = [[cache.extract(row) for cache in caches] for caches in self.layers]
        return self.firsts[row], layers, HeadState(ends, waiting)


def _by_layer(rows: Iterable[Iterable[T]]) -> "Iterator[tuple[T, ...]]":
    return zip(*rows, strict=True)
