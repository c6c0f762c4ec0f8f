"""A draft model that drafts for all rows of a batch at once, one forward a token.

Every row of its caches lags behind the known tokens by the same number, at least two,
so that what it is fed is a rectangle: after a round in which a row accepts a of k
tokens, its caches keep all that is known but the last two. A row that has accepted all
k could not keep more, since the last drafted token was never fed; the others feed one
token again that they had. So the first forward of a draft has two columns in place of
one, and no row needs padding.

    known before   t0 t1 t2 t3              held t0 t1, lag 2, k = 3
    fed            t2 t3 | d1 | d2          d3 is chosen last and not fed
    a = 3          known t0..t3 d1 d2 d3 b  held t0..t3 d1 d2
    a = 1          known t0..t3 d1 c        held t0..t3

A model that raises is set aside for all rows, and one whose logits hold a NaN for the
rows where they do.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.batch.draft_chain import BatchChain
from mlx_speculation.engine.batch.drafting import padded
from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Draft
from mlx_speculation.engine.drafters.draft_model import LONGEST_LAG
from mlx_speculation.engine.drafters.fault_guard import what_is_wrong
from mlx_speculation.models import BatchLane, BatchRound

LAG = 2


class BatchDraftModel:
    """Drafts for the rows of a batch with one model.

    Args:
        lane: holds nothing yet.
    """

    ahead = False

    def __init__(self, lane: BatchLane) -> None:
        self.lane = lane
        self._rows: list[BatchRequest] = []  # those in the lane, in its order
        self._seen: dict[int, int] = {}  # how many of a row's tokens the lane holds
        self._round: BatchRound | None = None
        self._before: dict[int, int] | None = None  # what was seen, before it settled
        self._places: list[int] = []  # of the lane's rows in the batch
        self._doubts: mx.array | None = None  # bool [rows of the lane]
        self._chosen: mx.array | None = None  # uint32 [rows of the lane, longest]
        self._limits: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the lane's caches."""
        return self.lane.nbytes

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Do nothing: it reads when it is to draft."""

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Let the lane hold all rows that draft, each up to its last two tokens.

        One chunk's worth of text is read at most, and of what the lane has missed;
        until all is read, a row does not draft.
        """
        self._round, self._before = None, None
        try:
            self._take_in(rows, limits)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            self._set_aside("begin", error, rows)

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Draft]:
        """Draft for every row that may; see `BatchDrafter`."""
        assert ahead == 0
        found = [NOTHING] * len(rows)
        self._doubts = self._chosen = None
        try:
            order = {row.uid: place for place, row in enumerate(rows)}
            self._places = [order[row.uid] for row in self._rows]
            self._limits = [max(0, limits[place]) for place in self._places]
            if any(self._limits) and self._lag() <= LONGEST_LAG:
                if self.lane.size is not None:
                    self._catch_up()  # else each lag would be a shape of its own
                for place, draft in zip(self._places, self._chain(), strict=True):
                    found[place] = draft
        except BaseException as error:
            self.discard()
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            self._set_aside("propose", error, rows)
            return [NOTHING] * len(rows)
        return found

    def rectangle(self, drafts: Sequence[Draft], width: int) -> mx.array:
        """Return them as they were chosen, if all rows drafted and in their order."""
        if self._chosen is None or self._places != list(range(len(drafts))):
            return padded(drafts, width)
        return self._chosen[:, :width]

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep what was accepted of each row, but its last two known tokens."""
        lane_round = self._round
        if lane_round is None:
            return
        self._before = dict(self._seen)
        self._note_doubts()
        kept = [accepted[place] or 0 for place in self._places]
        lag = self._lag()
        try:
            lane_round.commit([lag - 1 + count for count in kept])
        except Exception as error:
            self._set_aside("settle", error, self._rows)
            return
        # The tokens of the round are not known yet, all but its last one will be held.
        for row, count in zip(self._rows, kept, strict=True):
            self._seen[row.uid] += lag - 1 + count

    def discard(self) -> None:
        """Undo the round, also after it was settled."""
        if self._round is not None:
            self._round.rollback()
        if self._before is not None:
            self._seen = self._before
        self._round, self._before = None, None

    def done(self) -> None:
        """Let go of the round, and of the states that it began with."""
        self._round, self._before = None, None

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows, and of those whose drafter was set aside."""
        lost = {row.uid for row in gone}
        lost |= {row.uid for row in self._rows if row.aside}
        stay = [i for i, row in enumerate(self._rows) if row.uid not in lost]
        if len(stay) < len(self._rows):
            self.lane.leave(stay)
            self._rows = [self._rows[index] for index in stay]
        for uid in lost:
            self._seen.pop(uid, None)

    def _lag(self) -> int:
        """Return how many known tokens of each row the lane does not hold."""
        row = self._rows[0]
        return self._known - self._seen[row.uid]

    @property
    def _known(self) -> int:
        return len(self._rows[0].tokens)

    def _take_in(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Do `prepare`, without its care for faults."""
        self.leave([])  # those that were set aside
        inside = {row.uid for row in self._rows}
        new = [
            row
            for row, limit in zip(rows, limits, strict=True)
            if limit > 0 and row.uid not in inside and not row.aside
        ]
        # Recurrent layers that were fed nothing have no state to put beside others.
        new = self._read([row for row in new if len(row.tokens) > LAG])
        if self._rows and (new or self._lag() > LONGEST_LAG):
            self._catch_up()
        if new and (not self._rows or self._lag() == LAG):
            lanes = [model.lane for row in new if (model := row.model) is not None]
            self.lane.join(lanes)
            for lane in lanes:
                lane.seen, lane.points = 0, None
            self._rows += new
            self._seen |= {row.uid: len(row.tokens) - LAG for row in new}

    def _read(self, rows: Sequence[BatchRequest]) -> list[BatchRequest]:
        """Read one chunk's worth of the rows' texts; return those that are read."""
        found: list[BatchRequest] = []
        room: PrefillBudget | None = None
        for row in rows:
            assert row.model is not None
            lane = row.model.lane
            if lane.seen > len(row.tokens) - LAG:
                continue  # an earlier request left one more: after this round it fits
            room = room or PrefillBudget(lane.prefill_step)
            if not lane.feed(row.tokens[lane.seen : -LAG], fits=room.fits):
                break
            found.append(row)
        return found

    def _catch_up(self) -> None:
        """Feed of what rounds without drafts have added, but for the last two tokens.

        It is a chunk's worth for all rows together at most; more comes the next time.
        """
        step = min(row.request.target.prefill_step for row in self._rows)
        most = max(1, step // len(self._rows))
        seen = self._seen
        for count in self._counts(min(most, self._lag() - LAG)):
            missed = [r.tokens[seen[r.uid] : seen[r.uid] + count] for r in self._rows]
            with self.lane.begin(count, whole=True) as lane_round:
                mx.eval(lane_round.forward(mx.array(missed)))
                lane_round.commit(count)
            for row in self._rows:
                seen[row.uid] += count

    def _counts(self, missed: int) -> list[int]:
        """Return the parts in which so many are fed: few sizes, where each is dear."""
        if self.lane.size is None:
            return [missed] if missed else []
        bits = range(missed.bit_length())
        return [1 << bit for bit in reversed(bits) if missed >> bit & 1]

    def _chain(self) -> list[Draft]:
        """Draft the longest chain for all rows of the lane; cut it to each limit."""
        length, lag = max(self._limits), self._lag()
        inputs = mx.array([row.tokens[-lag:] for row in self._rows], mx.uint32)
        self._round = self.lane.begin(lag)
        chain = BatchChain(self._rows)
        for _ in range(length):
            chosen = chain.choose(self._round.forward(inputs)[:, -1])
            inputs = chosen[:, None]
        self._doubts = chain.doubts
        mx.async_eval(chain.doubts)
        self._chosen = chain.tokens
        return chain.drafts(self._limits, "model")

    def _note_doubts(self) -> None:
        """Set the model aside for rows where its logits could not be used."""
        doubts: Any = [] if self._doubts is None else self._doubts.tolist()
        self._doubts = None
        for row, doubtful in zip(self._rows, doubts, strict=False):
            if doubtful:
                row.fail_drafter("propose", what_is_wrong(1, 0))

    def _set_aside(
        self, call: str, error: Exception, rows: Sequence[BatchRequest]
    ) -> None:
        """Give up on the model for these rows."""
        self.discard()
        for row in rows:
            row.fail_drafter(call, error)
        self.leave(self._rows)
