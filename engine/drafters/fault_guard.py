"""Disables a drafter at its first fault; generation continues without it.

A drafter changes the speed of a generation and never its text, so the text can go on
without the drafter. The drafter stays disabled for the rest of the stream: its state
after a fault is unknown, and every round might fail. The next stream uses the drafter
again.

    fault                                         detected
    begin, propose, settle or discard raises      at once
    a value that is not a valid `Proposal`        at once
    ids that the target lacks, NaN in the logits  by `settle`; the round has run with
                                                  valid ids in their place

Errors that the request's logits processors or its constraint raise in `choose` are not
faults of the drafter: they are raised to the caller, like Ctrl-C and MemoryError.
"""

import math
import traceback
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from mlx_speculation.engine.drafters.base import (
    NOTHING,
    Branches,
    Choose,
    OpenDrafter,
    Proposal,
    WrappedDrafter,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.stats import DrafterFault
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.interrupts import raised_by_signal
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Choice, Rows, Verifier, best_children, peaks
from mlx_speculation.samplers.constraints.masks import Masks

T = TypeVar("T")
NoteFault = Callable[[DrafterFault], None]


class CheckedChoose:
    """A `Choose` for one proposal, and the check of that proposal.

    Some faults show only when the device has computed the arrays of the proposal.

    Args:
        verifier: chooses tokens for the request.
        masks: masks of the request's constraint; None: it has no constraint.
        tree: the largest number of tokens of a tree; 0: the proposal has to be a chain.

    Attributes:
        tree: as passed.
        raised: the error of the request's processors or constraint; None: none.
        arrays: the tokens with wrong ids replaced, the tokens as proposed, and the
            largest logit of each row that the drafter chose from. They are submitted
            before the target's forward.
    """

    def __init__(
        self, verifier: Verifier, masks: Masks | None = None, tree: int = 0
    ) -> None:
        self._verifier = verifier
        self._masks = masks
        self.tree = tree
        self._drew = False
        self._seen: list[mx.array] = []  # all logits; `checked` checks them together
        self.raised: BaseException | None = None
        self.arrays: list[mx.array] = []

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        """Choose one token per row; see `Choose`.

        Raises:
            InvalidRequestError: the arguments do not fit together.
        """
        _check_rows(logits, rows, ids)
        self._seen.append(logits)
        if not self._verifier.tolerates_invalid_logits:
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
        """Return the likeliest children of the nodes of one level of a tree.

        To be called only if `tree` is above 0. See `best_children`.
        """
        self._seen.append(logits)
        return best_children(self._verifier, logits, rows, count, ids)

    def fresh(self) -> "CheckedChoose":
        """Return this object, or a new one if another drafter has used this object."""
        if not self._seen and not self.arrays:
            return self
        return CheckedChoose(self._verifier, self._masks, self.tree)

    def checked(self, draft: Proposal, limit: int) -> Proposal:
        """Return the proposal; replace each id that the target's embedding lacks.

        Such an id would read memory outside of the target's embedding. Only if the
        proposal has probabilities can a replacement change the distribution of the
        text: it was not drawn from them.

        Raises:
            InvalidRequestError: `draft` is no proposal, is longer than `limit`, or
                was sampled and lacks the probabilities of its tokens.
        """
        if not isinstance(draft, Proposal) or not _holds_ids(draft.tokens):
            raise InvalidRequestError(
                f"The drafter's propose() returned {_said(draft)} instead of a "
                "Proposal of whole numbers [k]. Return Proposal(mx.array([...]))."
            )
        length, most, branches = draft.length, limit, draft.branches
        if branches is not None:
            draft = replace(draft, branches=_within_tree(branches, length, limit))
            most = self.tree
        if length > most:
            raise InvalidRequestError(
                f"The drafter proposed {length} tokens, but its limit is {most}. Fix "
                "its propose()."
            )
        if not draft.length:
            return draft
        chooser, proposed = self._verifier.chooser, draft.tokens
        shape = None if draft.probs is None else draft.probs.shape
        if self._drew and shape != (draft.length, chooser.width):
            raise InvalidRequestError(
                f"The drafter drew tokens at random, but their probabilities are of "
                f"shape {shape} instead of {(draft.length, chooser.width)}. Return "
                "Proposal.of(choices) with every choice, or draw none at random."
            )
        draft = replace(draft, tokens=_within(proposed, chooser.limit))
        largest = [_peaks_of(self._seen)] if self._seen else []
        self.arrays = [draft.tokens, proposed, *largest]
        return draft

    def faults(self) -> tuple[int, int]:
        """Return two counts: unusable rows of logits, and ids that the target lacks.

        Waits for the device unless `arrays` have been evaluated.
        """
        if not self.arrays:
            return 0, 0
        proposed: Any = self.arrays[1].tolist()
        largest: Any = self.arrays[2].tolist() if len(self.arrays) > 2 else []
        rows = len(largest) - sum(map(math.isfinite, largest))
        limit = self._verifier.chooser.limit
        return rows, sum(not 0 <= token < limit for token in proposed)


class FaultGuard(WrappedDrafter):
    """Wraps the drafter of one stream, and disables it at its first fault."""

    def __init__(
        self,
        inner: OpenDrafter,
        note: NoteFault,  # called with the fault
        target: Lane | None = None,  # the target's lane, if it feeds the drafter
    ) -> None:
        super().__init__(inner)
        self._note = note
        self._target = target
        self._choose: CheckedChoose | None = None  # for a proposal that is not settled
        self._disabled = False
        if target is not None and target.follower is not None:
            target.follower.call_through(self._after_chunk)

    @property
    def disabled(self) -> bool:
        """Return whether the drafter has failed."""
        return self._disabled

    @property
    def lanes(self) -> list[Lane | None]:
        """The drafter's lanes; after a fault None in place of each."""
        return [None if self._disabled else lane for lane in self.inner.lanes]

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Let the drafter keep the tokens of the finished stream."""
        self._run("remember", lambda: self.inner.remember(tokens, answer), None)

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Read a part of the prompt; see `OpenDrafter`. After a fault, return True."""
        return self._run("begin", lambda: self.inner.read_ahead(sequence, fits), True)

    def forecast(self, sequence: Sequence, limit: int) -> SequenceOf[float] | None:
        """Return the drafter's forecast; after a fault, an empty forecast."""
        nothing: SequenceOf[float] | None = ()
        forecast = self.inner.forecast
        return self._run("forecast", lambda: forecast(sequence, limit), nothing)

    def begin(self, sequence: Sequence) -> None:
        """Let the drafter begin."""
        self._run("begin", lambda: self.inner.begin(sequence), None)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the drafter's proposal, checked and submitted; NOTHING after a fault.

        `choose` is a `CheckedChoose`; other drafters may have called it before.
        """
        assert isinstance(choose, CheckedChoose)
        self._choose = None
        if self._disabled:
            return NOTHING
        choose = choose.fresh()
        try:
            draft = self.inner.propose(sequence, limit, choose)
            draft = choose.checked(draft, limit)
            if choose.raised is None:
                self._choose = choose
                mx.async_eval(*choose.arrays)  # runs while the target's graph is built
                return draft
        except Exception as error:
            if choose.raised is None:
                self._fail("propose", error)
                return NOTHING
        # The request's own error is raised even if the drafter caught it.
        assert choose.raised is not None
        raise choose.raised

    def settle(self, accepted: int) -> None:
        """Let the drafter settle, unless its proposal turns out to be faulty.

        To be called after the round was read: the proposal's arrays have been evaluated
        by then.
        """
        choose, self._choose = self._choose, None
        rows, ids = (0, 0) if choose is None else choose.faults()
        if rows or ids:
            self._fail("propose", what_is_wrong(rows, ids))
        if not self._disabled:
            try:
                self.inner.settle(accepted)
            except Exception as error:
                self._fail("settle", error)

    def discard(self) -> None:
        """Let the drafter undo the round."""
        self._choose = None
        self._run("discard", self.inner.discard, None)

    def fail(self, call: str, error: Exception) -> None:
        """Disable the drafter for a fault that the caller of this method detected."""
        if not self._disabled:
            self._fail(call, error)

    def _after_chunk(self, method: Callable[[], None]) -> None:
        """Let the drafter read the hidden states of a chunk of the prompt."""
        self._run("begin", method, None)

    def _run(self, call: str, act: Callable[[], T], default: T) -> T:
        """Return the result of a call of the drafter; after a fault, the default."""
        if not self._disabled:
            try:
                return act()
            except Exception as error:
                self._fail(call, error)
        return default

    def _fail(self, call: str, error: Exception) -> None:
        """Disable the drafter and note why; raise MemoryError and Ctrl-C instead."""
        if isinstance(error, MemoryError) or raised_by_signal(error):
            raise error
        self._disabled = True
        if self._target is not None:
            self._target.follower = None  # nobody reads the states that it collects
        try:
            self.inner.discard()
        except Exception as second:
            error.add_note(f"Its discard() raised {type(second).__name__}: {second}")
        self._note(
            DrafterFault(
                drafter=self.inner.name,
                call=call,
                reason=f"{type(error).__name__}: {error}",
                details="".join(traceback.format_exception(error)),
            )
        )


def what_is_wrong(rows: int, ids: int) -> Exception:
    """Return the error for unusable rows of logits, or for ids the target lacks."""
    if rows:
        return ArithmeticError(
            f"{rows} rows of the drafter's logits hold a NaN or have no finite "
            "maximum. Check its weights, or load it in float32."
        )
    return ValueError(
        f"{ids} of the proposed token ids are not ids of the target. Fix the drafter's "
        "propose(), or choose a draft with the target's token ids."
    )


def _within_tree(branches: Branches, count: int, limit: int) -> Branches:
    """Return the branches, each parent clipped to -1 or an earlier token's index."""
    parents, levels = branches.parents, branches.levels
    if not _holds_ids(parents) or len(parents) != count or not 1 <= levels <= limit:
        raise InvalidRequestError(
            f"The drafter proposed a tree of {count} tokens with {_said(parents)} as "
            f"their parents and {levels} levels; it must have one parent for each "
            f"token, and 1 to {limit} levels. Fix its propose()."
        )
    before = mx.arange(count, dtype=mx.int32) - 1
    return Branches(mx.clip(parents.astype(mx.int32), -1, before), levels)


def _within(tokens: mx.array, limit: int) -> mx.array:
    """Return the ids as uint32, clipped to the range from 0 to `limit` - 1."""
    if tokens.dtype == mx.uint32:
        return mx.minimum(tokens, limit - 1)
    return mx.clip(tokens.astype(mx.int64), 0, limit - 1).astype(mx.uint32)


def _peaks_of(seen: SequenceOf[mx.array]) -> mx.array:
    """Return the peaks of all rows, computed together if all have the same width."""
    if len({logits.shape[1] for logits in seen}) == 1:
        return peaks(mx.concatenate([*seen]))
    return mx.concatenate([peaks(logits) for logits in seen])


def _check_rows(logits: Any, rows: Any, ids: Any) -> None:
    """Refuse arguments of `choose` that do not fit together."""
    shape = logits.shape if isinstance(logits, mx.array) else None
    count = rows.count if isinstance(rows, Rows) else None
    if shape is None or len(shape) != 2 or shape[0] != count:
        raise InvalidRequestError(
            f"choose() got logits of shape {shape} for {count} rows instead of [rows, "
            "vocab]. Pass choose(logits[-1:], sequence.rows(ahead))."
        )
    if rows.ahead is not None and not _holds_ids(rows.ahead):
        raise InvalidRequestError(
            f"sequence.rows() got {_said(rows.ahead)} instead of the tokens chosen so "
            "far in this draft, whole numbers [m], or None. Pass "
            "sequence.rows(Proposal.of(choices).tokens if choices else None)."
        )
    if ids is not None and (not _holds_ids(ids) or len(ids) != shape[1]):
        raise InvalidRequestError(
            f"choose() got logits of {shape[1]} columns and {_said(ids)} as their "
            "ids. Pass one id for each column."
        )


def _holds_ids(array: Any) -> bool:
    return (
        isinstance(array, mx.array)
        and array.ndim == 1
        and (array.dtype == mx.uint32 or mx.issubdtype(array.dtype, mx.integer))
    )


def _said(result: Any) -> str:
    """Describe a value that is no array of token ids, for an error text."""
    array = result.tokens if isinstance(result, Proposal) else result
    if isinstance(array, mx.array):
        return f"an array {array.shape} of {array.dtype}"
    return f"a {type(array).__name__}"
