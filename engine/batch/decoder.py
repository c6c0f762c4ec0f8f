"""The rounds of a batch, on token ids: one forward and one evaluation for all rows.

Between rounds the caches hold all known tokens of every row but the last, or all of
them where a step is in flight: fed, and its choices not read. As alone, plain steps are
pipelined, the next one submitted before the last is read; a draft that is found while a
step is in flight stands behind it. Rows are padded on the right to the widest draft,
and each keeps its own prefix:

    fed       t d1 d2 d3        row 0, 3 drafts, the first 2 accepted: keeps 3
              t d1 .  .         row 1, 1 draft, accepted: keeps 2
              t .  .  .         row 2, none: keeps 1

Every row is cut at its stops and its budget before the commit, as a stream is: it
keeps what stays of its text. A row that fails, in its cut too, keeps nothing, and
leaves with the rows that have ended. What fails for all, such as running out of memory,
is rolled back and raised; the round can be run again. What fails for one row after the
commit ends that row.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.batch.base import BatchDrafter
from mlx_speculation.engine.batch.by_turns import BatchCascadeDrafter
from mlx_speculation.engine.batch.draft_model import BatchModelDrafter
from mlx_speculation.engine.batch.mtp import BatchMtpDrafter
from mlx_speculation.engine.batch.outcome import (
    BatchStep,
    Read,
    behind,
    kept,
    read_batch,
    settled,
)
from mlx_speculation.engine.batch.per_request import PerRequestDrafter
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.draft_length.base import Feedback
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.timing import RoundClock, RoundSeconds
from mlx_speculation.errors import SpeculationError
from mlx_speculation.models import BatchLane, RowSizes
from mlx_speculation.samplers import verify_batch


class BatchDecoder:
    """Runs the rounds of the rows that run together.

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
        self._drafts: BatchDrafter = PerRequestDrafter(lengths)
        self._drafts_chosen = False
        self._in_flight: BatchStep | None = None
        self._clock = RoundClock()
        self._raised: BaseException | None = None  # of one row, for after the round

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of target and draft."""
        return self._lane.nbytes + self._drafts.nbytes

    @property
    def in_flight(self) -> bool:
        """Whether a step was submitted and not read: no row can join then."""
        return self._in_flight is not None

    def join(self, rows: Sequence[BatchRequest]) -> None:
        """Let rows join whose prompts have been read, but for the last token."""
        assert self._in_flight is None
        if not rows:
            return
        if not self._drafts_chosen:
            self._drafts_chosen = True
            self._drafts = self._drafts_for(rows[0])
        self._lane.join([row.request.target for row in rows])
        self.rows += rows
        self._lengths.rows_changed()

    def _drafts_for(self, row: BatchRequest) -> BatchDrafter:
        """Return what drafts for rows like this one."""
        lane, head = row.drafter.batch_lane, row.drafter.batch_head
        if lane is None and head is None:
            return PerRequestDrafter(self._lengths)
        shared: BatchDrafter = BatchMtpDrafter(self._lane)
        if lane is not None:
            shared = BatchModelDrafter(BatchLane(lane.model, self._sizes))
        if row.drafter is row.request.open_drafter:
            return shared
        return BatchCascadeDrafter(self._lengths, shared)

    def give_back(self, row: BatchRequest) -> None:
        """Let a row that is to be closed have its caches again, if it keeps them."""
        if row.keeps_caches:
            row.request.target.caches = self._extract(row)

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let rows leave, at any time between two rounds."""
        uids = {row.uid for row in gone}
        stay = [i for i, row in enumerate(self.rows) if row.uid not in uids]
        if len(stay) == len(self.rows):
            return
        self._lane.leave(stay)
        self._drafts.leave(gone)
        if self._in_flight is not None:
            self._in_flight = self._in_flight.only(stay) if stay else None
        self.rows = [self.rows[index] for index in stay]
        self._lengths.rows_changed()

    def next_round(self, *, drain: bool = False) -> None:
        """Run a round of all rows; each has its `chunks` or its `error` then.

        With `drain` nothing is submitted ahead, so that rows can join afterwards.
        """
        self.leave([row for row in self.rows if row.ended])  # after an error
        rows, self._raised = self.rows, None
        self._drafts.follow(rows)
        ahead = int(self._in_flight is not None)
        context = max(len(row.tokens) for row in rows)
        room = [row.stream.budget - 1 - ahead for row in rows]
        limits = self._lengths.limits(rows, context, room, self._lane.size)
        limits = self._drafts.within(rows, limits)
        drafts = self._proposed(limits, ahead)
        statistics = self._statistics
        statistics.forwards += 1
        statistics.row_rounds += len(rows)
        if drafts is None:
            if any(limits):  # asked in vain, or the draft waits for a step to be read
                submit = self._drafts.ahead
            else:
                after = [limit - 1 + ahead for limit in room]
                submit = not self._lengths.early(rows, context + 1, after)
            found = self._plain_round(submit_next=submit and not drain)
        else:
            found = self._drafted_round(drafts, ahead)
        self._finish(found, drafts, context, ahead)

    def _proposed(self, limits: list[int], ahead: int) -> list[Proposal] | None:
        """Return each row's draft, those ahead included; None: there is none."""
        drafts = self._drafts
        asks = any(limits) and (drafts.ahead or not ahead)
        if asks:
            drafts.prepare(self.rows, limits)
            self._met_new_shapes()  # outside of the round
        self._clock = RoundClock()
        if not asks:
            return None
        found = drafts.propose(self.rows, limits, ahead)
        if max(draft.length for draft in found) > ahead:
            return found
        drafts.discard()
        return None

    def _plain_round(self, *, submit_next: bool) -> list[Read]:
        """Run a step and, unless a draft or new rows are to follow, submit the next."""
        step = self._in_flight
        fresh: BatchStep | None = None
        following: BatchStep | None = None
        try:
            if step is None:
                step = fresh = self._submit_step(self._last_tokens(), behind=None)
            if submit_next:
                following = self._submit_step(step.tokens[:, None], behind=step)
            self._clock.wait("verify", step.tokens)
            found = self._cut(step.read())
        except BaseException:
            for one in (following, fresh):
                if one is not None:
                    one.lane_round.rollback()
            raise
        self._in_flight = following
        self._know(found)
        for row in self.rows:
            row.request.target.seen = len(row.tokens) - 1 + self.in_flight
        return found

    def _submit_step(self, fed: mx.array, behind: BatchStep | None) -> BatchStep:
        """Submit a forward over one token of each row, [rows, 1], that is kept."""
        with self._lane.begin(1, whole=True) as lane_round:
            logits = self._clock.hand_over("verify", lane_round.forward, fed)[:, -1:]
            self._clock.submit("verify", logits)
            count = len(self.rows)
            ahead = None if behind is None else behind.tokens
            asked = [
                row.asked(ahead=None if ahead is None else ahead[i : i + 1])
                for i, row in enumerate(self.rows)
            ]
            verified = verify_batch(asked, logits)
            tokens = verified.first_tokens(count)
            self._clock.submit("verify", tokens, *verified.arrays)
            lane_round.commit(1)
        return BatchStep(lane_round, verified, tokens, tuple(range(count)))

    def _drafted_round(self, drafts: list[Proposal], ahead: int) -> list[Read]:
        """Verify the drafts of all rows, behind a step if one is in flight."""
        step = self._in_flight
        committed = False
        try:
            ours = [draft.behind(ahead) if ahead else draft for draft in drafts]
            width = max(draft.length for draft in ours)
            matrix = self._drafts.rectangle(ours, width)
            fed = self._last_tokens() if step is None else step.tokens[:, None]
            self._clock.note("draft")
            with self._lane.begin(1 + width) as lane_round:
                logits = lane_round.forward(mx.concatenate([fed, matrix], axis=1))
                self._clock.submit("verify", logits)
                asked = [
                    row.asked(one, None if step is None else step.tokens[i : i + 1])
                    for i, (row, one) in enumerate(zip(self.rows, ours, strict=True))
                ]
                verified = verify_batch(asked, logits, matrix)
                self._clock.submit("verify", *verified.arrays)
                self._clock.wait("draft", matrix)
                self._clock.wait("verify", logits)
                self._clock.wait("sampler", *verified.arrays)
                first = None if step is None else step.read()
                read = read_batch(verified, [draft.length for draft in ours])
                found = self._cut(
                    behind(None if first is None else first[i], read[i])
                    for i in range(len(self.rows))
                )
                keep = [kept(one) for one in found]
                lane_round.prepare(keep)
                pairs = zip(found, drafts, strict=True)
                self._drafts.settle([settled(one, draft) for one, draft in pairs])
                self._know(found)
                self._in_flight = None
                lane_round.commit(keep)
                committed = True
            for row, count in zip(self.rows, keep, strict=True):
                row.request.target.seen += count
            self._drafts.done()
        except BaseException:
            if not committed:
                self._drafts.discard()
                self._in_flight = step
                for row in self.rows:
                    row.take_back()
            raise
        return found

    def _cut(self, found: Iterable[Read]) -> list[Read]:
        """Let each row cut what it has got."""
        cut: list[Read] = []
        for row, one in zip(self.rows, found, strict=True):
            try:
                cut.append(row.cut(one))
            except Exception as error:
                cut.append(error)
            except BaseException as error:  # not of a signal: these wait
                self._raised = error
                cut.append(_interrupted(error))
        return cut

    def _know(self, found: Sequence[Read]) -> None:
        """Let the tokens that rows have got be known."""
        for row, one in zip(self.rows, found, strict=True):
            if isinstance(one, RoundOutcome):
                row.tokens.extend(one.tokens)

    def _met_new_shapes(self) -> bool:
        """Return whether a lane met new shapes since the last call."""
        fresh = self._lane.met_new_shapes()
        return self._drafts.met_new_shapes() or fresh

    def _last_tokens(self) -> mx.array:
        return mx.array([row.tokens[-1:] for row in self.rows], mx.uint32)

    def _finish(
        self,
        found: Sequence[Read],
        drafts: list[Proposal] | None,
        context: int,
        ahead: int,
    ) -> None:
        """Let each row take its tokens, count, learn, and let go of those that end."""
        seconds = self._clock.stop()
        drafted, accepted = [], []
        for index, (row, one) in enumerate(zip(self.rows, found, strict=True)):
            draft = None
            if drafts is not None and drafts[index].length > ahead:
                draft = drafts[index].behind(ahead) if ahead else drafts[index]
            drafted.append(0 if draft is None else draft.length)
            try:
                accepted.append(self._emit(row, one, draft, seconds))
            except BaseException as error:  # as in a cut
                self._raised = error
                accepted.append(0)
                row.chunks = []
                row.fail(_interrupted(error))
        self._statistics.drafted += sum(drafted)
        self._statistics.accepted += sum(accepted)
        widest = max(range(len(drafted)), key=drafted.__getitem__)
        feedback = Feedback(
            drafted[widest],
            accepted[widest],
            seconds.total,
            behind=bool(ahead),
            ahead=self._in_flight is not None,
            parts=seconds,
            fresh=self._met_new_shapes(),
        )
        self._lengths.note(self.rows, context, drafted, accepted, feedback)
        self.leave([row for row in self.rows if row.ended])
        if self._raised is not None:
            raise self._raised

    def _emit(
        self,
        row: BatchRequest,
        found: Read,
        draft: Proposal | None,
        seconds: RoundSeconds,
    ) -> int:
        """Turn what a row has got into chunks; return how many drafts it accepted."""
        row.chunks = []
        try:
            if isinstance(found, Exception):
                row.fail(found)
                return 0
            row.emit(found, draft, seconds)
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
        return found.accepted if draft is not None else 0

    @contextmanager
    def _lent(self, row: BatchRequest) -> Iterator[None]:
        """Let a row's lane hold its caches, if it leaves them to later requests."""
        target = row.request.target
        try:
            if row.keeps_caches:
                target.caches = self._extract(row)
            yield
        finally:
            target.caches = []

    def _extract(self, row: BatchRequest) -> list[Any]:
        """Return a copy of what the batch holds of a row."""
        place = next(i for i, own in enumerate(self.rows) if own is row)
        return self._lane.extract(place)


def _interrupted(error: BaseException) -> SpeculationError:
    return SpeculationError(
        f"{type(error).__name__} was raised while this row took the tokens of a round, "
        "by other code than a signal's handler. The row ends with what it had before; "
        "insert its request again."
    )
