"""The decoder of one generation: plans rounds, has them run, and learns from them.

Before a round it asks how many tokens to draft, and whether the next one is to draft;
afterwards it tells what became of the plan. How a round runs is known to
`engine.round.round` alone.
"""

import time

from mlx_speculation.engine.draft_length.base import Outcome, Plan
from mlx_speculation.engine.round.ending import Ending
from mlx_speculation.engine.round.outcome import Cut
from mlx_speculation.engine.round.prefill import Prefill
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.round import Rounds


class Decoder:
    """Runs rounds on a target lane until a cut ends them.

    Args:
        request: what they are run with.

    Attributes:
        decisions: with `explain`, each round's plan and what became of it; else None.
        prefill: has target and drafter read the prompt.
        ending: lets the caches hold what they should when a stream ends.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.decisions: list[tuple[Plan, Outcome]] | None = (
            [] if request.explain else None
        )
        self._plan: Plan | None = None
        self._following: Plan | None = None
        self._rounds = Rounds(request)
        self.prefill = Prefill(request)
        self.ending = Ending(request, self._rounds)

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
            reading = plan.length > 0 and not (
                self.prefill.drafter_begun or self.prefill.drafter()
            )
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
            reading=self.prefill.drafter_seconds,
            certainties=rounds.certainties,
        )
        self.prefill.drafter_seconds = 0.0
        policy.note(context, plan, became)
        if self.decisions is not None:
            self.decisions.append((plan, became))
        return outcome.reason
