"""The decoder of a batch: it plans the drafter and the draft length of each request.

Requests share one drafter if its kind (a draft model, an MTP head) can be shared. Other
drafters, such as lookups, belong to one request. A drafter reads the prompt before its
first draft; all drafters together read at most one chunk between two rounds.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.ruled import BatchDraftLength
from mlx_speculation.engine.drafters.base import OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.round.decoder import Decoder, Lengths
from mlx_speculation.engine.round.outcome import Read
from mlx_speculation.engine.round.request import Running
from mlx_speculation.engine.shared_drafters.shared import SharedDrafter
from mlx_speculation.engine.shared_drafters.shared_head import SharedHead
from mlx_speculation.engine.shared_drafters.shared_model import SharedModel
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.models import BatchLane, PrefillBudget, RowSizes


class BatchDecoder(Decoder):
    """Plans and runs the rounds of the requests that share forwards.

    Attributes:
        lengths: decides the draft lengths.
    """

    def __init__(
        self,
        running: Running,
        lengths: BatchDraftLength,
        sizes: RowSizes,
        emit: Callable[[Sequence[Read]], None],
    ) -> None:
        super().__init__(running)
        self._emit = emit  # called with the outcomes before the policies learn
        self._running, self._proposals = running, self.rounds.proposals
        self.lengths, self._sizes = lengths, sizes
        self._rows: Sequence[BatchRequest] = ()
        self._opened = False
        self._sequential = True  # whether requests have drafters of their own
        self._started: set[int] = set()  # uids whose own drafters have read the prompt
        self._reading = False  # whether a drafter still has prompt tokens to read
        self._waits = False  # whether the shared drafter waits for the step in flight
        self._limits: list[int] = []  # most tokens to draft for each request
        self._context = 0  # number of tokens of the longest request in this round

    def take(self, rows: Sequence[BatchRequest]) -> None:
        """Replace the requests, and drop the earlier plans."""
        if rows and not self._opened:
            self._opened = True
            self._proposals.shared = shared = self._shared_by(rows[0])
            alone = rows[0].drafter is not rows[0].request.open_drafter
            self._sequential = shared is None or alone
        self._rows = rows
        self._started &= {row.uid for row in rows}
        self.lengths.take(rows)

    def _shared_by(self, row: BatchRequest) -> SharedDrafter | None:
        """Return a new shared drafter like this request's; None: cannot be shared."""
        lane, head = row.drafter.batch_lane, row.drafter.batch_head
        if lane is not None:
            return SharedModel(BatchLane(lane.model, self._sizes))
        return None if head is None else SharedHead()

    def _plan_round(self, forced: Collection[int], started: float) -> Lengths:
        planning, self._context = time.perf_counter() - started, 0
        for row in self._rows:
            self._context = max(self._context, len(row.tokens))
        size, shared = self._running.lane.size, self._proposals.shared
        limits = self.lengths.limits(self._rows, self._context, self.room, size)
        if not self._sequential and shared is not None:
            limits = shared.within(self._running.requests, limits)
        for place in forced:
            limits[place] = 0
        self._limits = limits
        drafts = any(limits) and (not self.ahead or self._drafts_behind)
        if drafts:
            self._prepare(limits)
            self._met_new_shapes()  # forgets the prefill's shapes
        self._running.clock.start(planning=planning, behind=self.ahead > 0)
        return self._divided(limits) if drafts else ((), ())

    def _submits_next(self) -> bool:
        """Return whether this plain round submits the step of the next round.

        If this round was allowed to draft, the step is submitted only if drafters can
        propose while it is in flight. Else the step is submitted only if the next round
        is not expected to draft.
        """
        if any(self._limits):  # drafting was allowed, but nothing was proposed
            return self._drafts_behind
        after = []
        for limit in self.room:
            after.append(limit - 1 + self.ahead)
        return not self.lengths.early(self._rows, self._context + 1, after)

    def _learn(
        self, drafts: Sequence[Proposal], result: Sequence[Read], seconds: RoundSeconds
    ) -> None:
        drafted, accepted = [], []
        for row, draft, one in zip(self._rows, drafts, result, strict=True):
            count = max(0, len(draft.tokens) - self.ahead)
            drafted.append(count)
            right = 0 if isinstance(one, Exception) else one.accepted
            accepted.append(right if count else 0)
            plan = self.lengths.plans[id(row.planner)]
            if plan.compared:
                row.generation.decoder.followed = plan
        widest = drafted.index(max(drafted))
        feedback = Feedback(
            drafted[widest],
            accepted[widest],
            seconds.total,
            behind=self.ahead > 0,
            ahead=self.rounds.in_flight is not None,
            parts=seconds,
            fresh=self._met_new_shapes(),
        )
        self._emit(result)
        for place, draft in enumerate(drafts):
            if draft.source == "forced":  # by a constraint, not proposed by a drafter
                drafted[place] = accepted[place] = 0
        self.lengths.note(self._rows, self._context, drafted, accepted, feedback)

    @property
    def _drafts_behind(self) -> bool:
        """Return whether drafters can propose while a step is in flight.

        A shared drafter cannot: if it is expected to pay, no step is submitted ahead.
        While drafters read prompts, no step is submitted ahead either, because the
        reading would distort the step's measured cost.
        """
        return self._sequential and not self._reading and not self._waits

    def _met_new_shapes(self) -> bool:
        """Return whether a lane has run with a new shape since the last call."""
        fresh, shared = self._running.lane.met_new_shapes(), self._proposals.shared
        return (shared is not None and shared.met_new_shapes()) or fresh

    def _prepare(self, limits: list[int]) -> None:
        """Let drafters read prompts, at most one chunk of tokens together."""
        self._reading, shared = False, self._proposals.shared
        room: PrefillBudget | None = None
        for row, limit in zip(self._rows, limits, strict=True):
            if limit <= 0 or self._reading or row.uid in self._started:
                continue
            drafter, sequence = self._own(row), row.request.sequence
            if drafter is None:
                continue
            room = room or PrefillBudget(row.request.target.prefill_step)
            self._reading = not drafter.read_ahead(sequence, room.fits)
            if not self._reading:
                drafter.begin(sequence)
                self._started.add(row.uid)
        if shared is not None:
            requests = self._running.requests
            shared.prepare(requests, shared.within(requests, limits))

    def _own(self, row: BatchRequest) -> OpenDrafter | None:
        """Return the drafter that only this request uses, if it has one."""
        if self._proposals.shared is None:
            return row.request.drafter
        return None if row.ruled is None else row.ruled.lookups

    def _divided(self, limits: list[int]) -> tuple[list[int], list[int]]:
        """Return each request's limits for its own drafter, and for the shared one.

        A request without a `RuledDrafter` uses the shared drafter, if there is one.
        """
        rows, shared, self._waits = self._rows, self._proposals.shared, False
        plan = self._choose(limits)
        costly = plan.source is not None and not plan.source.free
        sequential, most = [], []
        for row, limit in zip(rows, limits, strict=True):
            started = row.uid in self._started and self._own(row) is not None
            sequential.append(limit if started else 0)
            if row.ruled is not None:
                limit = min(limit, plan.length) if costly else 0
            most.append(limit)
        if shared is None:
            return sequential, []
        drafts = max(most) > 0
        if not self.ahead and drafts:
            for row in rows:
                if row.ruled is not None:
                    row.ruled.chosen = None
            return [0] * len(rows), shared.within(self._running.requests, most)
        waits = drafts or self.lengths.expects(rows, self._context)
        self._waits = self.ahead > 0 and not plan.length and waits
        return sequential, []

    def _choose(self, limits: list[int]) -> Plan:
        """Let the rule choose a source for the requests with a `RuledDrafter`."""
        members = [
            (row, drafter, limit)
            for row, limit in zip(self._rows, limits, strict=True)
            if (drafter := row.ruled) and limit > 0 and row.uid in self._started
        ]
        if not members:
            return Plan(0, "plain")
        offered = [
            drafter.offer(
                row.request.sequence,
                self.ahead + limit,
                CheckedChoose(row.request.verifier),
                costly=not self.ahead or self._proposals.shared is None,
            )
            for row, drafter, limit in members
        ]
        most = max(limit for _, _, limit in members)
        chosen = self.lengths.choose(
            self._context, most, offered, behind=self.ahead > 0
        )
        for _, drafter, limit in members:
            drafter.chosen = replace(chosen, length=min(limit, chosen.length))
        return chosen
