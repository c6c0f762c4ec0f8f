"""The KV cache of a head for the rows of a batch; those of one are like `MtpCache`.

Rows have different numbers of positions to be written: those of committed text since
the last round. They are fed together, shorter rows padded on the right, and each keeps
its own; nobody reads what comes out of them. Then all rows draft from their last
position on, one position a forward, and of these only the first one is of committed
text:

    to be written    5 6 7                  row 0       4        row 1, keys and values
    fed              5 6                    .
    kept             5 6
    drafted from     7 d1 d2                4 d1 d2
    kept             7                      4

A head that makes all drafts in one forward (`ParallelCache`) writes them behind 7 and 4
at once, and they go as well. Padding is never attended to: it stands behind the
positions of its forward, and is gone when the next one is written. So no row waits for
another, and none is fed twice.

In a chain of layers each layer is one forward over the positions of all rows that it
lacks, those of drafts at their ends; see `models/mtp/cache.py` for what it keeps.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import sub
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.caches import Speculation, array_bytes, extend_all, merged, states
from mlx_speculation.models.checkpoints.draft_head import (
    ChooseNext,
    HeadCache,
    HeadState,
)
from mlx_speculation.models.checkpoints.parallel_cache import NoRows, speculation_of

Texts = Sequence[list[int]]
T = TypeVar("T")


class BatchHeadCache:
    """The caches of a head for several rows.

    Attributes:
        layers: the caches of each layer.
        ends: for each layer and row, the position that comes next.
        waiting: for each layer, what the one before made of the positions from its end
            on, [rows, the most, dim]; None: of none.
        firsts: for each row, the first position that is held.
    """

    def __init__(self) -> None:
        self.layers: list[list[Any]] = []
        self.ends: list[list[int]] = []
        self.waiting: list[mx.array | None] = []
        self.firsts: list[int] = []

    @property
    def caches(self) -> list[Any]:
        """The caches of all layers."""
        return [*chain(*self.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, as allocated, and of the states that wait."""
        return array_bytes([self.layers, self.waiting])

    @property
    def chained(self) -> bool:
        """Return whether each layer makes a draft."""
        return len(self.layers) > 1

    @property
    def lag(self) -> int:
        """The most positions by which a layer lags the first one."""
        return max(max(_less(self.ends[0], ends)) for ends in self.ends)

    def join(self, each: Sequence[HeadCache]) -> None:
        """Let rows join behind those that are there; what they hold is copied.

        If it fails, the cache is as before.
        """
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
            extend_all(self.caches, [*chain(*joining)])
        else:
            self.layers = joining
        self.ends, self.waiting = ends, stacked
        self.firsts = self.firsts + [cache.first for cache in each]

    def leave(self, stay: Sequence[int]) -> None:
        """Keep these rows, in this order, and let go of the others."""
        if stay:
            indices = mx.array(list(stay))
            mx.eval(indices)  # caches read it, each in its turn
            for cache in self.caches:
                cache.filter(indices)
            self.waiting = [
                None if part is None else part[indices] for part in self.waiting
            ]
        else:
            self.layers, self.waiting = [], []
        self.ends = [[ends[row] for row in stay] for ends in self.ends]
        self.firsts = [self.firsts[row] for row in stay]

    def extract(self, row: int) -> tuple[int, list[list[Any]], HeadState]:
        """Return a copy of what one row holds: its first position, and for `take`."""
        ends = tuple(layer[row] for layer in self.ends)
        lags = _less(ends[:1] + ends[:-1], ends)  # behind the layer before
        waiting = tuple(
            None if part is None else _cut(part[row : row + 1], [0], [lag])
            for part, lag in zip(self.waiting, lags, strict=True)
        )
        layers = [[cache.extract(row) for cache in caches] for caches in self.layers]
        return self.firsts[row], layers, HeadState(ends, waiting)

    def begin(self, mtp: Any) -> "BatchHeadRound":
        """Open a round of the head on its target."""
        return BatchHeadRound(self, mtp)


class BatchHeadRound:
    """Writes to the caches of all rows, which can be undone until others are made.

    In what its methods take, `hidden` are the target's states from each row's next
    position on, [rows, n, dim], `texts` its known tokens, and `stops` where its
    positions end that are written.
    """

    def __init__(self, cache: BatchHeadCache, mtp: Any) -> None:
        self._cache, self._mtp = cache, mtp
        self._before = self._after = cache.ends, cache.waiting
        self._speculations: list[Speculation | NoRows] = []
        self._open: list[
            tuple[Speculation | NoRows, list[int]]
        ] = []  # and what is kept

    def feed(self, hidden: mx.array | None, texts: Texts, stops: Sequence[int]) -> None:
        """Write positions of committed text and keep them, also those that wait."""
        self._run(hidden, texts, stops, len(self._cache.layers))
        self.commit()

    def draft(
        self,
        hidden: mx.array,
        texts: Texts,
        stops: Sequence[int],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Write positions, and draft behind them; see `ParallelHead`.

        They are one of each row but in a chain, the last one, or none.

        Args:
            hidden: see the class.
            texts: likewise.
            stops: likewise.
            count: how many drafts.
            choose: gets logits [rows, n] of the next ones, and returns them, [rows].
        """
        cache = self._cache
        if cache.chained:
            self._run(hidden, texts, stops, count, choose)
            return
        tokens = mx.array([text[-1:] for text in texts], mx.uint32)
        speculation = self._written(0, stops)
        self._mtp.draft(hidden, tokens, speculation.caches, count, choose)
        self._after = [[*stops]], cache.waiting

    def commit(self) -> None:
        """Keep what of it is of committed text."""
        for speculation, keep in self._open:
            even = len(set(keep)) == 1
            speculation.commit(keep[0] if even else keep)
        self._open = []
        self._cache.ends, self._cache.waiting = self._after

    def evaluate(self) -> None:
        """Wait for what was written."""
        mx.eval(states(self._cache.caches), self._cache.waiting)

    def rollback(self) -> None:
        """Undo all of it. Never raises."""
        for speculation in reversed(self._speculations):
            speculation.rollback()
        self._cache.ends, self._cache.waiting = self._before

    def _written(self, layer: int, ends: Sequence[int]) -> Speculation | NoRows:
        """Open a layer's caches for positions that are kept up to some ends."""
        cache = self._cache
        speculation = speculation_of(cache.layers[layer])
        self._speculations.append(speculation)
        self._open.append((speculation, _less(ends, cache.ends[layer])))
        return speculation

    def _run(
        self,
        hidden: mx.array | None,
        texts: Texts,
        stops: Sequence[int],
        layers: int,
        choose: ChooseNext | None = None,
    ) -> None:
        """Run the first layers over all positions that they lack.

        Args:
            hidden: see the class.
            texts: likewise.
            stops: likewise.
            layers: how many.
            choose: see `draft`; None: run those of committed text, and draft nothing.
        """
        cache, mtp = self._cache, self._mtp
        after, waiting = [*cache.ends], [*cache.waiting]
        inputs, made = hidden, [*stops]  # states, and where their positions end
        drafts: list[mx.array] = []
        for layer, starts in enumerate(cache.ends[: layers + 1]):
            ends = starts
            if layer < layers:
                ends = after[layer] = [*map(max, starts, [n - layer for n in stops])]
            if layer:
                some, old = _less(cache.ends[layer - 1], starts), waiting[layer]
                if old is not None:
                    inputs = old if inputs is None else _behind(old, some, inputs)
                left = _less(after[layer - 1], ends)
                waiting[layer] = _cut(inputs, _less(ends, starts), left)
            if layer == layers:
                break
            made = ends if choose is None else made
            widths = _less(made, starts)
            if not max(widths):
                inputs = None
                continue
            assert inputs is not None
            part = inputs[:, : max(widths)]
            first = [start + layer + 1 for start in starts]
            tokens = _tokens(texts, first, widths, drafts)
            caches = self._written(layer, ends).caches
            if choose is not None:
                out = mtp.ragged(part, tokens, caches, layer, widths)
                drafts.append(choose(out.logits[:, -1]))
                inputs = out.recycled
            elif layer + 1 < len(cache.layers):
                inputs = mtp.rows(part, tokens, caches, layer).recycled
            else:  # a head of blocks has no layers to name
                mtp.history(part, tokens, caches, *((layer,) if layer else ()))
        self._after = after, waiting


def beneath(parts: Sequence[mx.array | None]) -> mx.array | None:
    """Return states [rows, n, dim] below each other, padded; None: there are none.

    A part that is None is one row without any.
    """
    some = [part for part in parts if part is not None]
    if not some:
        return None
    width = max(part.shape[1] for part in some)
    padded = []
    for part in parts:
        rows = some[0][:1, :0] if part is None else part
        more = width - rows.shape[1]
        padded.append(mx.pad(rows, [(0, 0), (0, more), (0, 0)]) if more else rows)
    return mx.concatenate(padded)


def _tokens(
    texts: Texts, firsts: Sequence[int], widths: Sequence[int], drafts: list[mx.array]
) -> mx.array:
    """Return ids [rows, the most], from a place of each text on, and drafts behind."""
    known = [
        text[first : first + width]
        for text, first, width in zip(texts, firsts, widths, strict=True)
    ]
    counts = [*map(len, known)]
    rows = [row + [0] * (max(counts) - len(row)) for row in known]
    ids = mx.array(rows, mx.uint32)
    if drafts:
        late = [max(0, n) for n in _less(firsts, [*map(len, texts)])]
        joined = _behind(ids, counts, mx.stack(drafts, axis=1), late)
        return joined[:, : max(widths)]
    return ids


def _behind(
    first: mx.array,
    counts: Sequence[int],
    second: mx.array,
    late: Sequence[int] = (),
) -> mx.array:
    """Return of each row the first `counts` columns, and behind them the others'.

    Args:
        first: [rows, n, ...].
        counts: how many of each row.
        second: [rows, m, ...].
        late: how many columns of it are left out in each row; none when omitted.
    """
    both = mx.concatenate([first, second], axis=1)
    size, columns = first.shape[1], np.arange(both.shape[1])
    own = np.array(counts)[:, None]
    moved = columns + size - own + np.array(late or [0])[:, None]
    return _taken(both, np.where(columns < own, columns, moved))


def _cut(
    array: mx.array | None, starts: Sequence[int], counts: Sequence[int]
) -> mx.array | None:
    """Return `counts` columns of each row from `starts` on; None: there are none."""
    if array is None or not max(counts):
        return None
    return _taken(array, np.array(starts)[:, None] + np.arange(max(counts)))


def _taken(array: mx.array, places: NDArray[np.int64]) -> mx.array:
    """Return columns of each row; past its end any."""
    columns = mx.array(np.minimum(places, array.shape[1] - 1))
    return array[mx.arange(len(places))[:, None], columns]


def _by_layer(rows: Iterable[Iterable[T]]) -> "Iterator[tuple[T, ...]]":
    return zip(*rows, strict=True)


def _less(numbers: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return differences, as many as the shorter has."""
    return [*map(sub, numbers, others)]
