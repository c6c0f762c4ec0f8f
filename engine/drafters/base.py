"""What proposes tokens in a stream, what it chooses with, and what comes of it."""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Choice, Rows, Verifier, best_children, peaks
from mlx_speculation.samplers.constraints.masks import Masks


class Choose(Protocol):
    """What a drafter chooses with; see `Verifier.propose`."""

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
    """How the tokens of a draft hang together that is a tree.

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
    """

    tokens: mx.array
    probs: mx.array | None = None
    source: str = "drafter"
    reads: int = 0
    branches: Branches | None = None

    @classmethod
    def of(
        cls, chosen: SequenceOf[Choice], *, source: str = "drafter", reads: int = 0
    ) -> "Proposal":
        """Return the draft of these choices, at least one, in order."""
        tokens = mx.concatenate([one.tokens for one in chosen])
        probs = [one.probs for one in chosen if one.probs is not None]
        return cls(tokens, mx.concatenate(probs) if probs else None, source, reads)

    def behind(self, count: int) -> "Proposal":
        """Return the draft without its first tokens."""
        probs = None if self.probs is None else self.probs[count:]
        return replace(self, tokens=self.tokens[count:], probs=probs)

    @property
    def length(self) -> int:
        """How many tokens were proposed."""
        return self.tokens.shape[0]


# Of a drafter that is not asked any more.
NOTHING = Proposal(mx.array([], mx.uint32), source="nothing")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedProposal:
    """A draft that is safe to verify, and what shows only once it is evaluated.

    Attributes:
        draft: its tokens are ids that the target has a row for.
        proposed: integers [k], the ids that the drafter proposed.
        limit: the target has a row for ids below this.
        peaks: [rows], not finite where logits that it chose from are unusable; None
            where it asked for no choice.
    """

    draft: Proposal
    proposed: mx.array
    limit: int
    peaks: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What is submitted before the target's forward."""
        arrays = [self.draft.tokens, self.proposed]
        return arrays if self.peaks is None else [*arrays, self.peaks]

    def faults(self) -> tuple[int, int]:
        """Count the unusable rows of logits, and the ids that the target lacks.

        Legal when `arrays` have been evaluated; else it waits.
        """
        peaks: Any = [] if self.peaks is None else self.peaks.tolist()
        proposed: Any = self.proposed.tolist()
        rows = len(peaks) - sum(map(math.isfinite, peaks))
        return rows, sum(not 0 <= token < self.limit for token in proposed)


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
        ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose at most `limit` tokens that follow the sequence; none is an answer.

        `choose` holds the request's filters and noise; a drafter draws nothing itself,
        and returns the probabilities that `choose` returns. Committed state stays as
        it was until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens. If it fails, it has kept none."""
        ...

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A drafter whose `begin` may take long, and be done in parts."""

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Before `begin`, read of the sequence what fits.

        Args:
            sequence: the one that `begin` will get; it may have grown by then.
            fits: asked whether a chunk of so many tokens may be read now.

        Returns:
            Whether `begin` has next to nothing left to read.
        """
        ...


def lanes_of(drafter: Any) -> list[Lane | None]:
    """Return the lanes of the draft models in a stream's drafter, in order.

    None stands for that of a disabled drafter: what it holds is not known.
    """
    return list(getattr(drafter, "lanes", ()))


def head_of(drafter: Any) -> Any:
    """Return the head in a stream's drafter that reads the target's states, or None.

    It has `again`, `kept`, `committed`, and `resume` if it keeps rows of its own; see
    `MtpDrafter`.
    """
    return getattr(drafter, "prefix_head", None)


@runtime_checkable
class Remembers(Protocol):
    """A drafter that keeps finished texts, to look later ones up in them."""

    def remember(self, tokens: SequenceOf[int]) -> None:
        """Keep prompt and output of a finished stream."""
        ...


def remember(drafter: Any, tokens: SequenceOf[int]) -> None:
    """Let a stream's drafter keep the tokens of the finished stream, if it does."""
    if isinstance(drafter, Remembers):
        drafter.remember(tokens)


class CheckedChoose:
    """A `Choose` for one draft, and the check of what the drafter made of it.

    Args:
        verifier: chooses for the request.
        masks: what its constraint allows, if it has one.
        tree: how many tokens a draft may have that is a tree; 0: it has to be a chain.

    Attributes:
        tree: as passed.
        raised: what the request's own processors or constraint have raised in here.
    """

    def __init__(
        self, verifier: Verifier, masks: Masks | None = None, tree: int = 0
    ) -> None:
        self._verifier = verifier
        self._masks = masks
        self.tree = tree
        self._drew = False
        self._seen: list[mx.array] = []  # logits, judged together at the end
        self.raised: BaseException | None = None

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        """Choose; see `Choose`.

        Raises:
            InvalidRequestError: the arguments do not fit together.
        """
        _check_rows(logits, rows, ids)
        self._seen.append(logits)
        if not self._verifier.indifferent:
            usable = mx.isfinite(peaks(logits))[:, None]
            logits = mx.where(usable, logits, mx.array(0, logits.dtype))
        try:
            if self._masks is not None:
                rows = self._masks.on_draft(logits, rows, ids)
            chosen = self._verifier.propose(logits, rows, ids)
        except BaseException as error:
            self.raised = error
            raise
        self._drew = self._drew or chosen.probs is not None
        return chosen

    def children(
        self, logits: mx.array, rows: Rows, count: int, ids: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return the likeliest next tokens of nodes of one level; see `best_children`.

        Legal where `tree` is not 0.
        """
        self._seen.append(logits)
        return best_children(self._verifier, logits, rows, count, ids)

    def fresh(self) -> "CheckedChoose":
        """Return one for another drafter's draft."""
        return CheckedChoose(self._verifier, self._masks, self.tree)

    def checked(self, draft: Proposal, limit: int) -> CheckedProposal:
        """Return the draft with ids that the target has a row for.

        Which ids a drafter proposes by no chance cannot change the text, but an id
        without a row in the target's embedding would be read from outside of it.

        Raises:
            InvalidRequestError: the draft is none, or too long, or the probabilities
                of its draws, which decide what is accepted, are not all there.
        """
        if not isinstance(draft, Proposal) or not _holds_ids(draft.tokens):
            raise InvalidRequestError(
                f"The drafter's propose() returned {_said(draft)}, and a Proposal of "
                "whole numbers [k] is needed. Return Proposal(mx.array([...]))."
            )
        length, most, branches = draft.length, limit, draft.branches
        if branches is not None:
            draft = replace(draft, branches=_within_tree(branches, length, limit))
            most = self.tree
        if length > most:
            raise InvalidRequestError(
                f"The drafter proposed {length} tokens, and at most {most} were asked "
                "for. Fix its propose()."
            )
        chooser, proposed = self._verifier.chooser, draft.tokens
        if not draft.length:
            return CheckedProposal(draft, proposed, chooser.limit)
        shape = None if draft.probs is None else draft.probs.shape
        if self._drew and shape != (draft.length, chooser.width):
            raise InvalidRequestError(
                f"The drafter drew tokens by chance, and their probabilities are of "
                f"shape {shape} instead of {(draft.length, chooser.width)}. Return "
                "Proposal.of(choices) with every choice, or choose none by chance."
            )
        draft = replace(draft, tokens=_within(proposed, chooser.limit))
        largest = _peaks_of(self._seen) if self._seen else None
        return CheckedProposal(draft, proposed, chooser.limit, largest)


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


def _within_tree(branches: Branches, count: int, limit: int) -> Branches:
    """Return branches whose parents come before their children."""
    parents, levels = branches.parents, branches.levels
    if not _holds_ids(parents) or len(parents) != count or not 1 <= levels <= limit:
        raise InvalidRequestError(
            f"The drafter proposed a tree of {count} tokens with {_said(parents)} as "
            f"their parents and {levels} levels, and one parent for each token and 1 "
            f"to {limit} levels are needed. Fix its propose()."
        )
    before = mx.arange(count, dtype=mx.int32) - 1
    return Branches(mx.clip(parents.astype(mx.int32), -1, before), levels)


def _within(tokens: mx.array, limit: int) -> mx.array:
    """Return ids, uint32, of which those below `limit` are the same."""
    if tokens.dtype == mx.uint32:
        return mx.minimum(tokens, limit - 1)
    return mx.clip(tokens.astype(mx.int64), 0, limit - 1).astype(mx.uint32)


def _peaks_of(seen: SequenceOf[mx.array]) -> mx.array:
    """Return the peaks of all rows: at once, where they are of one width."""
    if len({logits.shape[1] for logits in seen}) == 1:
        return peaks(mx.concatenate([*seen]))
    return mx.concatenate([peaks(logits) for logits in seen])


def _check_rows(logits: Any, rows: Any, ids: Any) -> None:
    """Refuse what cannot be chosen from."""
    shape = logits.shape if isinstance(logits, mx.array) else None
    count = rows.count if isinstance(rows, Rows) else None
    if shape is None or len(shape) != 2 or shape[0] != count:
        raise InvalidRequestError(
            f"choose was given logits of shape {shape} for {count} rows, and [rows, "
            "vocab] is needed. Pass choose(logits[-1:], sequence.rows(ahead))."
        )
    if rows.ahead is not None and not _holds_ids(rows.ahead):
        raise InvalidRequestError(
            f"sequence.rows was given {_said(rows.ahead)}, and the tokens chosen so "
            "far in this draft, whole numbers [m], or None are needed. Pass "
            "sequence.rows(Proposal.of(choices).tokens if choices else None)."
        )
    if ids is not None and (not _holds_ids(ids) or len(ids) != shape[1]):
        raise InvalidRequestError(
            f"choose was given logits of {shape[1]} columns and {_said(ids)} as their "
            "ids. Pass one id for each column."
        )


def _holds_ids(array: Any) -> bool:
    return (
        isinstance(array, mx.array)
        and array.ndim == 1
        and (array.dtype == mx.uint32 or mx.issubdtype(array.dtype, mx.integer))
    )


def _said(found: Any) -> str:
    """Describe what stands where token ids should."""
    array = found.tokens if isinstance(found, Proposal) else found
    if isinstance(array, mx.array):
        return f"an array {array.shape} of {array.dtype}"
    return f"a {type(array).__name__}"
