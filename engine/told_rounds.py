"""What a decoder asks in each round, on rank 0 and on the others.

    asked of       rank 0                       the others
    lengths        asks its own, and tells      are told
    drafter        asks its own, and tells      are told how many; the tokens come in
                                                the graph
    verifier       decides, and tells in the    are told
                   graph, tokens and count in
                   one small array

So a draft is on rank 0 alone, and the others choose nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_speculation.engine.drafting import Choose, Draft, Drafter
from mlx_speculation.engine.lengths import Lengths, Outcome, Plan
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.together import Together
from mlx_speculation.samplers import Chooser, Rows, Verified, Verifier


class Deciders(NamedTuple):
    """What a decoder asks.

    Attributes:
        drafter: proposes; None for plain decoding.
        lengths: decides how many tokens to propose.
        verifier: decides which of them are accepted, and what follows.
    """

    drafter: Drafter | None
    lengths: Lengths
    verifier: Verifier

    def on_ranks(self, together: Together) -> "Deciders":
        """Return what it asks on this rank, in a stream of all ranks."""
        lengths = ToldLengths(together, self.lengths)
        drafter = self.drafter
        if not together.decides:
            told = ToldVerifier(together, self.verifier)
            return Deciders(ToldDrafter(together), lengths, told)
        if drafter is not None:
            drafter = TellingDrafter(together, drafter)
        return Deciders(drafter, lengths, TellingVerifier(together, self.verifier))


class ToldLengths:
    """The lengths of rank 0, on every rank.

    Args:
        together: the stream.
        lengths: this rank's; those of others than rank 0 are not asked.
    """

    def __init__(self, together: Together, lengths: Lengths) -> None:
        self._together, self._lengths = together, lengths

    @property
    def longest(self) -> int:
        """No plan is longer."""
        return self._lengths.longest

    def plan(self, context: int, limit: int) -> Plan:
        """Return rank 0's plan; the ranks meet here."""
        if not self._together.decides:
            return self._together.plan(None)
        return self._together.plan(self._lengths.plan(context, limit))

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Learn from a round."""
        if self._together.decides:
            self._lengths.note(context, plan, outcome)

    def end(self) -> None:
        """Learn from the stream as a whole."""
        if self._together.decides:
            self._lengths.end()


class TellingDrafter:
    """The drafter of rank 0, which tells the others what it has drafted.

    Args:
        together: the stream.
        drafter: what drafts; it contains its own faults.
    """

    def __init__(self, together: Together, drafter: Drafter) -> None:
        self._together, self.drafter = together, drafter

    def begin(self, sequence: Sequence) -> None:
        """Let it begin."""
        self.drafter.begin(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Return its draft, told to the others."""
        draft = self.drafter.propose(sequence, limit, choose)
        self._together.tell_draft(draft.length, draft.source)
        if draft.length == 0:
            return draft
        return replace(draft, tokens=self._together.told(draft.tokens))

    def settle(self, accepted: int) -> None:
        """Let it settle."""
        self.drafter.settle(accepted)

    def discard(self) -> None:
        """Let it undo the round."""
        self.drafter.discard()


class ToldDrafter:
    """Proposes what rank 0 has drafted, on the other ranks.

    Args:
        together: the stream.
    """

    def __init__(self, together: Together) -> None:
        self._together = together

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Return rank 0's draft; its laws, if it has any, are rank 0's alone."""
        length, source = self._together.hear_draft()
        tokens = mx.zeros((length,), mx.uint32)
        if length:
            tokens = self._together.told(tokens)
        return Draft(tokens, source=source)

    def settle(self, accepted: int) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""


class TellingVerifier(Verifier):
    """The verifier of rank 0, which tells the others what it has decided.

    Where it fails, such as in a logits processor of the user's, the others are told
    rows that cannot be used, so that they come out of the round too.

    Args:
        together: the stream.
        verifier: what decides.
    """

    def __init__(self, together: Together, verifier: Verifier) -> None:
        self.__dict__.update(vars(verifier))
        self._together = together

    def verify(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Verified:
        """Decide, see `Verifier`, and tell."""
        k = 0 if drafted is None else len(drafted)
        try:
            found = super().verify(logits, rows, drafted, draft_probs, top=top)
        except BaseException:
            self._tell_failure(logits, k)
            raise
        return self._told(found)

    def in_turn(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Iterator[Verified]:
        """Decide row after row, see `Verifier`, and tell each."""
        k = 0 if drafted is None else len(drafted)
        turns = super().in_turn(logits, rows, drafted, draft_probs, top=top)
        for index in range(k + 1):
            try:
                found = next(turns)
            except BaseException:
                self._tell_failure(logits, 0, accepts=index < k)
                raise
            yield self._told(found)

    def _told(self, found: Verified) -> Verified:
        usable = mx.isfinite(found.normalizers)
        parts = [found.tokens, usable]
        if found.accepted is not None:
            parts.append(found.accepted[None])
        packed = mx.concatenate([part.astype(mx.uint32) for part in parts])
        packed = self._together.told(packed)
        return replace(_unpacked(packed, len(found.tokens)), log_probs=found.log_probs)

    def _tell_failure(self, logits: mx.array, k: int, *, accepts: bool = False) -> None:
        size = _packed_size(k + 1, k > 0 or accepts)
        nothing = mx.depends(mx.zeros((size,), mx.uint32), logits)
        mx.async_eval(self._together.told(nothing))


class ToldVerifier(Verifier):
    """The verdicts of rank 0, on the other ranks.

    It reports no log-probabilities, and calls no processor of the user's.

    Args:
        together: the stream.
        verifier: this rank's, made of the same options; it is not asked.
    """

    def __init__(self, together: Together, verifier: Verifier) -> None:
        self.__dict__.update(vars(verifier))
        self._chooser = cast(Chooser, _Idle(verifier.chooser))
        self._together = together

    def verify(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Verified:
        """Return what rank 0 decides on the same rows."""
        count = 1 if drafted is None else len(drafted) + 1
        return self._told(logits, count, drafted is not None)

    def in_turn(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Iterator[Verified]:
        """Yield what rank 0 decides on row after row."""
        k = 0 if drafted is None else len(drafted)
        for index in range(k + 1):
            yield self._told(logits, 1, index < k)

    def _told(self, logits: mx.array, rows: int, accepts: bool) -> Verified:
        # Behind the logits, whose own sums over the ranks come first.
        size = _packed_size(rows, accepts)
        packed = mx.depends(mx.zeros((size,), mx.uint32), logits)
        return _unpacked(self._together.told(packed), rows)


def _packed_size(rows: int, accepts: bool) -> int:
    return 2 * rows + accepts


def _unpacked(packed: mx.array, rows: int) -> Verified:
    """Return a verdict from tokens [rows], whether each is usable, and the count."""
    usable = packed[rows : 2 * rows] > 0
    accepted = packed[2 * rows].astype(mx.int32) if len(packed) > 2 * rows else None
    return Verified(packed[:rows], accepted, mx.where(usable, 0.0, mx.nan))


class _Idle:
    """A chooser whose processors are never called.

    Args:
        chooser: the one that is not asked.
    """

    def __init__(self, chooser: Any) -> None:
        self.sampling, self.width, self.limit = (
            chooser.sampling,
            chooser.width,
            chooser.limit,
        )
        self.processors = _IdleProcessors(chooser.processors.parallel)


class _IdleProcessors:
    """Processors without a state, and without effect."""

    has_state = active = False

    def __init__(self, parallel: bool) -> None:
        self.parallel = parallel

    def fork(self) -> tuple[()]:
        return ()

    def restore(self, states: tuple[()]) -> None:
        """Do nothing."""

    def keep(self, count: int) -> None:
        """Do nothing."""
