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
    """The function that a drafter chooses tokens with; see `Verifier.propose`."""

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        """Choose one token per row of logits [rows, vocab], or [rows, n] of `ids`.

        `rows` is `sequence.rows(ahead)`: what precedes the row. `ahead` holds the
        tokens that this draft has chosen before it, integers [m]; None at the first.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The edges of a proposal that is a tree.

    Attributes:
        parents: integers [k], of each token the one that it follows, which comes before
            it; -1: it follows the known tokens.
        levels: no token that is deeper is accepted; from 1.
    """

    parents: mx.array
    levels: int


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Proposed tokens, not read back to the host.

    Attributes:
        tokens: uint32 [k].
        probs: float32 [k, ids], the probabilities that `choose` returned with each
            token; None where it returned none, or was not asked.
        source: the kind of drafter, which the statistics count by.
        reads: how often the host waited for the device while drafting.
        branches: where it is a tree, which may be proposed if `choose.tree` is not 0.
            Those that come first should be the likeliest path. None: a chain.
        survival: of each token, the chance that it and those before it are accepted;
            shorter where the rest is improbable. None: not known.
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
        """Return the draft of these choices, at least one, in order."""
        tokens = mx.concatenate([one.tokens for one in chosen])
        probs = [one.probs for one in chosen if one.probs is not None]
        return cls(tokens, mx.concatenate(probs) if probs else None, source, reads)

    def without_first(self, count: int) -> "Proposal":
        """Return the proposal without its first `count` tokens."""
        probs = None if self.probs is None else self.probs[count:]
        return replace(self, tokens=self.tokens[count:], probs=probs)

    def until(self, count: int) -> "Proposal":
        """Return its first tokens, of a chain."""
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


# Of a drafter that is not asked any more.
NOTHING = Proposal(mx.array([], mx.uint32), source="nothing")


def rectangle(drafts: SequenceOf[Proposal]) -> mx.array | None:
    """Return drafted tokens uint32 [requests, k], shorter ones padded; None: k is 0."""
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

    `begin` comes first. The calls of a round are `propose`, then `settle` or
    `discard`, also when nothing was proposed. Rounds in which no draft is wanted make
    no call, so a drafter finds its place from the sequence. One that breaks its
    promises is disabled for the rest of the stream, see `engine.drafters.fault_guard`.
    """

    def begin(self, sequence: Sequence) -> None:
        """Start on a new sequence, and forget the last one. Called by prefill."""
        return

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose at most `limit` tokens that follow the sequence; none is an answer.

        `choose` holds the request's filters and noise; a drafter draws nothing itself,
        and returns the probabilities that `choose` returns. Committed state stays as
        it was until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens. If it fails, it has kept none."""
        return

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        return


class OpenDrafter(Drafter):
    """The drafter of one stream, as the engine sees it: a `Drafter`, and more.

    The defaults are those of a drafter without a model or a head, with nothing to
    propose and nothing to undo.
    """

    @property
    def name(self) -> str:
        """The name of what drafts, for reports of its faults."""
        return type(self).__name__

    @property
    def disabled(self) -> bool:
        """Return whether it has failed, and is not asked any more."""
        return False

    @property
    def free(self) -> bool:
        """Return whether it proposes at no cost, with a probability for each token."""
        return False

    @property
    def lanes(self) -> SequenceOf[Lane | None]:
        """The lanes of its draft models, in order.

        None stands for a lane that holds other tokens, or that of a disabled drafter.
        """
        return ()

    @property
    def held(self) -> SequenceOf[Any]:
        """The arrays and caches that it holds, for a count of bytes."""
        return ()

    @property
    def prefix_head(self) -> Any:
        """The head that reads the target's states, see `MtpDrafter`; None: no head.

        It has `again` and `committed`, and `kept`, `level` and `resume` if rows of its
        own are kept.
        """
        return None

    @property
    def shared(self) -> "OpenDrafter":
        """The drafter that the rows of a batch may share: itself, or a member."""
        return self

    @property
    def batch_lane(self) -> Lane | None:
        """Its lane, if one model can draft like it for all rows of a batch."""
        return None

    @property
    def batch_head(self) -> Any:
        """Its head, an `MtpDrafter`, if rows of a batch can share it."""
        return None

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Read of the sequence what fits, before a `begin` that may take long.

        Args:
            sequence: the one that `begin` will get; it may have grown by then.
            fits: asked whether a chunk of so many tokens may be read now.

        Returns:
            Whether `begin` has next to nothing left to read.
        """
        return True

    def forecast(self, sequence: Sequence, limit: int) -> SequenceOf[float] | None:
        """Return the survival of a proposal of `limit` tokens that is not made yet.

        It may depend on the known tokens and on what was accepted of earlier ones, and
        waits for no device. None: the rates at which its tokens were accepted tell.
        """
        return None

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose nothing; see `Drafter`."""
        return NOTHING

    def fail(self, call: str, error: Exception) -> None:
        """Disable it for a fault that was met elsewhere; see `FaultGuard`."""

    def let_go(self) -> None:
        """Let go of what a head holds; see `MtpDrafter`."""

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Keep a finished stream to look later ones up in.

        Args:
            tokens: prompt and output.
            answer: where the output begins.
        """


class WrappedDrafter(OpenDrafter):
    """A drafter around another: members that are not overridden are the other's."""

    def __init__(self, inner: OpenDrafter) -> None:
        self.inner = inner


for _name in {name for name in dir(OpenDrafter) if name[0] != "_"} - {"shared"}:
    setattr(WrappedDrafter, _name, property(attrgetter(f"inner.{_name}")))


class DraftChain:
    """A draft that is chosen token by token, each behind those before it."""

    def __init__(self, choose: Choose, sequence: Sequence) -> None:
        self._choose, self._sequence = choose, sequence
        self.chosen: list[Choice] = []

    def add(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Choose from logits [1, vocab], or [1, n] of some ids.

        Returns:
            The token, uint32 [1], which is computed while the next graph is built.
        """
        ahead = Proposal.of(self.chosen).tokens if self.chosen else None
        self.chosen.append(self._choose(logits, self._sequence.rows(ahead), ids))
        token = self.chosen[-1].tokens
        mx.async_eval(token)
        return token
