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

A model that raises is disabled for all rows, and one whose logits hold a NaN for the
rows where they do. A row behind the end of its table of positions leaves.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.engine.batch.base import BatchChain, SharedDrafter, disabling
from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.drafters.draft_model import LONGEST_LAG
from mlx_speculation.models import BatchLane, BatchRound

LAG = 2


class BatchModelDrafter(SharedDrafter):
    """Drafts for the rows of a batch with one model, whose lane is empty at first."""

    def __init__(self, lane: BatchLane) -> None:
        super().__init__()
        self.lane = lane
        self._seen: dict[int, int] = {}  # how many of a row's tokens the lane holds
        self._round: BatchRound | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the lane's caches."""
        return self.lane.nbytes

    def met_new_shapes(self) -> bool:
        """Return whether its lane met new shapes since the last call."""
        return self.lane.met_new_shapes()

    def within(self, rows: Sequence[BatchRequest], limits: list[int]) -> list[int]:
        """Return as many as the model has positions for, of each row."""
        pairs = zip(rows, limits, strict=True)
        return [max(0, min(limit, _most(row))) for row, limit in pairs]

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Let the lane hold all rows that draft, each up to its last two tokens.

        One chunk's worth of text is read at most, and of what the lane has missed;
        until all is read, a row does not draft.
        """
        self.done()
        with disabling(self, "begin", rows):
            self._take_in(rows, limits)

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        """Draft for every row that may; see `BatchDrafter`."""
        assert ahead == 0
        found = [NOTHING] * len(rows)
        with disabling(self, "propose", rows):
            self._place(rows)
            most = [max(0, limits[place]) for place in self._places]
            if any(most) and self._lag() <= LONGEST_LAG:
                if self.lane.size is not None:
                    self._catch_up()  # else each lag would be a shape of its own
                for place, draft in zip(self._places, self._drafted(most), strict=True):
                    found[place] = draft
        return found

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep what was accepted of each row, but its last two known tokens."""
        lane_round, chain = self._round, self._chain
        if lane_round is None or chain is None:
            return
        self._before = dict(self._seen)
        chain.disable_unusable()
        kept = [accepted[place] or 0 for place in self._places]
        lag = self._lag()
        with disabling(self, "settle", self._rows):
            lane_round.commit([lag - 1 + count for count in kept])
            # The round's tokens are not known yet; all but its last one will be held.
            for row, count in zip(self._rows, kept, strict=True):
                self._seen[row.uid] += lag - 1 + count

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows, and of those whose drafter is disabled."""
        stay = self._staying(gone)
        if len(stay) < len(self._rows):
            self.lane.leave(stay)
            self._rows = [self._rows[index] for index in stay]
        uids = {row.uid for row in self._rows}
        self._seen = {uid: n for uid, n in self._seen.items() if uid in uids}

    def _restore(self, before: dict[int, int]) -> None:
        self._seen = before

    def _lag(self) -> int:
        """Return how many known tokens of each row the lane does not hold."""
        row = self._rows[0]
        return len(row.tokens) - self._seen[row.uid]

    def _take_in(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Do `prepare`; what it raises is a fault."""
        self.leave([row for row in self._rows if _most(row) <= 0])  # and disabled ones
        inside = {row.uid for row in self._rows}
        new = [
            row
            for row, limit in zip(rows, limits, strict=True)
            if limit > 0 and row.uid not in inside and not row.drafter.disabled
        ]
        # Recurrent layers that were fed nothing have no state to put beside others.
        new = self._read([row for row in new if len(row.tokens) > LAG])
        if self._rows and (new or self._lag() > LONGEST_LAG):
            self._catch_up()
        if new and (not self._rows or self._lag() == LAG):
            lanes = [
                lane for row in new if (lane := row.drafter.batch_lane) is not None
            ]
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
            lane = row.drafter.batch_lane
            assert lane is not None
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

    def _drafted(self, most: list[int]) -> list[Proposal]:
        """Draft the longest chain for all rows of the lane; cut it to `most`."""
        lag = self._lag()
        inputs = mx.array([row.tokens[-lag:] for row in self._rows], mx.uint32)
        self._round = self.lane.begin(lag + max(most) - 1)
        chain = self._chain = BatchChain(self._rows)
        for _ in range(max(most)):
            chosen = chain.choose(self._round.forward(inputs)[:, -1])
            inputs = chosen[:, None]
        mx.async_eval(chain.unusable)
        return chain.drafts(most, "model")


def _most(row: BatchRequest) -> int:
    """Return how many tokens of a row the model has positions to draft."""
    lane = row.drafter.batch_lane
    return 0 if lane is None else lane.positions - len(row.tokens) + 1
