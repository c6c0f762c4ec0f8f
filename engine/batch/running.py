"""Requests of a batch that share forwards: how they join and leave, and their rounds.

Between two rounds the caches hold every request's known tokens except the last token.
If a plain step is in flight (fed, its choices not read), they hold this token too.

`engine.round` runs the rounds, each for all requests at once. `drafting` plans the
drafts. This module hands the outcomes to the requests.

An error that concerns all requests, such as a lack of memory, is raised after the round
is rolled back; the round can be run again. An error of one request ends that request.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import mlx.nn as nn

from mlx_speculation.engine.batch.drafting import BatchDrafting
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.draft_length.base import Feedback
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.round.forced import forced_drafts
from mlx_speculation.engine.round.outcome import Read
from mlx_speculation.engine.round.request import Running
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.stats import spend
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.models import BatchLane, RowSizes


class RunningTogether:
    """Runs the rounds of requests that share forwards.

    Attributes:
        rows: the requests, in the order in which they joined.
    """

    def __init__(
        self,
        model: nn.Module,
        lengths: BatchDraftLength,
        statistics: BatchStatistics,
        sizes: RowSizes,
    ) -> None:
        self.rows: list[BatchRequest] = []
        self._lane = BatchLane(model, sizes)
        self._statistics = statistics
        self._running = Running(self._lane, [], RoundClock(), alone=False)
        self._rounds = Rounds(self._running)
        self._drafting = BatchDrafting(self._rounds, lengths, sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the shared caches of the target and the draft."""
        shared = self._rounds.proposals.shared
        return self._lane.nbytes + (0 if shared is None else shared.nbytes)

    @property
    def in_flight(self) -> bool:
        """Return whether a plain step is in flight. No request can join then."""
        return self._rounds.in_flight is not None

    def join(self, rows: Sequence[BatchRequest]) -> None:
        """Add requests whose prompts are read up to the last token."""
        assert not self.in_flight
        if not rows:
            return
        self._lane.join([row.request.target for row in rows])
        self._take([*self.rows, *rows])
        for row in rows:
            if not row.request.drafts:
                row.request.target.follower = None  # no drafter reads its states

    def _take(self, rows: list[BatchRequest]) -> None:
        self.rows = rows
        self._running.take([row.request for row in rows])
        self._drafting.take(rows)

    def give_back(self, row: BatchRequest) -> None:
        """Copy a request's caches to its own lane, for the prefix cache to keep."""
        if row.generation.prefixes is not None:
            row.request.target.caches = self._lane.extract(self.rows.index(row))
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.give_back(row.request)

    def release(self, row: BatchRequest) -> None:
        """Let a request leave, with a copy of its caches in its own lane."""
        try:
            self.give_back(row)
        finally:
            self.leave([row])

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let requests leave. Legal between any two rounds."""
        rounds, step = self._rounds, self._rounds.in_flight
        lost = {*gone}
        stay = [index for index, row in enumerate(self.rows) if row not in lost]
        self._lane.leave(stay)
        if rounds.proposals.shared is not None:
            rounds.proposals.shared.leave([row.request for row in gone])
        if step is not None:
            rounds.in_flight = step.only(stay) if stay else None
        self._take([self.rows[index] for index in stay])

    def next_round(self, *, drain: bool = False) -> None:
        """Run a round of all requests; set the `chunks` or the `error` of each.

        Args:
            drain: submit no further step, so that requests can join after the round.
        """
        self._begin()
        rows, rounds, drafting = self.rows, self._rounds, self._drafting
        if not rows:
            return
        before = rounds.begin()
        context, ahead = 0, int(before.in_flight is not None)
        room, cuts = [], []
        for row in rows:  # one loop: each comprehension would cost a call
            context = max(context, len(row.tokens))
            emitted = row.request.statistics.emitted
            room.append(row.generation.chunks.max_tokens - emitted - 1 - ahead)
            cuts.append(row.generation.chunks.cut)
        try:
            forced = forced_drafts(self._running, before.in_flight, room)
            limits = drafting.limits(room, context, forced)
            drafts = drafting.propose(limits, ahead)
            for place, draft in forced.items():
                drafts[place] = draft
            self._statistics.forwards += 1
            self._statistics.row_rounds += len(rows)
            if drafts.count(NOTHING) < len(drafts):
                result = rounds.verify(drafts, cuts)
            else:
                submit = drafting.submits_next(limits, room, context, ahead)
                result = rounds.plain(cuts, submit_next=submit and not drain)
        except BaseException as error:
            rounds.undo(before, error)
            for row in rows:
                row.generation.chunks.undo()
            raise
        self._finish(result, drafts, context, ahead)

    def _begin(self) -> None:
        """Let ended requests leave, and end those whose constraint allows no token."""
        gone = []
        for row in self.rows:
            masks = row.request.masks
            if masks is not None and row.generation.result is None:
                try:
                    masks.text.check()
                except Exception as error:
                    row.chunks = []
                    row.fail(error)
            if row.error is not None or row.generation.result is not None:
                gone.append(row)
        if gone:
            self.leave(gone)
        for row in self.rows:
            row.chunks = []
        if self._rounds.proposals.shared is not None:
            self._rounds.proposals.shared.follow(self._running.requests)

    def _finish(
        self,
        result: Sequence[Read],
        drafts: Sequence[Proposal],
        context: int,
        ahead: int,
    ) -> None:
        """Hand out the tokens, report to the policy, and let ended requests leave."""
        seconds = self._running.clock.stop()
        spend([row.request.statistics for row in self.rows], seconds)
        accepted = self._emit(result)
        drafted, gone = [], []
        for place, row in enumerate(self.rows):
            count = max(0, len(drafts[place].tokens) - ahead)
            drafted.append(count)
            if not count:
                accepted[place] = 0
            if row.error is not None or row.generation.result is not None:
                gone.append(row)
        self._statistics.drafted += sum(drafted)
        self._statistics.accepted += sum(accepted)
        widest = drafted.index(max(drafted))
        feedback = Feedback(
            drafted[widest],
            accepted[widest],
            seconds.total,
            behind=bool(ahead),
            ahead=self.in_flight,
            parts=seconds,
            fresh=self._drafting.met_new_shapes(),
        )
        for place, draft in enumerate(drafts):
            if draft.source == "forced":  # by a constraint, not proposed by a drafter
                drafted[place] = accepted[place] = 0
        lengths = self._drafting.lengths
        lengths.note(self.rows, context, drafted, accepted, feedback)
        if gone:
            self.leave(gone)
        if self._running.interrupt is not None:
            raise self._running.interrupt

    def _emit(self, result: Sequence[Read]) -> list[int]:
        """Turn outcomes into chunks; return how many tokens each request accepted."""
        accepted = []
        for row, one in zip(self.rows, result, strict=True):
            generation, right = row.generation, 0
            plan = self._drafting.lengths.plans[id(row.planner)]
            if plan.compared:
                generation.decoder.followed = plan
            try:
                if isinstance(one, Exception):
                    raise one
                if row.request.statistics.drafter_faults:
                    generation.warn_of_faults()
                if one.reason is None and generation.prefixes is not None:
                    generation.prefixes.between_rounds(partial(self._lent, row))
                row.chunks = generation.chunks.take()
                if one.reason is not None:
                    with self._lent(row):
                        generation.end(one.reason)
                right = one.accepted
            except BaseException as error:
                row.chunks = []
                row.fail(self._running.failure(error))
            accepted.append(right)
            self._statistics.emitted += len(row.chunks)
        return accepted

    @contextmanager
    def _lent(self, row: BatchRequest) -> Iterator[None]:
        """Inside the context, let a request's own lane hold a copy of its caches."""
        try:
            self.give_back(row)
            yield
        finally:
            row.request.target.caches = []
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.take_back(row.request)
