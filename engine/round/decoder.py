"""Decoders plan rounds, run them, and report to the policies of draft lengths.

`StreamDecoder` follows the policy of its only request. `engine.batch.planning` has the
decoder of a batch.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.round.forced import forced_drafts
from mlx_speculation.engine.round.outcome import Cut, Read
from mlx_speculation.engine.round.prefill import Prefill
from mlx_speculation.engine.round.request import Request, Running
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.timing import RoundSeconds

# Draft lengths by request: for its own drafter, for the shared one; (): all are 0.
Lengths = tuple[Sequence[int], Sequence[int]]


class Decoder(ABC):
    """Runs the rounds of the requests of a lane.

    Attributes:
        ahead: how many steps were in flight when the round began, 0 or 1.
        room: how many tokens may be drafted for each request in the round.
    """

    def __init__(self, running: Running) -> None:
        self.rounds, self.ahead, self.room = Rounds(running), 0, list[int]()

    def next_round(
        self, budgets: Sequence[int], cuts: Sequence[Cut], *, drain: bool = False
    ) -> list[Read]:
        """Run and commit a round; return the outcome of each request.

        In a batch, an error of one request is returned in place of its outcome. After
        any other error the round is undone, and the error is raised.

        `budgets[place]`, at least 1, is the number of tokens that a request may still
        emit. Its outcome goes through `cuts[place]` before the commit. With `drain`, no
        step of the next round is submitted.

        Raises:
            NonFiniteLogitsError: the target's logits are unusable.
            ConstraintError: the constraint allows neither a token here nor the end.
            Exception: the model, a drafter or a cut failed.
        """
        rounds, running, forced = self.rounds, self.rounds.running, {}
        before, self.room = rounds.begin(), []
        self.ahead = int(before.in_flight is not None)
        for budget in budgets:  # without the bonus and the token of a step in flight
            self.room.append(budget - 1 - self.ahead)
        try:
            # Steps of docs/how_a_round_works.md; 2 to 8 are in `round` and `verify`.
            # 1. The policy picks k, at most `self.room` and what the caches can take.
            started = time.perf_counter()  # of the planning, forced drafts included
            if running.masked:
                forced = forced_drafts(running, before.in_flight, self.room)
            lengths, shared = self._plan_round(forced, started)
            drafts = [NOTHING] * len(budgets)
            if any(lengths) or any(shared):
                drafts = rounds.proposals.propose(self.ahead, lengths, shared)
            for place, draft in forced.items():
                drafts[place] = draft
            if drafts.count(NOTHING) < len(drafts):
                result = rounds.verify(drafts, cuts)
            else:
                submit_next = not drain and self._submits_next()
                result = rounds.plain(cuts, submit_next=submit_next)
        except BaseException as error:
            rounds.undo(before, error)
            raise
        seconds = running.clock.stop()
        for request in running.requests:
            request.statistics.spend(seconds)
        self._learn(drafts, result, seconds)
        return result

    @abstractmethod
    def _plan_round(self, forced: Collection[int], started: float) -> Lengths:
        """Plan drafts except at `forced` places, and start the clock.

        A drafter that is to draft, but has not read its prompt, reads a part of it.
        """

    @abstractmethod
    def _submits_next(self) -> bool:
        """Return whether a plain step also submits the step of the next round."""

    @abstractmethod
    def _learn(
        self, drafts: Sequence[Proposal], result: Sequence[Read], seconds: RoundSeconds
    ) -> None:
        """Report a committed round to the policies."""


class StreamDecoder(Decoder):
    """Runs the rounds of one request, whose policy plans the drafts.

    Attributes:
        fits: returns whether the drafter may read n prompt tokens now; None: always.
        decisions: with `explain`, the plan and the feedback of each round.
        followed: the last plan that compared sources of drafts; None: no plan has.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(Running(request.target, [request], request.clock, alone=True))
        self.request, self.prefill = request, Prefill(request)
        self.decisions: list[tuple[Plan, Feedback]] = []
        self.fits: Callable[[int], bool] | None = None
        self.followed: Plan | None = None
        self._plan: Plan | None = None  # the next round's plan, if already made
        self._next_plan: Plan | None = None  # the plan of the round after that
        self._follows: Plan | None = None  # the plan that this round follows
        self._context = self._length = 0  # cached tokens and draft length of this round

    @property
    def planned(self) -> bool:
        """Return whether the next round needs no plan from the policy."""
        plan = self._plan
        return plan is not None and (plan.length > 0 or self._next_plan is not None)

    def _plan_round(self, forced: Collection[int], started: float) -> Lengths:
        request, limit, behind = self.request, self.room[0], self.ahead > 0
        self._context, self._length, self._follows = request.target.seen, 0, None
        if request.target.quantization or request.target.shape:
            limit = request.within(limit)
        if request.warmup is not None:
            before = time.perf_counter()
            limit = request.warmup.limit(self._context, limit)
            started += time.perf_counter() - before
        if forced:
            request.clock.start(planning=time.perf_counter() - started, behind=behind)
            return [0], ()
        if self._plan is None:  # else an earlier plan is still to be followed
            self._plan = request.policy.plan(self._context, limit)
        if self._plan.length == 0 and self._next_plan is None:
            after = self.room[0] + self.ahead - 1
            self._next_plan = request.policy.plan(self._context + 1, after)
        planning, length = time.perf_counter() - started, self._plan.length
        if not length or self.prefill.drafter_begun or self.prefill.drafter(self.fits):
            self._follows = self._plan
            if request.drafter is not None:
                self._length = max(0, min(length, limit))
        request.clock.start(planning=planning, behind=behind)
        return [self._length], ()

    def _submits_next(self) -> bool:
        if self._follows is None:  # drafter prefill is unfinished
            return False
        return self._length > 0 or not (self._next_plan and self._next_plan.length)

    def _learn(
        self, drafts: Sequence[Proposal], result: Sequence[Read], seconds: RoundSeconds
    ) -> None:
        plan, outcome, prefill = self._follows, result[0], self.prefill
        if plan is None or isinstance(outcome, Exception):
            return
        self._plan, self._next_plan = self._next_plan, None
        reading, prefill.drafter_seconds = prefill.drafter_seconds, 0.0
        feedback = Feedback(
            outcome.drafted,
            outcome.accepted,
            sum(seconds),
            behind=self.ahead > 0,
            ahead=self.rounds.in_flight is not None,
            parts=seconds,
            reading=reading,
        )
        followed = self.request.policy.note(self._context, plan, feedback) or plan
        self.followed = followed if followed.compared else self.followed
        if self.request.explain:
            self.decisions.append((followed, feedback))
