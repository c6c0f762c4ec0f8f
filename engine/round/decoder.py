"""The decoder of one generation: plans rounds, runs them, reports to the policy."""

import time
from collections.abc import Callable

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.drafters.base import NOTHING
from mlx_speculation.engine.round.forced import forced_drafts
from mlx_speculation.engine.round.outcome import Cut, RoundOutcome
from mlx_speculation.engine.round.prefill import Prefill
from mlx_speculation.engine.round.request import Request, Running
from mlx_speculation.engine.round.round import Before, Rounds
from mlx_speculation.engine.stats import spend
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.samplers.constraints.masks import Masks


class Decoder:
    """Runs the rounds of one request until a cut ends the generation.

    Attributes:
        request: the request, with the target's lane, the drafter and the policy.
        prefill: lets the target and the drafter read the prompt.
        rounds: runs the rounds.
        fits: returns whether the drafter may read n prompt tokens now; None: always.
        decisions: with `explain`, the plan and the feedback of each round; else None.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prefill = Prefill(request)
        running = Running(request.target, [request], request.clock, alone=True)
        self.rounds = Rounds(running)
        self.decisions: list[tuple[Plan, Feedback]] | None = (
            [] if request.explain else None
        )
        self.fits: Callable[[int], bool] | None = None
        self.followed: Plan | None = None  # the last plan that compared drafts
        self._plan: Plan | None = None  # the next round's plan, if already made
        self._next_plan: Plan | None = None  # the plan of the round after that

    @property
    def planned(self) -> bool:
        """Return whether the next round needs no plan from the policy."""
        plan = self._plan
        return plan is not None and (plan.length > 0 or self._next_plan is not None)

    def next_round(self, budget: int, cut: Cut) -> str | None:
        """Run and commit a round; return why the generation ends; None: it continues.

        Args:
            budget: how many tokens may still be emitted, at least 1.
            cut: cuts the outcome before anything is committed.

        Raises:
            NonFiniteLogitsError: the target's logits are unusable.
            ConstraintError: the constraint allows neither a token here nor the end.
            Exception: the model, the drafter or the cut failed. The round is undone.
        """
        request, prefill, rounds = self.request, self.prefill, self.rounds
        counts, masks, context = request.statistics, request.masks, request.target.seen
        before = rounds.begin()
        behind = before.in_flight is not None
        # 1. The policy picks k, within the budget and the room of the caches.
        limit = budget - 1 - behind  # a step in flight emits one token of the budget
        if request.target.quantization or request.target.shape:
            unseen = len(request.sequence.tokens) - context
            limit = min(limit, request.target.room - max(1, unseen))
        ready = request.warmup.limit(context, limit) if request.warmup else limit
        started = time.perf_counter()
        if masks is not None and (result := self._forced(masks, before, limit, cut)):
            return result.reason
        if self._plan is None:  # else made in the last round, or left by a failed one
            self._plan = request.policy.plan(context, ready)
        if self._plan.length == 0 and self._next_plan is None:
            self._next_plan = request.policy.plan(context + 1, budget - 2)
        plan, planning = self._plan, time.perf_counter() - started
        drafted, accepted = counts.drafted, counts.accepted
        try:
            length = min(plan.length, ready) if request.drafter is not None else 0
            prepared = (
                plan.length == 0 or prefill.drafter_begun or prefill.drafter(self.fits)
            )
            if not prepared:  # drafter prefill is unfinished: run a plain step first
                self._next_plan, length = plan, 0
            next_plan = self._next_plan
            request.clock.start(planning=planning, behind=behind)
            # Steps 2 to 8 are in `Rounds`.
            drafts = [NOTHING]
            if length > 0:
                drafts = rounds.proposals.propose(int(behind), [length])
            if drafts[0] is not NOTHING:
                (outcome,) = rounds.verify(drafts, [cut])
            else:
                ahead = length > 0 or next_plan is None or not next_plan.length
                (outcome,) = rounds.plain([cut], submit_next=ahead)
            seconds = request.clock.stop()
        except BaseException as error:
            rounds.undo(before, error)
            raise
        assert isinstance(outcome, RoundOutcome)
        self._plan, self._next_plan = next_plan, None
        spend([counts], seconds)
        if prepared:
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
        """Report a round's tokens (drafted, accepted) and its time to the policy."""
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
        self.followed = followed if followed.compared else self.followed
        if self.decisions is not None:
            self.decisions.append((followed, feedback))

    def _forced(
        self, masks: Masks, before: Before, limit: int, cut: Cut
    ) -> RoundOutcome | None:
        """Run a round whose draft is forced by the constraint; None: no token is."""
        masks.text.check()
        request, rounds = self.request, self.rounds
        request.clock.start(behind=before.in_flight is not None)
        try:
            drafts = forced_drafts(rounds.running, before.in_flight, [limit])
            if not drafts:
                return None
            (outcome,) = rounds.verify([drafts[0]], [cut])
        except BaseException as error:
            rounds.undo(before, error)
            raise
        spend([request.statistics], request.clock.stop())
        assert isinstance(outcome, RoundOutcome)
        return outcome
