"""What proposes tokens."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.engine.masking import Masks
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Chosen, Rows, Verifier


class Choose(Protocol):
    """What a drafter chooses with; see `Verifier.propose`."""

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Chosen:
        """Choose one token per row of logits [rows, vocab], or [rows, n] of `ids`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Proposed tokens, not read back to the host.

    Attributes:
        tokens: uint32 [k].
        probs: float32 [k, ids], the laws that `choose` named, one for each token; None
            where it named none, or where `choose` was not asked.
        source: the kind of drafter, which the statistics count by.
        reads: how often the host waited for the device while drafting.
    """

    tokens: mx.array
    probs: mx.array | None = None
    source: str = "drafter"
    reads: int = 0

    @classmethod
    def of(
        cls, chosen: SequenceOf[Chosen], *, source: str = "drafter", reads: int = 0
    ) -> "Draft":
        """Return the draft of these choices, at least one, in order."""
        tokens = mx.concatenate([one.tokens for one in chosen])
        laws = [one.probs for one in chosen if one.probs is not None]
        return cls(tokens, mx.concatenate(laws) if laws else None, source, reads)

    def behind(self, count: int) -> "Draft":
        """Return the draft without its first tokens."""
        probs = None if self.probs is None else self.probs[count:]
        return replace(self, tokens=self.tokens[count:], probs=probs)

    @property
    def length(self) -> int:
        """How many tokens were proposed."""
        return self.tokens.shape[0]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one open stream at a time.

    `begin` comes first. The calls of a round are `propose`, then `settle` or
    `discard`, also when nothing was proposed. Rounds in which no draft is wanted make
    no call, so a drafter finds its place from the sequence.
    """

    def begin(self, sequence: Sequence) -> None:
        """Start on a new sequence, and forget the last one. Called by prefill."""
        ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Propose at most `limit` tokens that follow the sequence; none is an answer.

        `choose` holds the request's filters and noise; a drafter draws nothing
        itself, and names the laws that `choose` names. Committed state stays as it
        was until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens. If it fails, it has kept none."""
        ...

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        ...


class Choices:
    """The choices of one draft, for a drafter, and the check of what it made of them.

    Args:
        verifier: chooses for the request.
        masks: what its constraint allows, if it has one.
    """

    def __init__(self, verifier: Verifier, masks: Masks | None = None) -> None:
        self._verifier = verifier
        self._masks = masks
        self._drew = False

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Chosen:
        """Choose; see `Choose`."""
        if self._masks is not None:
            rows = self._masks.on_draft(logits, rows, ids)
        chosen = self._verifier.propose(logits, rows, ids)
        self._drew = self._drew or chosen.probs is not None
        return chosen

    def checked(self, draft: Draft, limit: int) -> Draft:
        """Return the draft with ids that the target has a row for.

        Which ids a drafter proposes by no chance cannot change the text, but an id
        without a row in the target's embedding would be read from outside of it.

        Raises:
            InvalidRequestError: the draft is too long, or the laws of its draws, which
                decide what is accepted, are not all there.
        """
        if draft.length > limit:
            raise InvalidRequestError(
                f"The drafter proposed {draft.length} tokens, and at most {limit} were "
                "asked for. Mend its propose()."
            )
        chooser = self._verifier.chooser
        laws = None if draft.probs is None else draft.probs.shape
        if self._drew and laws != (draft.length, chooser.width):
            raise InvalidRequestError(
                f"The drafter drew tokens by chance, and their laws are of shape "
                f"{laws} instead of {(draft.length, chooser.width)}. Return "
                "Draft.of(choices) with every choice, or choose none of them by chance."
            )
        tokens = mx.clip(draft.tokens, 0, chooser.limit - 1).astype(mx.uint32)
        return replace(draft, tokens=tokens)
