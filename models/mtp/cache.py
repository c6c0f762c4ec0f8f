"""The KV cache of an MTP head: the positions that it holds, and rounds over the next.

With n known positions of committed text, a round over positions m to n - 1 of a head
with one layer writes them, and then as many positions of drafts as are asked for. A
commit keeps positions m to n - 1: they stay whatever is accepted, since they are of
committed text.

In a chain of layers each has its own cache. Layer k reads the states of layer k - 1 at
the same positions and tokens k further, so of its positions the last k are of drafts,
and what they read has to wait for the next round:

    n = 6, two layers             layer 0            layer 1
    held before the round         0 to 2             0 to 1; 2 waits
    run                           3 to 5             2 to 5, 5 with a draft
    kept                          3 to 5             2 to 4; 5 waits
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.caches import (
    Snapshot,
    Speculation,
    TreeRows,
    restore,
    states,
    tree_views,
    with_slack,
)
from mlx_speculation.models.checkpoints.draft_head import (
    ChooseNext,
    HeadOnTarget,
    HeadOutput,
    HeadState,
    TokensOf,
    fed_again,
    first_rows,
)
from mlx_speculation.models.lanes import tree_forward


class MtpCache:
    """The caches of a head, from position `first` on.

    Args:
        mtp: the head on its target.
        first: the first position that they will hold.

    Attributes:
        mtp: the same.
        layers: the caches of each layer.
        state: what they hold.
    """

    def __init__(self, mtp: HeadOnTarget, first: int = 0) -> None:
        self.mtp = mtp
        layers = mtp.head.new_caches()
        layers = layers if mtp.head.chained else layers[:1]  # those that draft
        self.layers = [with_slack(caches) for caches in layers]
        self._set(HeadState((first,) * len(layers), (None,) * len(layers)))
        self._round: list[Speculation] = []
        self.first = first

    @property
    def end(self) -> int:
        """The position that comes next."""
        return self.state.ends[0]

    @property
    def lag(self) -> int:
        """Positions by which a layer of a chain lags the first one."""
        return self.end - min(self.state.ends)

    @property
    def caches(self) -> list[Any]:
        """The caches of the first layer, which makes all drafts but in a chain."""
        return self.layers[0]

    @property
    def held(self) -> list[Any]:
        """The caches, and states that wait, for a count of bytes."""
        return [self.layers, self.state.waiting]

    @property
    def again(self) -> int:
        """The number of last tokens that are fed again; see `fed_again`."""
        return fed_again(self.layers)

    def kept(self) -> tuple[list[Any], int] | None:
        """Return caches and how many rows each holds, from the first position on.

        None where they do not begin there, or hold a window.
        """
        rows = min(self.state.ends)
        flat = [cache for caches in self.layers for cache in caches]
        return None if self.first else first_rows(flat, rows)

    def resume(self, snapshot: Snapshot) -> None:
        """Hold the rows that `kept` has returned, of a beginning of the text."""
        restore(snapshot, [cache for caches in self.layers for cache in caches])
        layers = len(self.layers)
        self._set(HeadState((snapshot.stop,) * layers, (None,) * layers))

    def take(self, layers: list[list[Any]], state: HeadState) -> None:
        """Hold other caches in place of these."""
        self.layers = [with_slack(caches) for caches in layers]
        self._set(state)

    def _set(self, state: HeadState) -> None:
        self.state = self._before = self._after = state

    def feed(self, hidden: mx.array, stop: int, tokens_of: TokensOf) -> None:
        """Write positions to all layers, and keep them, or none; see `HeadCache`."""
        try:
            self._feed(hidden, stop, tokens_of)
        except BaseException:
            self.rollback()
            raise
        self._round, self._before = [], self.state

    def _feed(self, hidden: mx.array, stop: int, tokens_of: TokensOf) -> None:
        state = self._before = self._after = self.state
        inputs: mx.array | None = hidden
        ends, waiting, self._round = list(state.ends), list(state.waiting), []
        for layer, caches in enumerate(self.layers):
            if layer:
                inputs = _joined(waiting[layer], inputs)
            width = max(0, stop - layer - ends[layer])
            last = layer == len(ends) - 1
            speculation = Speculation(caches, whole=True)
            self._round.append(speculation)
            rest = None if inputs is None else _some(inputs[:, width:])
            made: mx.array | None = None
            if inputs is not None and width:
                tokens = tokens_of(layer, ends[layer], width)
                part = inputs[:, :width]
                if last:
                    self.mtp.history(part, tokens, speculation.caches, layer)
                else:
                    out = self.mtp.rows(part, tokens, speculation.caches, layer)
                    made = out.recycled
            waiting[layer] = rest if layer else None
            ends[layer] += width
            inputs = made
        self._after = HeadState(tuple(ends), tuple(waiting))
        self.commit()
        held_arrays = [array for array in waiting if array is not None]
        mx.eval([states(caches) for caches in self.layers], held_arrays)

    def draft(
        self,
        hidden: mx.array,
        stop: int,
        tokens_of: TokensOf,
        choose: ChooseNext,
        count: int,
    ) -> None:
        """Open a round; see `HeadCache`."""
        state, head = self.state, self.mtp.head
        ends, waiting = list(state.ends), list(state.waiting)
        layers = count if head.chained else 1
        self._round, self._before, self._after = [], state, state
        inputs, out, token = hidden, None, None
        for layer in range(layers):
            joined = _joined(waiting[layer], inputs) if layer else inputs
            assert joined is not None
            speculation = Speculation(self.layers[layer], key_steps=True)
            self._round.append(speculation)
            # Whole rows where the next layer reads them, in this round or a later one.
            whole = layer + 1 < len(ends)
            run = self.mtp.rows if whole else self.mtp.step
            tokens = tokens_of(layer, ends[layer], joined.shape[1])
            out = run(joined, tokens, speculation.caches, layer)
            token = choose(out.logits[:, -1])
            end = max(ends[layer], stop - layer)
            if layer:
                start = ends[layer]
                waiting[layer] = _some(joined[:, end - start : ends[layer - 1] - start])
            ends[layer], inputs = end, out.recycled
        if layers < len(ends):
            joined = _joined(waiting[layers], inputs)
            assert joined is not None
            waiting[layers] = _some(joined[:, : ends[layers - 1] - ends[layers]])
        self._after = HeadState(tuple(ends), tuple(waiting))
        for _ in range(layers, count):
            assert out is not None
            assert token is not None
            out = self._again(out, token)
            token = choose(out.logits[:, -1])

    def draft_tree(
        self, hidden: mx.array, stop: int, tokens_of: TokensOf
    ) -> "TreeRound":
        """Open a round as `draft` does, of a head that is no chain; see `TreeRound`."""
        state = self.state
        self._before = self._after = state
        speculation = Speculation(self.layers[0], key_steps=True)
        self._round = [speculation]
        tokens = tokens_of(0, state.ends[0], hidden.shape[1])
        out = self.mtp.step(hidden, tokens, speculation.caches, 0)
        self._after = HeadState((max(state.ends[0], stop),), (None,))
        return TreeRound(self.mtp, speculation, out)

    def commit(self) -> None:
        """Keep what of the round is of committed text."""
        for layer, speculation in enumerate(self._round):
            speculation.commit(self._after.ends[layer] - self.state.ends[layer])
        self._before, self.state = self.state, self._after

    def rollback(self) -> None:
        """Undo the round, also after its commit. Never raises."""
        for speculation in self._round:
            speculation.rollback()
        if self.state is self._after:
            self.state = self._before
        self._after = self.state
        self._round = []

    def _again(self, out: HeadOutput, token: mx.array) -> HeadOutput:
        """Run the position of a draft: the head's own state, and the draft."""
        caches = self._round[0].caches
        return self.mtp.step(out.recycled[:, -1:], token[None], caches)


class TreeRound:
    """The nodes of a tree behind the newest position, level by level.

    All nodes of a level stand at one position. They are written one level behind the
    other, and see the committed positions and their ancestors.

    Args:
        mtp: the head on its target.
        speculation: of its caches, which committed positions were written to.
        out: what the newest position has given.

    Attributes:
        logits: of the nodes that were run last, [nodes, vocab]; of the root at first.
    """

    def __init__(
        self, mtp: HeadOnTarget, speculation: Speculation, out: HeadOutput
    ) -> None:
        self._mtp, self.layers = mtp, speculation.caches
        self._recycled = out.recycled[:, -1:]
        self.logits = out.logits[:, -1]
        self._level = self._columns = 0

    def run(self, tokens: mx.array, above: mx.array, seen: mx.array) -> None:
        """Run the nodes of the next level.

        Args:
            tokens: uint32 [1, nodes].
            above: int32 [nodes], which of the nodes that were run before each one
                follows; of the first level all 0.
            seen: bool [nodes, columns], which of the columns that hold nodes each one
                sees, its own among them.
        """
        depths = mx.zeros(tokens.shape[1], mx.int32)
        rows = TreeRows(seen, depths, self._level - self._columns)
        hidden = self._recycled[:, above]
        with tree_forward(rows):
            out = self._mtp.rows(hidden, tokens, tree_views(self.layers, rows))
        self._recycled, self.logits = out.recycled, out.logits[0]
        self._level, self._columns = self._level + 1, seen.shape[1]


def _joined(first: mx.array | None, second: mx.array | None) -> mx.array | None:
    if first is None or second is None:
        return second if first is None else first
    return mx.concatenate([first, second], axis=1)


def _some(array: mx.array) -> mx.array | None:
    return array if array.shape[1] else None
