"""The decoder of one generation: reads the prompt, plans rounds and has them run.

Before a round it asks how many tokens to draft, and whether the next one is to draft;
afterwards it tells what became of the plan. When a stream ends it lets the caches hold
what they should. How a round runs is known to `engine.round.round` alone.
"""

import time
from collections.abc import Callable

import mlx.core as mx

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Outcome, Plan
from mlx_speculation.engine.drafters.base import Drafter, ReadsAhead
from mlx_speculation.engine.drafters.sources import lanes_of
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.outcome import MakeCut, read
from mlx_speculation.engine.round.round import Parts, Rounds
from mlx_speculation.engine.round.verify import Forwards
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import Lane, cuda_serves
from mlx_speculation.samplers import Verifier
from mlx_speculation.samplers.constraints.masks import Masks


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Args:
        target: the target's lane; `sequence.tokens[target.seen:]` is to be fed.
        sequence: the known tokens; grows with every round.
        verifier: decides for the request.
        drafter: proposes; None for plain decoding.
        lengths: decides how many tokens to propose in a round.
        explain: keep each round's plan and what became of it in `decisions`, and tell
            the parts of its time apart exactly, see `engine.timing`.
        top: report log-probabilities, and this many of the most probable ids; None:
            report nothing.
        masks: what the request's constraint allows, if it has one.
        statistics: what to count in; new ones when omitted.

    Attributes:
        parts: what runs the rounds, for who runs them in its place, see
            `engine.batch.generator`.
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
        lengths: DraftLengthPolicy,
        top: int | None = None,
        masks: Masks | None = None,
        statistics: Statistics | None = None,
        explain: bool = False,
    ) -> None:
        self.statistics = statistics or Statistics()
        self._target = target
        self._sequence = sequence
        self._top = top
        self._masks = masks
        self._processors = verifier.chooser.processors
        self._drafter = drafter
        self._drafter_begun = False
        self._waits = not cuda_serves()
        self._reading = 0.0  # seconds of the prompt, told with the first draft's round
        self._lengths = lengths
        self.decisions: list[tuple[Plan, Outcome]] | None = [] if explain else None
        self._plan: Plan | None = None
        self._following: Plan | None = None
        self.fits: Callable[[int], bool] | None = None
        self._forwards = Forwards(
            target=target,
            sequence=sequence,
            verifier=verifier,
            top=top,
            masks=masks,
            exact=explain,
        )
        self.parts = Parts(
            target=target,
            sequence=sequence,
            verifier=verifier,
            drafter=drafter,
            lengths=lengths,
            top=top,
            masks=masks,
            statistics=self.statistics,
        )
        self._rounds = Rounds(self.parts, self._forwards)

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

    @property
    def planned(self) -> bool:
        """Whether the next round has all its plans, and asks for none."""
        if self._plan is None:
            return False
        return self._plan.length > 0 or self._following is not None

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
            seconds = time.perf_counter() - started
            self.statistics.prefill_seconds += seconds
            self._reading += seconds
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
        context, behind = self._target.seen, self._rounds.in_flight is not None
        limit = budget - 1 - behind  # a step's token is emitted too, and not known yet
        if (room := self._target.room) is not None:
            limit = min(limit, room - max(1, len(self._sequence.tokens) - context))
        self._rounds.last_round = None  # or the state before it would stay
        started = time.perf_counter()
        if self._plan is None:  # else it was made before, or its round has failed
            self._plan = self._lengths.plan(context, limit)
        if self._plan.length == 0 and self._following is None:
            self._following = self._lengths.plan(context + 1, budget - 2)
        plan, planning = self._plan, time.perf_counter() - started
        counts = self.statistics
        drafted, accepted = counts.drafted, counts.accepted
        try:
            reading = False
            if self._drafter is not None and plan.length:
                reading = not self._begin_drafting(self._drafter)
            if reading:  # a plain step meanwhile, and what was planned after it
                self._following = plan
            following = self._following
            drafts_next = following is not None and following.length > 0
            length = 0 if reading else min(plan.length, limit)
            self._forwards.clock = RoundClock(
                waits=self._waits, planning=planning, behind=bool(behind)
            )
            reason = self._rounds.run(
                length, cut, drafts_next=drafts_next, stop=plan.stop
            )
            seconds = self._forwards.clock.stop()
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
            behind=behind,
            ahead=self._rounds.in_flight is not None,
            parts=seconds,
            reading=self._reading,
            certainties=self._rounds.certainties,
        )
        self._reading = 0.0
        self._lengths.note(context, plan, outcome)
        if self.decisions is not None:
            self.decisions.append((plan, outcome))
        return reason

    def end(self) -> None:
        """Let the draft lengths learn from the stream as a whole."""
        self._lengths.end()

    def hold_all(self) -> None:
        """Let the target's caches hold every known token, the last one included.

        Legal after `prefill`.
        """
        if self._target.seen < len(self._sequence.tokens):
            unseen = self._sequence.tokens[self._target.seen :]
            if self._rounds.in_turn:  # to choose what comes next is to call processors
                self._target.feed(unseen)
                self._rounds.next_token = None
            else:
                self._rounds.in_flight = self._forwards.submit_step(mx.array(unseen))

    def take_back(self, count: int) -> None:
        """Let the known tokens end so many earlier, and the caches hold just them.

        Legal right after the round that emitted them, at the end of a stream. The
        round is undone, and what stays of it is fed again, row by row as in plain
        decoding.
        """
        lane_round = self._rounds.last_round
        kept = len(self._sequence.tokens) - count
        if self._drafter is not None:
            self._drafter.discard()
        if self._target.seen > kept and lane_round is not None:
            lane_round.rollback()
        del self._sequence.tokens[kept:]
        self._rounds.next_token = None
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
        if self._rounds.in_flight is None:
            return self._rounds.next_token
        try:
            return read(self._rounds.in_flight).tokens[0]
        except NonFiniteLogitsError:
            return None
