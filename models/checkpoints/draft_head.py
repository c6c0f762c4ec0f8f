"""Base of draft heads: MTP heads, EAGLE heads and DFlash drafters on their targets.

A head has a KV cache of its own. Position m of this cache pairs the target's hidden
state at position m with token m + 1 of the text.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache


class ChooseNext(Protocol):
    """Chooses the next drafted token, for one text or several."""

    def __call__(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Choose tokens [texts] from logits [texts, n].

        `ids` are the token ids of the columns, uint32 [n], or [texts, n] if they differ
        between texts; None: the ids that the head drafts from.
        """
        ...


class Ends(Protocol):
    """The embedding and the output layer of a target, as `HiddenStates` has them."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return embeddings [batch, positions, dim] of ids [batch, positions]."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits of normed states."""
        ...


class HeadOutput(NamedTuple):
    """Output of a head for some positions of its cache."""

    recycled: mx.array  # the states for its next step, [batch, positions, dim]
    logits: mx.array  # at i, for token i + 2; [batch, positions, vocab]


class HeadState(NamedTuple):
    """State of a head's caches for one text."""

    ends: tuple[int, ...]  # for each layer, the position that comes next
    # For each layer, the previous layer's states [1, positions, dim] at the positions
    # that the previous layer has run and this layer has not; None: no positions
    waiting: tuple[mx.array | None, ...]


class HeadOnTarget(ABC):
    """A head on its target: runs positions, and writes them to the caches.

    `head.chained` says whether the layers form a chain: layer k drafts token k of a
    round. `head.depth` is the largest number of drafted tokens in a round; None: no
    limit. `head.new_caches()` makes a list of caches for each layer.
    """

    head: Any

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Write positions to a layer's caches, and return the layer's output for them.

        `hidden` are states of the target, or recycled ones of the head, [batch,
        positions, dim]. `tokens` are ids [batch, positions]: the token after each
        position of the text. In a chain they are the tokens `layer` places further on.
        """
        return self._output(layer, self._run(layer, hidden, tokens, caches))

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Return the output for the last position; earlier ones only fill the caches.

        The arguments are those of `rows`.
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
        """Run the first `counts[i]` positions of text i; the rest is padding.

        The other arguments are those of `rows`. The logits are those of each text's
        last position, [texts, 1, vocab].
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
        """Write positions, then draft tokens one by one.

        The arguments are those of `ParallelHead.draft`.
        """
        for _ in range(count):
            out = self.step(hidden, tokens, caches)
            tokens = choose(out.logits[:, -1])[:, None]
            hidden = out.recycled[:, -1:]

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        """Write the keys and values of positions; the arguments are those of `rows`.

        The rest of the forward is never evaluated.
        """
        self._run(layer, hidden, tokens, caches)

    @abstractmethod
    def _run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        """Return the states before the head's norm; write positions to the caches."""

    @abstractmethod
    def _output(self, layer: int, states: mx.array) -> HeadOutput:
        """Return the head's output for the states that `_run` returns."""


class ParallelHead(Protocol):
    """A head on its target that drafts in its own way, for example in one forward."""

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> None:
        """Write the keys and values of positions of committed text to the caches.

        `hidden` are the head's input states, [texts, positions, dim]. `tokens` has the
        id of the token after each position, [texts, positions].
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
        """Write positions of committed text, at least one, and draft after them.

        `hidden` and `tokens` are as in `history`, and the last token is the newest one.
        Drafted positions are written too. `count` is the number of tokens to draft, at
        most the head's depth. `choose` is called for each drafted token in turn.
        """
        ...


def fed_again(layers: Sequence[Sequence[Any]]) -> int:
    """Return how many tokens before a point are fed again when a head resumes there.

    That is one token for each layer. If all caches are sliding windows, none of their
    rows are kept, so the sum of the window sizes is added: the layers together look
    back that far. If only some caches are windows, the head would have to read the
    whole text again, because of its layers with full attention. Instead it resumes
    without the earlier text.
    """
    sizes = [getattr(cache, "max_size", 0) for caches in layers for cache in caches]
    return len(layers) + (sum(sizes) if all(sizes) else 0)


def first_rows(caches: Sequence[Any], rows: int) -> tuple[list[Any], int] | None:
    """Return views of each cache's first `rows` rows, and `rows`.

    None: a cache is of a kind without views.
    """
    views = [_view(cache, rows) for cache in caches]
    return None if None in views else (views, rows)


def _view(cache: Any, rows: int) -> Any:
    if type(cache) is CacheList:
        inner = [_view(each, rows) for each in cache.caches]
        return None if None in inner else CacheList(*inner)
    if type(cache) is not KVCache:
        return None
    view = copy.copy(cache)
    view.offset = min(cache.offset, rows)
    return view
