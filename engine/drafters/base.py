"""`Drafter` and `OpenDrafter`, and the `Proposal` that they make."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Choice, Rows


class Choose(Protocol):
    """The function with which a drafter chooses tokens; see `Verifier.propose`."""

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        """Choose one token per row of logits [rows, vocab], or [rows, n] for `ids` [n].

        `rows` is `sequence.rows(ahead)`, where `ahead` holds the tokens of this draft
        so far, integers [m], or is None if there are none yet.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The edges of a proposal that is a tree.

    Attributes:
        parents: integers [k], for each token the index of its parent, which is smaller
            than the token's index; -1: the token follows the known tokens.
        levels: how many levels can be accepted; children of the known text are level 1.
    """

    parents: mx.array
    levels: int


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Proposed tokens, which stay on the device.

    Attributes:
        tokens: uint32 [k].
        probs: float32 [k, ids], the probabilities that `choose` returned with each
            token; None: `choose` returned none, or was not called.
        source: the kind of drafter; the statistics count by kind.
        reads: how often the host waited for the device while drafting.
        branches: the edges of a tree, in which the likeliest path should come first;
            allowed only if `choose.tree` is above 0 (`CheckedChoose`). None: a chain.
        survival: for each token, the probability that it and all tokens before it are
            accepted; the engine may leave out improbable last tokens. None: not known.
    """

    tokens: mx.array
    probs: mx.array | None = None
    source: str = "drafter"
    reads: int = 0
    branches: Branches | None = None
    survival: SequenceOf[float] | None = None

    @classmethod
    def of(
        cls, chosen: SequenceOf[Choice], *, source: str = "drafter", reads: int = 0
    ) -> "Proposal":
        """Return the proposal of these choices, at least one, in order."""
        tokens = mx.concatenate([one.tokens for one in chosen])
        probs = [one.probs for one in chosen if one.probs is not None]
        return cls(tokens, mx.concatenate(probs) if probs else None, source, reads)

    def without_first(self, count: int) -> "Proposal":
        """Return the proposal without its first `count` tokens."""
        probs = None if self.probs is None else self.probs[count:]
        return replace(self, tokens=self.tokens[count:], probs=probs)

    def until(self, count: int) -> "Proposal":
        """Return the first `count` tokens of a chain."""
        if count >= self.length:
            return self
        probs = None if self.probs is None else self.probs[:count]
        survival = None if self.survival is None else self.survival[:count]
        tokens = self.tokens[:count]
        return replace(self, tokens=tokens, probs=probs, survival=survival)

    @property
    def length(self) -> int:
        """Number of proposed tokens."""
        return self.tokens.shape[0]


# The proposal of a drafter that proposes nothing, such as a disabled one.
NOTHING = Proposal(mx.array([], mx.uint32), source="nothing")


def rectangle(drafts: SequenceOf[Proposal]) -> mx.array | None:
    """Return the tokens uint32 [requests, k], short drafts padded; None if k is 0."""
    rows, width = [], 0
    for draft in drafts:
        width = max(width, len(draft.tokens))
    for draft in drafts:
        more = width - len(draft.tokens)
        rows.append(mx.pad(draft.tokens, (0, more)) if more else draft.tokens)
    if not width:
        return None
    return mx.stack(rows) if len(rows) > 1 else rows[0][None]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one open stream at a time.

    `begin` comes first. A round that asks for a draft calls `propose`, then `settle`,
    or `discard` if the draft was not verified, such as an empty one. Other rounds call
    no method, so a drafter has to learn from the sequence which tokens are new. A
    drafter that breaks this contract is disabled for the rest of the stream, see
    `engine.drafters.fault_guard`.
    """

    def begin(self, sequence: Sequence) -> None:
        """Start a new sequence, and forget the previous one. Called by prefill."""
        return

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose at most `limit` tokens that follow the sequence, or none.

        `choose` applies the request's filters and noise. A drafter samples only by
        calling `choose`, and returns the probabilities that `choose` gave it. Committed
        state does not change until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens.

        If this method raises, `discard` is called, and the drafter is disabled.
        """
        return

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        return


class OpenDrafter(Drafter):
    """The drafter of one stream, with all methods and properties the engine uses.

    The defaults fit a drafter that has no model and no head and proposes nothing.
    """

    @property
    def name(self) -> str:
        """The drafter's name in reports of its faults."""
        return type(self).__name__

    @property
    def disabled(self) -> bool:
        """Return whether the drafter has failed and is not used any more."""
        return False

    @property
    def free(self) -> bool:
        """Return whether proposals cost nothing and have a survival for each token."""
        return False

    @property
    def lanes(self) -> SequenceOf[Lane | None]:
        """The lanes of the drafter's draft models, in order.

        None stands for a lane that holds other tokens than the target's, and for the
        lane of a disabled drafter.
        """
        return ()

    @property
    def held(self) -> SequenceOf[Any]:
        """The arrays and caches that the drafter holds, for a count of bytes."""
        return ()

    @property
    def prefix_head(self) -> Any:
        """The `MtpDrafter` whose cache rows a `PrefixCache` may keep; None: no head."""
        return None

    @property
    def shared(self) -> "OpenDrafter":
        """The drafter that can draft for a whole batch, if any: itself, or a member."""
        return self

    @property
    def batch_lane(self) -> Lane | None:
        """The lane of a draft model that can draft for a whole batch; else None."""
        return None

    @property
    def batch_head(self) -> Any:
        """The `MtpDrafter` of a head that can draft for a whole batch; else None."""
        return None

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Read a part of the prompt, so that `begin` takes less time.

        Args:
            sequence: the sequence that `begin` will get; it may have grown by then.
            fits: returns whether a chunk of n tokens may be read now.

        Returns:
            Whether hardly anything is left for `begin` to read.
        """
        return True

    def forecast(self, sequence: Sequence, limit: int) -> SequenceOf[float] | None:
        """Predict the survival of a proposal of `limit` tokens, see `Proposal`.

        The forecast may depend on the known tokens and on the acceptance of earlier
        proposals; it must not wait for a device. None: use the average acceptance.
        """
        return None

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose nothing; see `Drafter`."""
        return NOTHING

    def fail(self, call: str, error: Exception) -> None:
        """Disable the drafter for a fault that the caller found; see `FaultGuard`."""

    def let_go(self) -> None:
        """Release the caches and states of a head; see `MtpDrafter`."""

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Keep the tokens of a finished stream, for lookups of later streams.

        Args:
            tokens: prompt and output.
            answer: the index in `tokens` at which the output begins.
        """


class WrappedDrafter(OpenDrafter):
    """A wrapper of a drafter.

    Attributes are those of `inner`, except `shared` and what a subclass overrides.
    """

    def __init__(self, inner: OpenDrafter) -> None:
        self.inner = inner


for _name in {name for name in dir(OpenDrafter) if name[0] != "_"} - {"shared"}:
    setattr(WrappedDrafter, _name, property(attrgetter(f"inner.{_name}")))


class DraftChain:
    """A draft without branches, chosen token by token."""

    def __init__(self, choose: Choose, sequence: Sequence) -> None:
        self._choose, self._sequence = choose, sequence
        self.chosen: list[Choice] = []
        self._tokens: list[mx.array] = []

    def add(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Choose the next token from logits [1, vocab], or [1, n] for `ids` [n].

        Returns:
            The token, uint32 [1], which is computed while the next graph is built.
        """
        ahead = mx.concatenate(self._tokens) if self._tokens else None
        self.chosen.append(self._choose(logits, self._sequence.rows(ahead), ids))
        token = self.chosen[-1].tokens
        self._tokens.append(token)
        mx.async_eval(token)
        return token
