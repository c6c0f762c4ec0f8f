"""The requests of a batch that run together: how they join and leave, and their rounds.

Between rounds the caches hold all known tokens of every request but the last, or all of
them where a step is in flight: fed, and its choices not read. Rounds are those of
`engine.round`, for all requests at once: here their drafts are planned, and what they
bring is given to each request.

What fails for all, such as running out of memory, is rolled back and raised; the round
can be run again. What fails for one request ends that request.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.draft_length.base import Feedback
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.round.forced import forced_drafts
from mlx_speculation.engine.round.outcome import Read, RoundOutcome
from mlx_speculation.engine.round.request import Running
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.shared_drafters.shared import SharedDrafter
from mlx_speculation.engine.shared_drafters.shared_head import SharedHead
from mlx_speculation.engine.shared_drafters.shared_model import SharedModel
from mlx_speculation.engine.timing import RoundClock, RoundSeconds
from mlx_speculation.errors import SpeculationError
from mlx_speculation.models import BatchLane, RowSizes


class RunningTogether:
    """Runs the rounds of the requests that run together.

    Attributes:
        rows: those that are in the batch, in the order in which they joined.
    """

    def __init__(
        self,
        model: nn.Module,
        lengths: BatchDraftLength,
        statistics: BatchStatistics,
        sizes: RowSizes,
    ) -> None:
        self.rows: list[BatchRequest] = []
        self._sizes = sizes
        self._lane = BatchLane(model, sizes)
        self._lengths = lengths
        self._statistics = statistics
        self._running = Running(self._lane, [], RoundClock(), alone=False)
        self._rounds = Rounds(self._running)
        self._opened = False
        self._turns = True  # whether requests have drafters of their own
        self._begun: set[int] = set()  # requests whose own drafters have read prompts
        self._reading = False  # whether some have prompts to read
        self._waits = False  # whether the shared drafter waits for a step to be read
        self._raised: BaseException | None = None  # of one request, for after the round

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of target and draft."""
        shared = self._rounds.shared
        return self._lane.nbytes + (0 if shared is None else shared.nbytes)

    @property
    def in_flight(self) -> bool:
        """Whether a step was submitted and not read: no request can join then."""
        return self._rounds.in_flight is not None

    def join(self, rows: Sequence[BatchRequest]) -> None:
        """Let requests join whose prompts have been read, but for the last token."""
        assert not self.in_flight
        if not rows:
            return
        if not self._opened:
            self._opened = True
            self._rounds.shared = shared = self._shared_by(rows[0])
            own = rows[0].drafter is not rows[0].request.open_drafter
            self._turns = shared is None or own
        self._lane.join([row.request.target for row in rows])
        self.rows += rows
        self._running.take([row.request for row in self.rows])
        self._lengths.rows_changed()
        for row in rows:
            if not row.request.drafts:
                row.request.target.follower = None  # nobody reads its states

    def _shared_by(self, row: BatchRequest) -> SharedDrafter | None:
        """Return what drafts for requests like this one at once, if anything can."""
        lane, head = row.drafter.batch_lane, row.drafter.batch_head
        if lane is not None:
            return SharedModel(BatchLane(lane.model, self._sizes))
        return None if head is None else SharedHead()

    def end(self) -> None:
        """Keep what was learnt of draft lengths."""
        self._lengths.end()

    def give_back(self, row: BatchRequest) -> None:
        """Let a request that is to be closed have its caches again to keep them."""
        if row.keeps_caches:
            row.request.target.caches = self._extract(row)

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let requests leave, at any time between two rounds."""
        uids = {row.uid for row in gone}
        stay = [i for i, row in enumerate(self.rows) if row.uid not in uids]
        if len(stay) == len(self.rows):
            return
        rounds, step = self._rounds, self._rounds.in_flight
        self._lane.leave(stay)
        if rounds.shared is not None:
            rounds.shared.leave([row.request for row in gone])
        if step is not None:
            rounds.in_flight = step.only(stay) if stay else None
        self.rows = [self.rows[index] for index in stay]
        self._running.take([row.request for row in self.rows])
        self._begun -= uids
        self._lengths.rows_changed()

    def next_round(self, *, drain: bool = False) -> None:
        """Run a round of all requests; each has its `chunks` or its `error` then.

        With `drain` nothing is submitted ahead, so that others can join afterwards.
        """
        self._begin()
        rows, rounds, statistics = self.rows, self._rounds, self._statistics
        if not rows:
            return
        before, ahead = rounds.begin(), int(self.in_flight)
        context = max(len(row.tokens) for row in rows)
        room = [row.stream.budget - 1 - ahead for row in rows]
        cuts = [partial(self._cut, row) for row in rows]
        try:
            forced = forced_drafts(self._running, before.in_flight, room)
            limits = self._limits(room, context, forced)
            drafts = self._proposed(limits, ahead)
            for place, draft in forced.items():
                drafts[place] = draft
            statistics.forwards += 1
            statistics.row_rounds += len(rows)
            if any(draft is not NOTHING for draft in drafts):
                found = rounds.verify(drafts, cuts)
            else:
                # Asked in vain, or the draft waits for a step to be read.
                submit = self._drafts_behind if any(limits) else False
                if not any(limits):
                    after = [limit - 1 + ahead for limit in room]
                    submit = not self._lengths.early(rows, context + 1, after)
                found = rounds.plain(cuts, submit_next=submit and not drain)
        except BaseException as error:
            rounds.undo(before, error)
            for row in rows:
                row.take_back()
            raise
        self._finish(found, drafts, context, ahead)

    def _begin(self) -> None:
        """Let go of what has ended, and end texts that can neither go on nor end."""
        for row in self.rows:
            text = row.request.text
            if text is not None and not row.ended:
                try:
                    text.check()
                except Exception as error:
                    row.chunks = []
                    row.fail(error)
        self.leave([row for row in self.rows if row.ended])
        self._raised = None
        for row in self.rows:
            row.mark()
        if self._rounds.shared is not None:
            self._rounds.shared.follow(self._running.requests)

    @property
    def _drafts_behind(self) -> bool:
        """Whether drafts can be made behind a token that is not read yet.

        What is shared cannot; where it is expected to pay, no step is submitted ahead.
        And no step should be measured beside prompts that are read.
        """
        return self._turns and not self._reading and not self._waits

    def _limits(
        self, room: list[int], context: int, forced: dict[int, Proposal]
    ) -> list[int]:
        """Return how many tokens each request is drafted, but for those forced."""
        limits = self._lengths.limits(self.rows, context, room, self._lane.size)
        if not self._turns and self._rounds.shared is not None:
            limits = self._rounds.shared.within(self._running.requests, limits)
        return [0 if place in forced else n for place, n in enumerate(limits)]

    def _proposed(self, limits: list[int], ahead: int) -> list[Proposal]:
        """Return each request's draft, tokens ahead included."""
        rounds, nothing = self._rounds, [NOTHING] * len(self.rows)
        asks = any(limits) and (self._drafts_behind or not ahead)
        if asks:
            self._prepare(limits)
            self._met_new_shapes()  # outside of the round
        self._running.clock.start(behind=bool(ahead))
        if not asks:
            return nothing
        found = rounds.propose(*self._divided(limits, ahead))
        if any(draft is not NOTHING for draft in found):
            return found
        rounds.discard()
        return nothing

    def _prepare(self, limits: list[int]) -> None:
        """Let drafters read one chunk's worth of prompts."""
        self._reading, shared = False, self._rounds.shared
        room: PrefillBudget | None = None
        for row, limit in zip(self.rows, limits, strict=True):
            drafter, sequence = self._own(row), row.request.sequence
            if drafter is None or limit <= 0 or row.uid in self._begun:
                continue
            room = room or PrefillBudget(row.request.target.prefill_step)
            self._reading |= not drafter.read_ahead(sequence, room.fits)
            if self._reading:
                break
            drafter.begin(sequence)
            self._begun.add(row.uid)
        if shared is not None:
            pairs, requests = (
                zip(self.rows, limits, strict=True),
                self._running.requests,
            )
            most = [limit if row.shares else 0 for row, limit in pairs]
            shared.prepare(requests, shared.within(requests, most))

    def _own(self, row: BatchRequest) -> OpenDrafter | None:
        """Return what reads the prompt of a request for itself."""
        if self._rounds.shared is None:
            return row.request.drafter
        if row.ruled is not None:
            return row.ruled.lookups
        return None if row.shares else row.request.drafter

    def _divided(self, limits: list[int], ahead: int) -> tuple[list[int], list[int]]:
        """Return how many tokens each request's own drafter drafts, and the shared one.

        Requests with a length of their own draft with what is shared, if there is any.
        """
        rows, shared, self._waits = self.rows, self._rounds.shared, False
        index, width = self._choose(limits, ahead)
        own = [
            limit if row.uid in self._begun and self._own(row) is not None else 0
            for row, limit in zip(rows, limits, strict=True)
        ]
        if shared is None:
            return own, []
        most = []
        for row, limit in zip(rows, limits, strict=True):
            costs = row.ruled is None or row.ruled.costs(index)
            limit = limit if row.ruled is None else min(limit, width)
            most.append(limit if costs and row.shares else 0)
        if not ahead and any(n > 0 for n in most):
            for row in rows:
                if row.ruled is not None:
                    row.ruled.chosen = None
            most = shared.within(self._running.requests, most)
            return [0] * len(rows), most
        waits = any(n > 0 for n in most) or self._lengths.expects(rows)
        self._waits = bool(ahead) and not width and waits
        return own, []

    def _choose(self, limits: list[int], ahead: int) -> tuple[int, int]:
        """Let the rule choose for requests that offer it several sources, or free ones.

        The others were planned before.

        Returns:
            The source and the width.
        """
        asked = [
            (row, drafter, limit)
            for row, limit in zip(self.rows, limits, strict=True)
            if (drafter := row.ruled) and limit > 0 and row.uid in self._begun
        ]
        if not asked:
            return 0, 0
        offered = [
            drafter.offer(
                row.request.sequence,
                ahead + limit,
                CheckedChoose(row.request.verifier),
                costly=not ahead or self._rounds.shared is None,
            )
            for row, drafter, limit in asked
        ]
        context = max(len(row.tokens) for row in self.rows)
        most = max(limit for _, _, limit in asked)
        chosen = self._lengths.choose(context, most, offered, behind=ahead > 0)
        for _, drafter, limit in asked:
            drafter.chosen = chosen[0], min(limit, chosen[1])
        return chosen

    def _cut(self, row: BatchRequest, outcome: RoundOutcome) -> RoundOutcome:
        """Let a request cut what it has got."""
        try:
            return row.stream.cut(outcome)
        except Exception:
            raise
        except BaseException as error:  # not of a signal: these wait
            self._raised = error
            raise _interrupted(error) from error

    def _met_new_shapes(self) -> bool:
        """Return whether a lane met new shapes since the last call."""
        fresh, shared = self._lane.met_new_shapes(), self._rounds.shared
        return (shared is not None and shared.met_new_shapes()) or fresh

    def _finish(
        self,
        found: Sequence[Read],
        drafts: Sequence[Proposal],
        context: int,
        ahead: int,
    ) -> None:
        """Let each request take its tokens, learn, and let go of those that end."""
        seconds = self._running.clock.stop()
        drafted = [max(0, draft.length - ahead) for draft in drafts]
        accepted = []
        for row, one, count in zip(self.rows, found, drafted, strict=True):
            right = 0
            try:
                right = self._emit(row, one, seconds)
            except BaseException as error:  # as in a cut
                self._raised = error
                row.chunks = []
                row.fail(_interrupted(error))
            accepted.append(right if count else 0)
        self._statistics.drafted += sum(drafted)
        self._statistics.accepted += sum(accepted)
        widest = max(range(len(drafted)), key=drafted.__getitem__)
        feedback = Feedback(
            drafted[widest],
            accepted[widest],
            seconds.total,
            behind=bool(ahead),
            ahead=self.in_flight,
            parts=seconds,
            fresh=self._met_new_shapes(),
        )
        self._lengths.note(self.rows, context, drafted, accepted, feedback)
        self.leave([row for row in self.rows if row.ended])
        if self._raised is not None:
            raise self._raised

    def _emit(self, row: BatchRequest, found: Read, seconds: RoundSeconds) -> int:
        """Turn what a request has got into chunks; return how many it accepted."""
        try:
            if isinstance(found, Exception):
                row.fail(found)
                return 0
            row.stream.reason = found.reason
            row.request.statistics.spend(seconds)
            if found.reason is None:
                row.between_rounds(partial(self._lent, row))
                row.take_chunks()
            else:
                with self._lent(row):
                    row.take_chunks()
        except Exception as error:
            row.chunks = []
            row.fail(error)
            return 0
        self._statistics.emitted += len(row.chunks)
        return found.accepted

    @contextmanager
    def _lent(self, row: BatchRequest) -> Iterator[None]:
        """Let a request's lane hold its caches, if it leaves them to later ones."""
        target = row.request.target
        try:
            if row.keeps_caches:
                target.caches = self._extract(row)
            yield
        finally:
            target.caches = []

    def _extract(self, row: BatchRequest) -> list[Any]:
        """Return a copy of what the batch holds of a request."""
        place = next(i for i, own in enumerate(self.rows) if own is row)
        return self._lane.extract(place)


def _interrupted(error: BaseException) -> SpeculationError:
    return SpeculationError(
        f"{type(error).__name__} was raised while this row took the tokens of a round, "
        "by other code than a signal's handler. The row ends with what it had before; "
        "insert its request again."
    )
