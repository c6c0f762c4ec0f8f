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

It knows nothing about text: a `Cut` says where the emitted tokens end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.engine.drafting import (
    NOTHING,
    Choices,
    Draft,
    Drafter,
    ReadsAhead,
)
from mlx_speculation.engine.drafts import lanes_of
from mlx_speculation.engine.in_turn import decide_in_turn
from mlx_speculation.engine.lengths import Lengths, Outcome, Plan
from mlx_speculation.engine.masking import Masks
from mlx_speculation.engine.round_clock import RoundClock
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.statistics import Statistics
from mlx_speculation.engine.verdicts import (
    Emitted,
    MakeCut,
    Submitted,
    Verdict,
    read,
    wait_for,
)
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Rows, Verifier


@dataclass(frozen=True, slots=True)
class Parts:
    """What a decoder was made of; see there."""

    target: Lane
    sequence: Sequence
    verifier: Verifier
    drafter: Drafter | None
    lengths: Lengths
    top: int | None
    masks: Masks | None
    statistics: Statistics


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Args:
        target: the target's lane; `sequence.tokens[target.seen:]` is to be fed.
        sequence: the known tokens; grows with every round.
        verifier: decides for the request.
        drafter: proposes; None for plain decoding.
        lengths: decides how many tokens to propose in a round.
        explain: keep each round's plan and what became of it in `decisions`, and tell
            the parts of its time apart exactly, see `engine.round_clock`.
        top: report log-probabilities, and this many of the most probable ids; None:
            report nothing.
        masks: what the request's constraint allows, if it has one.
        statistics: what to count in; new ones when omitted.

    Attributes:
        fits: whether the drafter may read a chunk of so many tokens of the prompt
            before the next round; None: it reads all at once.
    """

    def __init__(
        self,
        *,
        target: Lane,
        sequence: Sequence,
        verifier: Verifier,
        drafter: Drafter | None,
        lengths: Lengths,
        top: int | None = None,
        masks: Masks | None = None,
        statistics: Statistics | None = None,
        explain: bool = False,
    ) -> None:
        self.statistics = statistics or Statistics()
        self._target = target
        self._sequence = sequence
        self._verifier = verifier
        self._top = top
        self._masks = masks
        self._processors = verifier.chooser.processors
        self._in_turn = not self._processors.parallel
        self._drafter = drafter
        self._drafter_begun = False
        self._lengths = lengths
        self._exact = explain
        self.decisions: list[tuple[Plan, Outcome]] | None = [] if explain else None
        self._plan: Plan | None = None
        self._following: Plan | None = None
        self._in_flight: Submitted | None = None
        self._next_token: int | None = None
        self._clock = RoundClock()  # of the round that is running
        self._last_round: LaneRound | None = None
        self.fits: Callable[[int], bool] | None = None

    @property
    def parts(self) -> "Parts":
        """What runs the rounds, for who runs them in its place, see `engine.batch`."""
        return Parts(
            target=self._target,
            sequence=self._sequence,
            verifier=self._verifier,
            drafter=self._drafter,
            lengths=self._lengths,
            top=self._top,
            masks=self._masks,
            statistics=self.statistics,
        )

    @property
    def reports(self) -> bool:
        """Whether emitted tokens come with their log-probabilities."""
        return self._top is not None

    @property
    def complete(self) -> bool:
        """Whether the constraint allows nothing but the end of the text."""
        return self._masks is not None and self._masks.text.complete

    @property
    def seen(self) -> int:
        """How many of the known tokens the target's caches hold."""
        return self._target.seen

    def prefill(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Feed all known tokens but the last, which the first round feeds.

        Args:
            fits: whether a chunk of so many tokens may be fed now; None: all may.

        Returns:
            Whether all were fed; otherwise it is to be called again.
        """
        started = time.perf_counter()
        unseen = self._sequence.tokens[self._target.seen : -1]
        complete = self._target.feed(unseen, fits=fits)
        self.statistics.prefill_seconds += time.perf_counter() - started
        return complete

    def _begin_drafting(self, drafter: Drafter) -> bool:
        """Let the drafter have its own look at the prompt, when it is first asked.

        Returns:
            Whether it has begun; otherwise it has more to read.
        """
        if not self._drafter_begun:
            started = time.perf_counter()
            more = False
            if self.fits is not None and isinstance(drafter, ReadsAhead):
                more = not drafter.read_ahead(self._sequence, self.fits)
            if not more:
                drafter.begin(self._sequence)
                self._drafter_begun = True
            self.statistics.prefill_seconds += time.perf_counter() - started
        return self._drafter_begun

    def next_round(self, budget: int, cut: MakeCut) -> str | None:
        """Run one round and commit it.

        Args:
            budget: how many tokens may still be emitted, from 1.
            cut: gets the emitted tokens before anything is committed.

        Returns:
            Why the generation ends with this round, or None.

        Raises:
            NonFiniteLogitsError: the target's logits are unusable.
            ConstraintError: the constraint allows nothing here, not even the end.
            Exception: whatever the model, the drafter or the cut raised. Caches and
                statistics are then as before the round.
        """
        if self._masks is not None:
            self._masks.text.check()
        before = self._processors.fork()
        context, steady = self._target.seen, self._in_flight is not None
        limit = budget - 1 - steady  # a step's token is emitted too, and not known yet
        if (room := self._target.room) is not None:
            limit = min(limit, room - max(1, len(self._sequence.tokens) - context))
        self._last_round = None  # or the state before it would stay
        if self._plan is None:  # else it was made before, or its round has failed
            self._plan = self._lengths.plan(context, limit)
        if self._plan.length == 0 and self._following is None:
            self._following = self._lengths.plan(context + 1, budget - 2)
        plan = self._plan
        counts = self.statistics
        drafted, accepted = counts.drafted, counts.accepted
        try:
            reading = False
            if self._drafter is not None and plan.length:
                reading = not self._begin_drafting(self._drafter)
            if reading:  # a plain step meanwhile, and what was planned after it
                self._following = plan
            self._clock = RoundClock()
            reason = self._run_round(0 if reading else min(plan.length, limit), cut)
            seconds = self._clock.stop()
        except BaseException:
            self._processors.restore(before)
            raise
        self._plan, self._following = self._following, None
        counts.spend(seconds)
        if reading:
            return reason
        outcome = Outcome(
            counts.drafted - drafted,
            counts.accepted - accepted,
            seconds.total,
            steady,
            seconds,
        )
        self._lengths.note(context, plan, outcome)
        if self.decisions is not None:
            self.decisions.append((plan, outcome))
        return reason

    def end(self) -> None:
        """Let the draft lengths learn from the stream as a whole."""
        self._lengths.end()

    def _run_round(self, length: int, cut: MakeCut) -> str | None:
        """Run a round with at most `length` drafted tokens."""
        drafter, step = self._drafter, self._in_flight
        ahead = 0 if step is None else 1
        if drafter is None or length <= 0:
            following = self._following
            drafts_next = following is not None and following.length > 0
            if not self._in_turn:
                return self._plain_round(cut, submit_next=not drafts_next)
            return self._round_without_draft(cut)
        known, seen = len(self._sequence.tokens), self._target.seen
        try:
            draft = self._propose(drafter, ahead + length)
            if draft.length > ahead:
                if self._in_turn:
                    return self._round_in_turn(draft, cut, drafter)
                return self._drafted_round(drafter, draft, cut)
            drafter.discard()
            self.statistics.reads += draft.reads
        except BaseException as error:
            drafter.discard()
            if self._target.seen == seen:  # else the round had been committed
                del self._sequence.tokens[known:]
                self._in_flight = step
                if step is not None and isinstance(error, NonFiniteLogitsError):
                    step.lane_round.rollback()
                    self._in_flight = None
            raise
        reason = self._round_without_draft(cut)
        self.statistics.empty_drafts += draft is not NOTHING
        return reason

    def hold_all(self) -> None:
        """Let the target's caches hold every known token, the last one included.

        Legal after `prefill`.
        """
        if self._target.seen < len(self._sequence.tokens):
            unseen = self._sequence.tokens[self._target.seen :]
            if self._in_turn:  # to choose what comes next is to call processors
                self._target.feed(unseen)
                self._next_token = None
            else:
                self._in_flight = self._submit_step(mx.array(unseen))

    def take_back(self, count: int) -> None:
        """Let the known tokens end so many earlier, and the caches hold just them.

        Legal right after the round that emitted them, at the end of a stream. The
        round is undone, and what stays of it is fed again, row by row as in plain
        decoding.
        """
        lane_round = self._last_round
        kept = len(self._sequence.tokens) - count
        if self._drafter is not None:
            self._drafter.discard()
        if self._target.seen > kept and lane_round is not None:
            lane_round.rollback()
        del self._sequence.tokens[kept:]
        self._next_token = None
        self._target.feed(self._sequence.tokens[self._target.seen :], step=1)

    def level_draft(self) -> None:
        """Let the draft model's caches hold what the target's hold."""
        for lane in lanes_of(self._drafter):
            if lane is not None:
                lane.feed(self._sequence.tokens[lane.seen : self._target.seen])

    def next_token(self) -> int | None:
        """Return the token that would come next, once every known token is held.

        None where a constraint has ended the text, and where logits processors would
        have to be called.
        """
        if self._masks is not None and not self._masks.text.goes_on:
            return None
        if self._in_flight is None:
            return self._next_token
        try:
            return read(self._in_flight).tokens[0]
        except NonFiniteLogitsError:
            return None

    def _round_without_draft(self, make_cut: MakeCut) -> str | None:
        if not self._in_turn:
            return self._plain_round(make_cut)
        return self._round_in_turn(Draft(mx.zeros((0,), mx.uint32)), make_cut)

    def _plain_round(
        self, make_cut: MakeCut, *, submit_next: bool = True
    ) -> str | None:
        """Run a step and, unless a draft is to follow, submit the next one."""
        step = self._in_flight
        fresh: Submitted | None = None
        following: Submitted | None = None
        try:
            if step is None:
                unseen = mx.array(self._sequence.tokens[self._target.seen :])
                step = fresh = self._submit_step(unseen)
            if submit_next:
                chosen = step.verified.tokens
                following = self._submit_step(chosen, behind=step)
            verdict = read(step, self._clock)
            cut = make_cut(self._emitted(verdict))
        except BaseException as error:
            if following is not None:
                following.lane_round.rollback()
            if fresh is not None:
                fresh.lane_round.rollback()
            elif isinstance(error, NonFiniteLogitsError) and step is not None:
                step.lane_round.rollback()
                self._in_flight = None
            raise
        self._sequence.tokens += verdict.tokens
        self._in_flight = following
        if self._masks is not None:
            self._follow(verdict.tokens)
        self.statistics.count_step()
        return cut.reason

    def _propose(self, drafter: Drafter, limit: int) -> Draft:
        self._clock.note("host")
        choices = Choices(self._verifier, self._masks)
        draft = drafter.propose(self._sequence, limit, choices)
        if draft.doubts is None:
            draft = choices.checked(draft, limit)
        if draft.length:
            mx.async_eval(*draft.arrays)  # runs while the target's graph is built
        self._clock.note("draft")
        return draft

    def _drafted_round(
        self, drafter: Drafter, draft: Draft, make_cut: MakeCut
    ) -> str | None:
        step, behind = self._in_flight, draft
        if step is None:
            fed = mx.array(self._sequence.tokens[self._target.seen :], mx.uint32)
        else:  # its token is not known yet, and stands in the draft's first place
            fed, behind = step.verified.tokens, draft.behind(1)
        states = self._processors.fork()
        with self._target.begin() as lane_round:
            submitted = self._submit_verify(lane_round, fed, behind, step)
            before = [] if step is None else [read(step)]  # was waited for
            first = [token for verdict in before for token in verdict.emitted]
            verdict = read(submitted, self._clock)
            cut = make_cut(self._emitted(*before, verdict))
            emitted = (first + verdict.emitted)[: cut.keep]
            accepted = min(verdict.accepted, cut.keep - len(first))
            lane_round.prepare(len(fed) + accepted)
            right = not first or first == draft.tokens[:1].tolist()  # no more waiting
            drafter.settle(len(first) + accepted if right else 0)
            # Before the commit, so that what the caches hold always has its name.
            self._sequence.tokens += emitted
            self._in_flight = None
            lane_round.commit(len(fed) + accepted)
            self._last_round = lane_round
        self._follow(emitted)
        if cut.keep > len(first):
            self._processors.keep(cut.keep - len(first))
        else:
            self._processors.restore(states)
        all_held = len(first) + accepted == cut.keep
        self._next_token = verdict.tokens[accepted] if all_held else None
        self._count(draft, len(first), verdict.accepted, cut.keep)
        return cut.reason

    def _round_in_turn(
        self, draft: Draft, make_cut: MakeCut, drafter: Drafter | None = None
    ) -> str | None:
        """Run a round, drafted or not, whose rows are decided one after the other.

        Nothing is submitted ahead; see `engine.in_turn`.
        """
        fed = mx.array(self._sequence.tokens[self._target.seen :], mx.uint32)
        with self._target.begin(whole=draft.length == 0) as lane_round:
            logits = lane_round.forward(mx.concatenate([fed, draft.tokens]))
            logits = logits[-1 - draft.length :]
            if draft.length:
                self._clock.wait("draft", draft.tokens)
            self._clock.submit("verify", logits)
            self._clock.wait("verify", logits)
            drafted = draft.tokens if draft.length else None
            rows = self._rows(logits, drafted, draft.length + 1)
            turns = self._verifier.in_turn(
                logits, rows, drafted, draft.probs, top=self._top
            )
            text = None if self._masks is None else self._masks.text
            verdicts, reason = decide_in_turn(turns, make_cut, text, draft.length)
            self._clock.note("sampler")
            emitted = [token for verdict in verdicts for token in verdict.emitted]
            accepted = sum(verdict.accepted for verdict in verdicts)
            lane_round.prepare(len(fed) + accepted)
            if drafter is not None:
                drafter.settle(accepted)
            self._sequence.tokens += emitted
            lane_round.commit(len(fed) + accepted)
            self._last_round = lane_round
        self._follow(emitted)
        self._processors.keep(len(emitted))
        self._next_token = None
        self._count(draft, 0, accepted, len(emitted))
        self.statistics.reads += len(emitted) - 1 + (draft.length > 0)
        return reason

    def _emitted(self, *verdicts: Verdict) -> Emitted:
        """Return what these verdicts emit, as far as the constraint goes along."""
        emitted = Emitted.of(*verdicts)
        return emitted if self._masks is None else emitted.under(self._masks.text)

    def _follow(self, committed: list[int]) -> None:
        """Let the constraint know what was committed."""
        if self._masks is not None:
            self._masks.text.commit(committed)
            self.statistics.reads += self._masks.take_reads()

    def _count(self, draft: Draft, first: int, accepted: int, emitted: int) -> None:
        """Count a step's token that came first, if any, and the round behind it."""
        statistics = self.statistics
        if first:
            statistics.count(drafted=0, accepted=0, emitted=1)
        if emitted > first:
            statistics.count(
                drafted=draft.length - first,
                accepted=accepted,
                emitted=emitted - first,
                source=draft.source,
            )
        statistics.reads += draft.reads
        statistics.reruns = self._target.reruns
        statistics.mixer_reruns = self._target.mixer_reruns

    def _submit_verify(
        self,
        lane_round: LaneRound,
        fed: mx.array,
        draft: Draft,
        step: Submitted | None,
    ) -> Submitted:
        """Submit a forward over the fed tokens, or a step's choice, and the draft."""
        logits = lane_round.forward(mx.concatenate([fed, draft.tokens]))
        logits = logits[-1 - draft.length :]
        clock = self._clock
        if not self._exact:
            clock.submit("verify", logits)  # runs while its choices' graph is built
        if step is not None:
            wait_for(step, clock)
        clock.wait("draft", draft.tokens)
        if self._exact:
            clock.submit("verify", logits)
        ahead = draft.tokens if step is None else mx.concatenate([fed, draft.tokens])
        rows = self._rows(logits, ahead, draft.length + 1)
        verified = self._verifier.verify(
            logits, rows, draft.tokens, draft.probs, top=self._top
        )
        if self._exact:
            clock.wait("verify", logits)
        clock.submit("sampler" if self._exact else "verify", *verified.arrays)
        return Submitted(lane_round, logits, verified)

    def _submit_step(
        self, unseen: mx.array, behind: Submitted | None = None
    ) -> Submitted:
        """Submit a forward whose tokens all stay, or are a step's that is not read."""
        with self._target.begin(whole=True) as lane_round:
            logits = lane_round.forward(unseen)
            if len(logits) > 1:
                logits = logits[-1:]
            if behind is not None and (self._exact or self._masks is not None):
                wait_for(behind, self._clock)  # the masks would wait for its tokens
            if self._exact or self._masks is not None:
                self._clock.submit("verify", logits)  # runs while masks are made
            rows = self._rows(logits, None if behind is None else unseen)
            verified = self._verifier.verify(logits, rows, top=self._top)
            self._clock.submit("verify", *verified.arrays)
            lane_round.commit(unseen.shape[0])
        return Submitted(lane_round, logits, verified)

    def _rows(self, logits: mx.array, ahead: mx.array | None, count: int = 1) -> Rows:
        """Return what precedes each of the target's rows, and what it may choose."""
        rows = self._sequence.rows(ahead, count)
        return rows if self._masks is None else self._masks.on(logits, rows)
