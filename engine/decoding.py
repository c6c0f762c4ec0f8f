"""The rounds of one generation, on token ids.

A round with k drafts: the drafter proposes, the target runs once over what it has
not seen and the drafts, the chooser turns its last k + 1 rows into the target's own
choices, one evaluation brings them back, a prefix is committed. A round with k = 0 is
an ordinary decoding step and is pipelined as in mlx-lm: the next step is submitted
before the last token is read. So it is after an empty draft, and where a draft is
found while a step is on its way, the forward over the draft is submitted behind it:

    tokens t_0..t_n, the lane has seen t_0..t_{n-1}, k = 3
    fed       t_n  d_1  d_2  d_3
    choices   c_1  c_2  c_3  c_4        accepted = 2 when c_1 = d_1, c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps t_n d_1 d_2

    behind a step, which was fed t_n and chooses c_1; d_1 is left out
    fed       c_1  d_2  d_3
    choices   c_2  c_3  c_4             accepted = 1 when c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps c_1 d_2

The engine knows nothing about text: a `Cut` says where the emitted tokens end.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafting import Draft, Drafter
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.statistics import Statistics
from mlx_speculation.errors import InvalidRequestError, NonFiniteLogitsError
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Chooser, count_accepted, normalizers


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a round's emitted tokens end.

    Attributes:
        keep: how many of them stay, from 1.
        reason: "stop" or "length" when the generation ends there, else None.
    """

    keep: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A forward of the target on its way, not read yet.

    Attributes:
        lane_round: the transaction; committed already where there are no drafts.
        choices: the target's choices, uint32 [k + 1].
        normalizers: [k + 1], not finite where no token can be chosen.
        accepted: integer [], how many drafted tokens are accepted.
    """

    lane_round: LaneRound
    choices: mx.array
    normalizers: mx.array
    accepted: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round's evaluation brought back."""

    choices: list[int]
    accepted: int

    @property
    def emitted(self) -> list[int]:
        """The accepted tokens, then the correction or the bonus."""
        return self.choices[: self.accepted + 1]


def read(submitted: Submitted) -> Verdict:
    """Read a round's result: the one place where the host waits.

    Raises:
        NonFiniteLogitsError: a row holds a NaN, or no finite largest value.
    """
    accepted = submitted.accepted
    choices: Any = submitted.choices.tolist()  # waits; the others came with it
    normals: Any = submitted.normalizers.tolist()
    unusable = sum(not math.isfinite(value) for value in normals)
    if unusable:
        raise NonFiniteLogitsError(
            f"{unusable} of {len(normals)} rows of the target's logits hold a NaN or "
            "no finite largest value. The round was rolled back. Check the weights, "
            "or load the model in float32."
        )
    count: Any = 0 if accepted is None else accepted.item()
    return Verdict(choices, count)


MakeCut = Callable[[list[int]], Cut]


def _checked(draft: Draft, limit: int, ids: int) -> Draft:
    """Refuse a draft of the wrong length; an id past the target's becomes the last one.

    Which ids a drafter proposes cannot change the text, but an id without a row in
    the target's embedding would be read from outside of it.
    """
    if draft.length > limit:
        raise InvalidRequestError(
            f"The drafter proposed {draft.length} tokens, and at most {limit} were "
            "asked for. Mend its propose()."
        )
    return Draft(mx.clip(draft.tokens, 0, ids - 1).astype(mx.uint32))


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Args:
        target: the target's lane; `sequence.tokens[target.seen:]` is to be fed.
        sequence: the known tokens; grows with every round.
        chooser: chooses for target and drafter.
        drafter: proposes; None for plain decoding.
        draft_length: tokens to propose in a round.
    """

    def __init__(
        self,
        *,
        target: Lane,
        sequence: Sequence,
        chooser: Chooser,
        drafter: Drafter | None,
        draft_length: int,
    ) -> None:
        self.statistics = Statistics()
        self._target = target
        self._sequence = sequence
        self._chooser = chooser
        self._drafter = drafter
        self._draft_length = draft_length
        self._in_flight: Submitted | None = None
        self._next_token: int | None = None

    @property
    def seen(self) -> int:
        """How many of the known tokens the target's caches hold."""
        return self._target.seen

    def prefill(self) -> None:
        """Feed all known tokens but the last, which the first round feeds.

        The drafter begins here too, with its own look at the prompt.
        """
        started = time.perf_counter()
        self._target.feed(self._sequence.tokens[self._target.seen : -1])
        if self._drafter is not None:
            self._drafter.begin(self._sequence)
        self.statistics.prefill_seconds += time.perf_counter() - started

    def next_round(self, budget: int, cut: MakeCut) -> str | None:
        """Run one round and commit it.

        Args:
            budget: how many tokens may still be emitted, from 1.
            cut: gets the emitted tokens before anything is committed.

        Returns:
            Why the generation ends with this round, or None.

        Raises:
            NonFiniteLogitsError: the target's logits are unusable.
            Exception: whatever the model, the drafter or the cut raised. Caches and
                statistics are then as before the round.
        """
        drafter, step = self._drafter, self._in_flight
        ahead = 0 if step is None else 1  # emitted too, and not known yet
        length = min(self._draft_length, budget - 1 - ahead)
        if drafter is None or length <= 0:
            return self._plain_round(cut)
        known, seen = len(self._sequence.tokens), self._target.seen
        try:
            draft = self._propose(drafter, ahead + length)
            if draft.length > ahead:
                return self._drafted_round(drafter, draft, cut)
            drafter.discard()
        except BaseException as error:
            drafter.discard()
            if self._target.seen == seen:  # else the round had been committed
                del self._sequence.tokens[known:]
                self._in_flight = step
                if step is not None and isinstance(error, NonFiniteLogitsError):
                    step.lane_round.rollback()
                    self._in_flight = None
            raise
        return self._plain_round(cut)

    def hold_all(self) -> None:
        """Let the target's caches hold every known token, the last one included.

        Legal after `prefill`.
        """
        if self._target.seen < len(self._sequence.tokens):
            unseen = self._sequence.tokens[self._target.seen :]
            self._in_flight = self._submit_step(mx.array(unseen))

    def next_token(self) -> int | None:
        """Return the token that would come next, once every known token is held."""
        if self._in_flight is None:
            return self._next_token
        try:
            return read(self._in_flight).choices[0]
        except NonFiniteLogitsError:
            return None

    def _plain_round(self, make_cut: MakeCut) -> str | None:
        started = time.perf_counter()
        step = self._in_flight
        fresh: Submitted | None = None
        following: Submitted | None = None
        try:
            if step is None:
                unseen = mx.array(self._sequence.tokens[self._target.seen :])
                step = fresh = self._submit_step(unseen)
            following = self._submit_step(step.choices, ahead=step.choices)
            verdict = read(step)
            cut = make_cut(verdict.emitted)
        except BaseException as error:
            if following is not None:
                following.lane_round.rollback()
            if fresh is not None:
                fresh.lane_round.rollback()
            elif isinstance(error, NonFiniteLogitsError) and step is not None:
                step.lane_round.rollback()
                self._in_flight = None
            raise
        self._sequence.tokens += verdict.emitted
        self._in_flight = following
        self.statistics.count(drafted=0, accepted=0, emitted=1)
        self.statistics.verify_seconds += time.perf_counter() - started
        return cut.reason

    def _propose(self, drafter: Drafter, limit: int) -> Draft:
        started = time.perf_counter()
        draft = drafter.propose(self._sequence, limit, self._chooser.choose)
        if draft.length:
            draft = _checked(draft, limit, self._chooser.limit)
            mx.async_eval(draft.tokens)  # runs while the target's graph is built
        self.statistics.draft_seconds += time.perf_counter() - started
        return draft

    def _drafted_round(
        self, drafter: Drafter, draft: Draft, make_cut: MakeCut
    ) -> str | None:
        started = time.perf_counter()
        step, drafted = self._in_flight, draft.tokens
        if step is None:
            fed = mx.array(self._sequence.tokens[self._target.seen :], mx.uint32)
        else:  # its token is not known yet, and stands in the draft's first place
            fed, drafted = step.choices, drafted[1:]
        with self._target.begin() as lane_round:
            submitted = self._submit_verify(lane_round, fed, drafted, step)
            first = [] if step is None else read(step).emitted
            verdict = read(submitted)
            verified = time.perf_counter()
            cut = make_cut(first + verdict.emitted)
            emitted = (first + verdict.emitted)[: cut.keep]
            accepted = min(verdict.accepted, cut.keep - len(first))
            lane_round.prepare(len(fed) + accepted)
            right = not first or first == draft.tokens[:1].tolist()  # no more waiting
            drafter.settle(len(first) + accepted if right else 0)
            # Before the commit, so that what the caches hold always has its name.
            self._sequence.tokens += emitted
            self._in_flight = None
            lane_round.commit(len(fed) + accepted)
        all_held = len(first) + accepted == cut.keep
        self._next_token = verdict.choices[accepted] if all_held else None
        self._count(len(first), len(drafted), verdict.accepted, cut.keep)
        self.statistics.verify_seconds += verified - started
        self.statistics.host_seconds += time.perf_counter() - verified
        return cut.reason

    def _count(self, first: int, drafted: int, accepted: int, emitted: int) -> None:
        """Count a step's token that came first, if any, and the round behind it."""
        statistics = self.statistics
        if first:
            statistics.count(drafted=0, accepted=0, emitted=1)
        if emitted > first:
            statistics.count(
                drafted=drafted, accepted=accepted, emitted=emitted - first
            )
        statistics.reruns = self._target.reruns

    def _submit_verify(
        self,
        lane_round: LaneRound,
        fed: mx.array,
        drafted: mx.array,
        step: Submitted | None,
    ) -> Submitted:
        """Submit a forward over the fed tokens, or a step's choice, and the draft."""
        logits = lane_round.forward(mx.concatenate([fed, drafted]))
        logits = logits[-1 - len(drafted) :]
        ahead = drafted if step is None else mx.concatenate([fed, drafted])
        rows = self._sequence.rows(ahead, len(drafted) + 1)
        choices = self._chooser.choose(logits, rows)
        accepted = count_accepted(drafted, choices)
        submitted = Submitted(lane_round, choices, normalizers(logits), accepted)
        mx.async_eval(choices, submitted.normalizers, accepted)
        return submitted

    def _submit_step(
        self, unseen: mx.array, ahead: mx.array | None = None
    ) -> Submitted:
        """Submit a forward whose tokens all stay; `ahead` of them are not read yet."""
        with self._target.begin(whole=True) as lane_round:
            logits = lane_round.forward(unseen)
            if len(logits) > 1:
                logits = logits[-1:]
            choices = self._chooser.choose(logits, self._sequence.rows(ahead))
            submitted = Submitted(lane_round, choices, normalizers(logits))
            mx.async_eval(choices, submitted.normalizers)
            lane_round.commit(unseen.shape[0])
        return submitted
