"""Base of draft heads: MTP heads, EAGLE heads and DFlash drafters on their targets.

A head has a KV cache of its own. Position m of it pairs the target's hidden state at
m with token m + 1 of the text.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache


class ChooseNext(Protocol):
    """Chooses the next draft, of one text or of many."""

    def __call__(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return the tokens, [texts], that are chosen from logits [texts, n].

        Args:
            logits: for the next draft.
            ids: the token ids of the columns, uint32 [n], or of each text [texts, n];
                the head's when omitted.
        """
        ...


class Ends(Protocol):
    """The two ends of a target; `HiddenStates` has them."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return embeddings [batch, positions, dim] of ids [batch, positions]."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits of states after the norm."""
        ...


class HeadOutput(NamedTuple):
    """Output of a head for some positions of its cache."""

    recycled: mx.array  # the states that go into its next step, [batch, positions, dim]
    logits: mx.array  # for the token after next, [batch, positions, vocab]


class HeadState(NamedTuple):
    """Positions that a head's caches hold of a text."""

    ends: tuple[int, ...]  # for each layer, the position that comes next
    # For each layer, what the layer before made of positions from there to its own end,
    # [1, positions, dim]; None: no positions
    waiting: tuple[mx.array | None, ...]


class HeadOnTarget(ABC):
    """A head on its target: how positions of its cache are run.

    Attributes:
        head: the head: `chained`, whether each of its layers makes one draft of a
            chain; `depth`, the most drafts that it is good for, or None; `new_caches()`
            makes a list of caches for each layer.
    """

    head: Any

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run all positions to the end.

        Args:
            hidden: [batch, positions, dim]; at i the target's state at i, or the head's
                own one.
            tokens: ids [batch, positions]; position i has the token at i + 1, in a
                chain that at i + 1 + layer.
            caches: those of the layer; the positions are written to them.
            layer: which layer of the head.
        """
        return self._output(layer, self._run(layer, hidden, tokens, caches))

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run the last position to the end, those before it for keys and values only.

        Takes what `rows` takes, and returns one position.
        """
        if tokens.shape[1] > 1:
            self.history(hidden[:, :-1], tokens[:, :-1], caches, layer)
        return self.rows(hidden[:, -1:], tokens[:, -1:], caches, layer)

    def ragged(
        self,
        hidden: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        layer: int,
        counts: Sequence[int],
    ) -> HeadOutput:
        """Run the first `counts` positions of each text, with logits of their last.

        Takes what `rows` takes, and returns one position of logits. What follows the
        first ones is padding.
        """
        states = self._run(layer, hidden, tokens, caches)
        places = mx.array([max(0, count - 1) for count in counts])
        last = states[mx.arange(len(counts)), places][:, None]
        recycled = self._output(layer, states).recycled  # its logits are not evaluated
        return HeadOutput(recycled, self._output(layer, last).logits)

    def draft(
        self,
        hidden: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Write positions, and draft behind them one by one; see `ParallelHead`."""
        for _ in range(count):
            out = self.step(hidden, tokens, caches)
            tokens = choose(out.logits[:, -1])[:, None]
            hidden = out.recycled[:, -1:]

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        """Write the keys and values of positions; takes what `rows` takes.

        What else is built is never evaluated.
        """
        self._run(layer, hidden, tokens, caches)

    @abstractmethod
    def _run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        """Return the states of positions before the norm, and write to the caches."""

    @abstractmethod
    def _output(self, layer: int, states: mx.array) -> HeadOutput:
        """Return what the head makes of states before the norm."""


class ParallelHead(Protocol):
    """A head on its target that makes all drafts in one forward, or in its own way."""

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


def fed_again(layers: Sequence[Sequence[Any]]) -> int:
    """Return how many tokens before a point are fed again when a head goes on there.

    One for each layer of a chain; where all caches hold windows, of which no rows are
    kept, as many more as these see one through the other. A head with windows and full
    attention begins its history there: its rows follow from all tokens before.
    """
    sizes = [getattr(cache, "max_size", 0) for caches in layers for cache in caches]
    return len(layers) + (sum(sizes) if all(sizes) else 0)


def first_rows(caches: Sequence[Any], rows: int) -> tuple[list[Any], int] | None:
    """Return views of caches that end after so many rows, and their number.

    None where one of them is of a kind that cannot end anywhere.
    """
    views = [_view(cache, rows) for cache in caches]
    return None if None in views else (views, rows)


def _view(cache: Any, rows: int) -> Any:
    """Return a cache over the same arrays that holds so many rows; None: it cannot."""
    if type(cache) is CacheList:
        inner = [_view(each, rows) for each in cache.caches]
        return None if None in inner else CacheList(*inner)
    if type(cache) is not KVCache:
        return None
    view = copy.copy(cache)
    view.offset = min(cache.offset, rows)
    return view
