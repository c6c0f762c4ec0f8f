"""The decoder of one generation: plans rounds, has them run, and learns from them."""

import time

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.round.forced import forced_draft
from mlx_speculation.engine.round.outcome import Cut, RoundOutcome
from mlx_speculation.engine.round.prefill import Prefill
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.round import Before, Rounds
from mlx_speculation.engine.timing import RoundSeconds


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Attributes:
        request: what they are run with.
        prefill: has target and drafter read the prompt.
        rounds: what runs them.
        decisions: with `explain`, each round's plan and what became of it; else None.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prefill = Prefill(request)
        self.rounds = Rounds(request)
        self.decisions: list[tuple[Plan, Feedback]] | None = (
            [] if request.explain else None
        )
        self._plan: Plan | None = None  # of the next round, where it is known
        self._following: Plan | None = None  # of the round after that

    @property
    def planned(self) -> bool:
        """Whether the next round has all its plans, and asks for none."""
        plan = self._plan
        return plan is not None and (plan.length > 0 or self._following is not None)

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
        request, prefill, rounds = self.request, self.prefill, self.rounds
        counts, context = request.statistics, request.target.seen
        if request.masks is not None:
            request.masks.text.check()
        before = rounds.begin()
        behind = before.in_flight is not None
        # 1. The policy picks k, within the budget and what the caches have room for.
        limit = budget - 1 - behind  # a step's token is emitted too, and not known yet
        if request.target.quantization or request.target.shape:
            limit = min(limit, request.target.room - max(1, before.known - context))
        ready = request.warmup.limit(context, limit) if request.warmup else limit
        started = time.perf_counter()
        if request.masks is not None and (found := self._forced(before, limit, cut)):
            return found.reason
        if self._plan is None:  # else it was made before, or its round has failed
            self._plan = request.policy.plan(context, ready)
        if self._plan.length == 0 and self._following is None:
            self._following = request.policy.plan(context + 1, budget - 2)
        plan, planning = self._plan, time.perf_counter() - started
        drafted, accepted = counts.drafted, counts.accepted
        try:
            length = min(plan.length, ready) if request.drafter is not None else 0
            begun = plan.length == 0 or prefill.drafter_begun or prefill.drafter()
            if not begun:  # a plain step meanwhile, and what was planned after it
                self._following, length = plan, 0
            following = self._following
            request.clock.start(planning=planning, behind=behind)
            # 2 to 8 are the round itself.
            if length > 0:
                outcome = rounds.drafted(length, cut)
            else:
                drafts_next = following is not None and following.length > 0
                outcome = rounds.plain(cut, submit_next=not drafts_next)
            seconds = request.clock.stop()
        except BaseException as error:
            rounds.undo(before, error)
            raise
        self._plan, self._following = following, None
        counts.spend(seconds)
        if not begun:
            return outcome.reason
        fresh = (counts.drafted - drafted, counts.accepted - accepted)
        self._learn(context, plan, fresh, seconds, behind)
        return outcome.reason

    def _learn(
        self,
        context: int,
        plan: Plan,
        fresh: tuple[int, int],
        seconds: RoundSeconds,
        behind: bool,
    ) -> None:
        """Let the policy learn from a round's drafted and accepted tokens and time."""
        prefill, ahead = self.prefill, self.rounds.in_flight is not None
        reading, prefill.drafter_seconds = prefill.drafter_seconds, 0.0
        feedback = Feedback(
            *fresh,
            seconds.total,
            behind=behind,
            ahead=ahead,
            parts=seconds,
            reading=reading,
        )
        followed = self.request.policy.note(context, plan, feedback) or plan
        if self.decisions is not None:
            self.decisions.append((followed, feedback))

    def _forced(self, before: Before, limit: int, cut: Cut) -> RoundOutcome | None:
        """Run a round with what the constraint forces, if it does; no plan is used."""
        request = self.request
        request.clock.start(behind=before.in_flight is not None)
        try:
            draft = forced_draft(request, before.in_flight, limit)
            if draft is None:
                return None
            outcome = self.rounds.forced(draft, cut)
        except BaseException as error:
            self.rounds.undo(before, error)
            raise
        request.statistics.spend(request.clock.stop())
        return outcome
