"""The decoder of one generation: reads the prompt, plans rounds and has them run.

Before a round it asks how many tokens to draft, and whether the next one is to draft;
afterwards it tells what became of the plan. When a stream ends it lets the caches hold
what they should. How a round runs is known to `engine.round.round` alone.
"""

import time
from collections.abc import Callable

import mlx.core as mx

from mlx_speculation.engine.draft_length.base import Outcome, Plan
from mlx_speculation.engine.drafters.base import ReadsAhead
from mlx_speculation.engine.drafters.sources import lanes_of
from mlx_speculation.engine.round.outcome import Cut, read
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.round.verify import submit_step
from mlx_speculation.errors import NonFiniteLogitsError


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Args:
        request: what they are run with.

    Attributes:
        decisions: with `explain`, each round's plan and what became of it; else None.
        fits: whether the drafter may read a chunk of so many tokens of the prompt
            before the next round; None: it reads all at once.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.decisions: list[tuple[Plan, Outcome]] | None = (
            [] if request.explain else None
        )
        self.fits: Callable[[int], bool] | None = None
        self._drafter_begun = False
        self._reading = 0.0  # seconds of the prompt, told with the first draft's round
        self._plan: Plan | None = None
        self._following: Plan | None = None
        self._rounds = Rounds(request)

    @property
    def complete(self) -> bool:
        """Whether the constraint allows nothing but the end of the text."""
        text = self.request.text
        return text is not None and text.complete

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
        started, target = time.perf_counter(), self.request.target
        unseen = self.request.sequence.tokens[target.seen : -1]
        complete = target.feed(unseen, fits=fits)
        self.request.statistics.prefill_seconds += time.perf_counter() - started
        return complete

    def next_round(self, budget: int, cut: Cut) -> str | None:
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
        request, rounds = self.request, self._rounds
        counts, policy, context = (
            request.statistics,
            request.policy,
            request.target.seen,
        )
        if request.masks is not None:
            request.masks.text.check()
        before = rounds.before()
        behind = before.in_flight is not None
        # 1. The policy picks k, within the budget and what the caches have room for.
        limit = budget - 1 - behind  # a step's token is emitted too, and not known yet
        if request.target.quantization is not None:
            room = request.target.room
            if room is not None:
                limit = min(limit, room - max(1, before.known - context))
        started = time.perf_counter()
        if self._plan is None:  # else it was made before, or its round has failed
            self._plan = policy.plan(context, limit)
        if self._plan.length == 0 and self._following is None:
            self._following = policy.plan(context + 1, budget - 2)
        plan, planning = self._plan, time.perf_counter() - started
        drafted, accepted = counts.drafted, counts.accepted
        try:
            length = min(plan.length, limit) if request.drafter is not None else 0
            reading = plan.length > 0 and not self._begin_drafting()
            if reading:  # a plain step meanwhile, and what was planned after it
                self._following, length = plan, 0
            following = self._following
            request.clock.start(planning=planning, behind=behind)
            # 2 to 8 are the round itself.
            if length > 0:
                outcome = rounds.drafted(length, cut, plan.stop)
            else:
                drafts_next = following is not None and following.length > 0
                outcome = rounds.plain(cut, submit_next=not drafts_next)
            seconds = request.clock.stop()
        except BaseException as error:
            rounds.undo(before, error)
            raise
        self._plan, self._following = following, None
        counts.spend(seconds)
        if reading:
            return outcome.reason
        became = Outcome(
            counts.drafted - drafted,
            counts.accepted - accepted,
            seconds.total,
            behind=behind,
            ahead=rounds.in_flight is not None,
            parts=seconds,
            reading=self._reading,
            certainties=rounds.certainties,
        )
        self._reading = 0.0
        policy.note(context, plan, became)
        if self.decisions is not None:
            self.decisions.append((plan, became))
        return outcome.reason

    def _begin_drafting(self) -> bool:
        """Let the drafter have its own look at the prompt, when it is first asked.

        Returns:
            Whether it has begun; otherwise it has more to read.
        """
        drafter, sequence = self.request.drafter, self.request.sequence
        if not self._drafter_begun and drafter is not None:
            started = time.perf_counter()
            more = False
            if self.fits is not None and isinstance(drafter, ReadsAhead):
                more = not drafter.read_ahead(sequence, self.fits)
            if not more:
                drafter.begin(sequence)
                self._drafter_begun = True
            seconds = time.perf_counter() - started
            self.request.statistics.prefill_seconds += seconds
            self._reading += seconds
            return not more
        return True

    def hold_all(self) -> None:
        """Let the target's caches hold every known token, the last one included.

        Legal after `prefill`.
        """
        target, tokens = self.request.target, self.request.sequence.tokens
        if target.seen < len(tokens):
            unseen = tokens[target.seen :]
            if self._rounds.in_turn:  # to choose what comes next is to call processors
                target.feed(unseen)
                self._rounds.next_token = None
            else:
                self._rounds.in_flight = submit_step(self.request, mx.array(unseen))

    def take_back(self, count: int) -> None:
        """Let the known tokens end so many earlier, and the caches hold just them.

        Legal right after the round that emitted them, at the end of a stream. The
        round is undone, and what stays of it is fed again, row by row as in plain
        decoding.
        """
        lane_round, target = self._rounds.last_round, self.request.target
        tokens = self.request.sequence.tokens
        kept = len(tokens) - count
        if self.request.drafter is not None:
            self.request.drafter.discard()
        if target.seen > kept and lane_round is not None:
            lane_round.rollback()
        del tokens[kept:]
        self._rounds.next_token = None
        target.feed(tokens[target.seen :], step=1)

    def level_draft(self) -> None:
        """Let the draft model's caches hold what the target's hold."""
        tokens, seen = self.request.sequence.tokens, self.request.target.seen
        for lane in lanes_of(self.request.drafter):
            if lane is not None:
                lane.feed(tokens[lane.seen : seen])

    def next_token(self) -> int | None:
        """Return the token that would come next, once every known token is held.

        None where a constraint has ended the text, and where logits processors would
        have to be called.
        """
        text = self.request.text
        if text is not None and not text.goes_on:
            return None
        if self._rounds.in_flight is None:
            return self._rounds.next_token
        try:
            return read(self._rounds.in_flight).tokens[0]
        except NonFiniteLogitsError:
            return None
