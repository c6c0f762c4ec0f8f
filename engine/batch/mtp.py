"""A head that drafts for all rows of a batch at once, one forward a token.

It reads what the target computes: every round of the batch leaves the states of the
positions that each row has kept. What a row has got since the last draft is written to
its slots, of all rows together, and the chains begin behind them:

    known before        t0 t1 t2 t3           slots 0 1 written, the state of slot 2
                                              (that of t2, with t3) is not read
    fed                 slot 2 | d1 | d2      d3 is chosen last and not fed
    a = 1, known        t0 t1 t2 t3 d1 c      slots 0 1 2 written, 3 and 4 not read
    a = 3, known        t0 .. t3 d1 d2 d3 b   slots 0 1 2 written, 3 to 6 not read

So after a round every row has its true slots, whatever was accepted of the others, and
those of drafts never stay. See `engine/drafters/mtp.py` for one row, and
`models/mtp/batch_cache.py` for how rows with different numbers of slots are fed.

A head that raises is set aside for all rows, and one whose logits hold a NaN for the
rows where they do.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches import array_bytes
from mlx_speculation.engine.batch.draft_chain import BatchChain
from mlx_speculation.engine.batch.drafting import padded
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Draft
from mlx_speculation.engine.drafters.fault_guard import FaultGuard, what_is_wrong
from mlx_speculation.engine.drafters.mtp import LONGEST_LAG, MtpDrafter
from mlx_speculation.models import BatchLane, BatchStates, Unread
from mlx_speculation.models.mtp import BatchMtpCache, BatchMtpRound, MtpCache

Handed = tuple[MtpCache, mx.array | None]


class BatchMtpDrafter:
    """Drafts for the rows of a batch with one head.

    Args:
        target: the lane of the batch, which holds the rows that are followed.
    """

    ahead = False

    def __init__(self, target: BatchLane) -> None:
        self._target = target
        self._slots: BatchMtpCache | None = None
        self._states: BatchStates | None = None
        self._rows: list[
            BatchRequest
        ] = []  # those that are followed, in the order of slots
        self._places: list[int] = []  # where they stand in the batch
        self._round: BatchMtpRound | None = None
        self._before: Unread | None = None  # what was not read, before it settled
        self._chain: BatchChain | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the states that are not read yet."""
        if self._slots is None or self._states is None:
            return 0
        return self._slots.nbytes + array_bytes(self._states.held.arrays)

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Let new rows in, and read what many plain steps have left."""
        self.done()
        try:
            self.leave([])  # those that were set aside
            self._take_in(rows)
            if self._states is not None:
                order = {row.uid: place for place, row in enumerate(rows)}
                self._places = [order[row.uid] for row in self._rows]
                self._states.rows = self._places
                if max(self._states.held.counts, default=0) > LONGEST_LAG:
                    self._catch_up(self._states)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            self._set_aside("begin", error, rows)

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Do nothing: it has followed the rows."""

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Draft]:
        """Draft for every row that may; see `BatchDrafter`.

        A row drafts nothing where the state before its newest token was never seen:
        it is out of a cache, or the prompt has one token.
        """
        assert ahead == 0
        found = [NOTHING] * len(rows)
        slots, states = self._slots, self._states
        if slots is None or states is None:
            return found
        pairs = zip(self._places, states.held.counts, strict=True)
        most = [max(0, limits[place]) if count else 0 for place, count in pairs]
        if not any(most):
            return found
        try:
            drafts = self._drafted(slots, states, most)
        except BaseException as error:
            self.discard()
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            self._set_aside("propose", error, rows)
            return found
        for place, draft in zip(self._places, drafts, strict=True):
            found[place] = draft
        return found

    def rectangle(self, drafts: Sequence[Draft], width: int) -> mx.array:
        """Return them as they were chosen, if all rows drafted and in their order."""
        if self._chain is None or self._places != list(range(len(drafts))):
            return padded(drafts, width)
        return self._chain.tokens[:, :width]

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep the slots of committed text; those of drafts never stay."""
        states, head_round, chain = self._states, self._round, self._chain
        if head_round is None or states is None or chain is None:
            return
        doubts: Any = chain.doubts.tolist()
        for row, doubtful in zip(self._rows, doubts, strict=True):
            if doubtful:
                row.fail_drafter("propose", what_is_wrong(1, 0))
        try:
            head_round.commit([min(1, count) for count in states.held.counts])
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            self._set_aside("settle", error, self._rows)
            return
        self._before, states.held = states.held, Unread(len(self._rows))

    def discard(self) -> None:
        """Undo the round, also after it was settled."""
        if self._round is not None:
            self._round.rollback()
        if self._before is not None and self._states is not None:
            self._states.held = self._before
        self.done()

    def done(self) -> None:
        """Let go of the round, and of the states that it began with."""
        self._round = self._before = self._chain = None

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows, and of those whose drafter was set aside."""
        lost = {row.uid for row in gone}
        stay = [
            place
            for place, row in enumerate(self._rows)
            if row.uid not in lost and not row.aside
        ]
        if len(stay) == len(self._rows):
            return
        if stay and self._slots is not None and self._states is not None:
            self._slots.leave(stay)
            self._states.held = self._states.held.only(stay)
        else:
            self._slots = self._states = self._target.follower = None
        self._rows = [self._rows[place] for place in stay]

    def _take_in(self, rows: Sequence[BatchRequest]) -> None:
        """Let those rows join that are not followed yet, and may draft at all."""
        inside = {row.uid for row in self._rows}
        new, handed = [], []
        for row in rows:
            may = row.uid not in inside and row.request.policy.longest > 0
            if may and (found := _handed(row)) is not None:
                new.append(row)
                handed.append(found)
        if not new:
            return
        slots, states = self._slots, self._states
        if slots is None or states is None:
            first, mtp = _head(new[0]), handed[0][0].mtp
            slots = BatchMtpCache(mtp)
            states = BatchStates(first.committed.taps, first.committed.select)
        held = states.held.beside(Unread.of([unread for _, unread in handed]))
        mx.eval(held.arrays)
        slots.join([own for own, _ in handed])
        states.held = held
        self._rows = self._rows + new
        self._slots, self._states = slots, states
        self._target.follower = states
        for row in new:
            _head(row).let_go()

    def _catch_up(self, states: BatchStates) -> None:
        """Write slots of what plain steps have left, but for the newest."""
        assert self._slots is not None
        held = states.held.gathered()
        # The pair of the newest slot is known, that of a step in flight is not.
        known = [len(row.tokens) - 2 for row in self._rows]
        spare = [stop - end for stop, end in zip(known, self._slots.ends, strict=True)]
        feed = [max(0, min(*p)) for p in zip(spare, held.counts, strict=True)]
        if not any(feed):
            return
        slots_round = self._slots.begin()
        try:
            self._feed(slots_round, held, feed)
            left = held.behind(feed)
            slots_round.evaluate()
            mx.eval(left.arrays)
        except BaseException:
            slots_round.rollback()
            raise
        states.held = left

    def _feed(
        self, slots_round: BatchMtpRound, held: Unread, counts: list[int]
    ) -> None:
        """Write the next slots of every row, so many of each."""
        width = max(counts)
        if not width:
            return
        assert self._slots is not None
        pairs = []
        for row, end, count in zip(self._rows, self._slots.ends, counts, strict=True):
            known = row.tokens[end + 1 : end + 1 + count]
            pairs.append(known + [0] * (width - count))
        tokens = mx.array(pairs, mx.uint32)
        slots_round.feed(held.array[:, :width], tokens, counts)

    def _drafted(
        self, slots: BatchMtpCache, states: BatchStates, most: list[int]
    ) -> list[Draft]:
        """Open a round, and draft the longest chain for all rows; cut it to `most`."""
        head = _head(self._rows[0])
        length = max(most) if head.depth is None else min(max(most), head.depth)
        held = states.held = states.held.gathered()
        self._round = slots.begin()
        self._feed(self._round, held, [max(0, count - 1) for count in held.counts])
        hidden = held.last()
        inputs = mx.array([row.tokens[-1:] for row in self._rows], mx.uint32)
        chain = self._chain = BatchChain(self._rows, head.ids)
        for _ in range(length):
            out = self._round.step(hidden, inputs)
            inputs = chain.choose(out.logits[:, -1])[:, None]
            hidden = out.recycled[:, -1:]
        mx.async_eval(chain.doubts)
        return chain.drafts([min(limit, length) for limit in most], head.source)

    def _set_aside(
        self, call: str, error: Exception, rows: Sequence[BatchRequest]
    ) -> None:
        """Give up on the head for these rows, and for all that are followed."""
        self.discard()
        for row in rows:
            row.fail_drafter(call, error)
        self.leave(self._rows)


def _head(row: BatchRequest) -> MtpDrafter:
    head = row.head
    assert head is not None
    return head


def _handed(row: BatchRequest) -> Handed | None:
    """Return what a row's own drafter holds; None: it fails, or has failed."""
    drafter, head = row.request.drafter, row.head
    if row.aside or head is None or not isinstance(drafter, FaultGuard):
        return None
    drafter.begin(row.request.sequence)
    if drafter.disabled:
        return None
    try:
        return head.hand_over()
    except Exception as error:
        drafter.fail("begin", error)  # which raises a want of memory
        return None
