"""Rounds of a head for one text or many: writing to its caches, committing, undoing.

A position is a pair of a token's state and the next token, so n + 1 committed tokens
have n positions. If a head with one layer holds positions 0 to m - 1, a round writes
positions m to n - 1, and one position for each drafted token after the first. A commit
keeps positions m to n - 1, whichever tokens are accepted.

In a chain each layer drafts one token, and has its own cache. At position p, layer k
reads the state of layer k - 1 and the token at p + k + 1. So the last k positions of
layer k read drafted tokens, and are not kept. The states of layer k - 1 at these
positions wait for the next round:

    n = 6, two layers             layer 0            layer 1
    held before the round         0 to 2             0 to 1; 2 waits
    run                           3 to 5             2 to 5; 5 reads a drafted token
    kept                          3 to 5             2 to 4; 5 waits

Texts differ in the number of positions to write. All texts are fed together, with short
rows padded on the right. In a chain each layer runs once over all positions. Other
heads first feed all positions but each text's last, and then draft from the last one.
Padding comes after the positions of its forward, and is dropped before the next
forward. So no position attends to padding.
"""

from collections.abc import Sequence
from operator import sub
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.caches import Speculation, states
from mlx_speculation.models.checkpoints.draft_head import ChooseNext

Texts = Sequence[list[int]]


class HeadRows:
    """Contents of a head's caches."""

    layers: list[list[Any]]  # the caches of each layer
    ends: list[list[int]]  # for each layer and text, the next position to write
    # For each layer, states of the previous layer at the positions from this layer's
    # end on, [texts, n, dim], padded; None: no positions wait
    waiting: list[mx.array | None]

    @property
    def chained(self) -> bool:
        """Return whether each layer drafts one token."""
        return len(self.layers) > 1

    @property
    def held(self) -> list[Any]:
        """The caches and the waiting states, for a count of bytes."""
        return [self.layers, self.waiting]

    @property
    def lag(self) -> int:
        """Largest number of positions by which a layer is behind the first one."""
        return max(max(less(self.ends[0], ends)) for ends in self.ends)


class HeadRound:
    """Writes to a head's caches, and can undo this until the next round writes.

    Arguments of its methods:

        hidden    input states from each text's next position on, [texts, n, dim]
        texts     the known tokens of each text
        stops     for each text, the end (exclusive) of the positions to write

    For `whole` (for one text only) and `key_steps` see `Speculation`.
    """

    def __init__(
        self, rows: HeadRows, mtp: Any, *, whole: bool = False, key_steps: bool = False
    ) -> None:
        self._rows, self._mtp = rows, mtp
        self._options: Any = {"whole": whole, "key_steps": key_steps}
        self._before = rows.ends, rows.waiting
        self._ends, self._waiting = [*rows.ends], [*rows.waiting]
        self._speculations: list[Any] = []
        # Speculations not committed yet, and how many positions of each text to keep
        self._open: list[tuple[Any, list[int]]] = []

    def feed(self, hidden: mx.array | None, texts: Texts, stops: Sequence[int]) -> None:
        """Write positions of committed text; keep them and the waiting states."""
        self._run(hidden, texts, stops, len(self._rows.layers))
        self.commit()

    def read(self, hidden: mx.array | None, texts: Texts, stops: Sequence[int]) -> None:
        """Feed as `feed` does, and evaluate the caches; on an error keep nothing."""
        try:
            self.feed(hidden, texts, stops)
            mx.eval([states(caches) for caches in self._rows.layers], self._waiting)
        except BaseException:
            self.rollback()
            raise

    def draft(
        self,
        hidden: mx.array,
        texts: Texts,
        stops: Sequence[int],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Write positions, and draft after them; see `ParallelHead`.

        With several texts, `feed` must have written all positions but the last of each,
        except in a chain.
        """
        if self._rows.chained:
            self._run(hidden, texts, stops, count, choose)
            return
        tokens = self._tokens_to(stops, texts)
        caches = self.write(0, stops)
        self._mtp.draft(hidden, tokens, caches, count, choose)

    def step(self, hidden: mx.array, text: list[int], stop: int) -> tuple[Any, Any]:
        """Write positions of one text; return caches and the last position's output."""
        tokens = self._tokens_to([stop], [text])
        caches = self.write(0, [stop])
        return caches, self._mtp.step(hidden, tokens, caches, 0)

    def commit(self) -> None:
        """Keep the positions of committed text."""
        for speculation, keep in self._open:
            speculation.commit(keep[0] if len(set(keep)) == 1 else keep)
        self._open = []
        self._rows.ends, self._rows.waiting = [*self._ends], [*self._waiting]

    def rollback(self) -> None:
        """Undo the whole round, even after a commit. Never raises."""
        for speculation in reversed(self._speculations):
            speculation.rollback()
        self._rows.ends, self._rows.waiting = self._before

    def write(self, layer: int, ends: Sequence[int]) -> Any:
        """Return a layer's caches to write to; a commit keeps what is before `ends`."""
        caches, starts = self._rows.layers[layer], self._ends[layer]
        self._ends[layer] = [*ends]
        if not caches:  # a head that reads the target's caches
            return ()
        speculation = Speculation(caches, **self._options)
        self._speculations.append(speculation)
        self._open.append((speculation, less(ends, starts)))
        return speculation.caches

    def _tokens_to(self, stops: Sequence[int], texts: Texts) -> mx.array:
        starts = self._ends[0]
        return _tokens(texts, [n + 1 for n in starts], less(stops, starts), [])

    def _run(
        self,
        hidden: mx.array | None,
        texts: Texts,
        stops: Sequence[int],
        layers: int,
        choose: ChooseNext | None = None,
    ) -> None:
        """Run the first `layers` layers over all positions that their caches lack."""
        rows, mtp, waiting = self._rows, self._mtp, self._waiting
        inputs, made = hidden, [*stops]  # states, and the ends of their positions
        drafts: list[mx.array] = []
        for layer, starts in enumerate(rows.ends[: layers + 1]):
            ends = starts
            if layer < layers:
                ends = [*map(max, starts, [n - layer for n in stops])]
            if layer:
                some, old = less(rows.ends[layer - 1], starts), waiting[layer]
                if old is not None:
                    inputs = old if inputs is None else _followed_by(old, some, inputs)
                left = less(self._ends[layer - 1], ends)
                waiting[layer] = cut(inputs, less(ends, starts), left)
            if layer == layers:
                break
            made = ends if choose is None else made
            widths = less(made, starts)
            if not max(widths):
                inputs = None
                continue
            assert inputs is not None
            part, last = inputs[:, : max(widths)], layer + 1 == len(rows.layers)
            first = [start + layer + 1 for start in starts]
            tokens = _tokens(texts, first, widths, drafts)
            caches = self.write(layer, ends)
            if choose is None and last:  # a `ParallelHead` takes no `layer`
                mtp.history(part, tokens, caches, *((layer,) if layer else ()))
                continue
            if choose is not None and len(texts) > 1:
                out = mtp.ragged(part, tokens, caches, layer, widths)
            else:  # `mtp.rows` has all positions, which a next layer reads
                out = (mtp.step if last else mtp.rows)(part, tokens, caches, layer)
            if choose is not None:
                drafts.append(choose(out.logits[:, -1]))
            inputs = out.recycled


def beneath(parts: Sequence[mx.array | None]) -> mx.array | None:
    """Return states [rows, n, dim] of all parts, stacked and padded; None: no states.

    A part that is None becomes one row of padding.
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
    """Return each text's ids from `firsts` on, then `drafts`, [rows, max(widths)]."""
    known = [
        text[first : first + width]
        for text, first, width in zip(texts, firsts, widths, strict=True)
    ]
    counts = [*map(len, known)]
    rows = [row + [0] * (max(counts) - len(row)) for row in known]
    ids = mx.array(rows, mx.uint32)
    if drafts:
        late = [max(0, n) for n in less(firsts, [*map(len, texts)])]
        joined = _followed_by(ids, counts, mx.stack(drafts, axis=1), late)
        return joined[:, : max(widths)]
    return ids


def _followed_by(
    first: mx.array,
    counts: Sequence[int],
    second: mx.array,
    late: Sequence[int] = (),
) -> mx.array:
    """Return for each row `counts` columns of `first`, then the columns of `second`.

    `late` is how many of the first columns of `second` a row leaves out; empty: none.
    """
    both = mx.concatenate([first, second], axis=1)
    size, columns = first.shape[1], np.arange(both.shape[1])
    if min(counts) == size and not any(late):
        return both
    kept = np.array(counts)[:, None]
    moved = columns + size - kept + np.array(late or [0])[:, None]
    return _taken(both, np.where(columns < kept, columns, moved))


def cut(
    array: mx.array | None, starts: Sequence[int], counts: Sequence[int]
) -> mx.array | None:
    """Return `counts` columns of each row from `starts` on; None: no columns."""
    if array is None or not max(counts):
        return None
    if len(set(starts)) == 1:  # after a shorter row's columns any values can follow
        return array[:, starts[0] : starts[0] + max(counts)]
    return _taken(array, np.array(starts)[:, None] + np.arange(max(counts)))


def _taken(array: mx.array, places: NDArray[np.int64]) -> mx.array:
    """Return columns of each row; a place past the row's end gives its last column."""
    columns = mx.array(np.minimum(places, array.shape[1] - 1))
    return array[mx.arange(len(places))[:, None], columns]


def less(numbers: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the differences, as many as the shorter sequence has numbers."""
    return [*map(sub, numbers, others)]
