"""What draft heads share: MTP heads, EAGLE heads and DFlash drafters on their targets.

A head has a KV cache of its own. Position m of it pairs the target's hidden state at
m with token m + 1 of the text.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

# (layer, first position, count) -> token ids [1, count] that the layer pairs with them
TokensOf = Callable[[int, int, int], mx.array]
ChooseNext = Callable[[mx.array], tuple[mx.array, bool]]


class Ends(Protocol):
    """The two ends of a target; `HiddenStates` has them."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return embeddings [batch, positions, dim] of ids [batch, positions]."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits of states after the norm."""
        ...


class HeadOutput(NamedTuple):
    """What a head makes of some positions of its cache.

    Attributes:
        recycled: the states that go into its next step, [batch, positions, dim].
        logits: for the token after next, [batch, positions, vocab].
    """

    recycled: mx.array
    logits: mx.array


class DraftHead(Protocol):
    """What a cache needs to know of a head."""

    @property
    def chained(self) -> bool:
        """Whether each layer makes one draft of a chain."""
        ...

    @property
    def depth(self) -> int | None:
        """The most drafts that it is good for."""
        ...

    def new_caches(self) -> list[list[Any]]:
        """Return new caches, a list for each layer."""
        ...


class HeadOnTarget(Protocol):
    """A head on its target: an `Mtp`, or what takes its place."""

    @property
    def head(self) -> DraftHead:
        """The head."""
        ...

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run all positions to the end; see `Mtp.rows`."""
        ...

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run the last position to the end; see `Mtp.step`."""
        ...

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        """Write the keys and values of positions; see `Mtp.history`."""
        ...


class HeadCache(Protocol):
    """The caches of a head, and rounds over the positions that follow: `MtpCache`.

    Attributes:
        first: the first position that they hold.
    """

    first: int

    @property
    def end(self) -> int:
        """The position that comes next."""
        ...

    @property
    def lag(self) -> int:
        """How many positions a layer is behind the first one."""
        ...

    @property
    def held(self) -> list[Any]:
        """Everything that they hold, for a count of bytes."""
        ...

    def feed(self, hidden: mx.array, stop: int, tokens_of: TokensOf) -> None:
        """Write positions of committed text, and keep them."""
        ...

    def draft(
        self,
        hidden: mx.array,
        stop: int,
        tokens_of: TokensOf,
        choose: ChooseNext,
        count: int,
    ) -> None:
        """Open a round: write positions of committed text, and draft behind them."""
        ...

    def commit(self) -> None:
        """Keep what of the round is of committed text."""
        ...

    def rollback(self) -> None:
        """Undo the round, also after its commit. Never raises."""
        ...
