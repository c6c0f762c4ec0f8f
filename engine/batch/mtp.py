"""A head that drafts for all rows of a batch at once, one forward a token.

It reads what the target computes: every round of the batch leaves the states of the
positions that each row has kept. What a row has got since the last draft is written to
its KV cache, of all rows together, and the chains begin behind it:

    known before        t0 t1 t2 t3           held 0 1, the state of position 2 (that
                                              of t2, with t3) is not read
    fed                 position 2 | d1 | d2  d3 is chosen last and not fed
    a = 1, known        t0 t1 t2 t3 d1 c      held 0 1 2, states 3 and 4 not read
    a = 3, known        t0 .. t3 d1 d2 d3 b   held 0 1 2, states 3 to 6 not read

So after a round every row holds its true positions, whatever was accepted of the
others, and those of drafts never stay. See `engine/drafters/mtp.py` for one row, and
`models/mtp/batch_cache.py` for how rows that hold different numbers are fed.

A head that raises is disabled for all rows, and one whose logits hold a NaN for the
rows where they do.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.caches import array_bytes
from mlx_speculation.engine.batch.base import BatchChain, SharedDrafter, disabling
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.drafters.mtp import LONGEST_LAG, MtpDrafter
from mlx_speculation.models import BatchLane, BatchStates, Unread
from mlx_speculation.models.mtp import BatchMtpCache, BatchMtpRound, MtpCache

Handed = tuple[MtpCache, mx.array | None]


class BatchMtpDrafter(SharedDrafter):
    """Drafts for the rows of a batch with one head, which follows the target's lane."""

    def __init__(self, target: BatchLane) -> None:
        super().__init__()
        self._target = target
        self._cache: BatchMtpCache | None = None
        self._states: BatchStates | None = None
        self._round: BatchMtpRound | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache, and of the states that are not read yet."""
        if self._cache is None or self._states is None:
            return 0
        return self._cache.nbytes + array_bytes(self._states.held.arrays)

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Let new rows in, and read what many plain steps have left."""
        self.done()
        with disabling(self, "begin", rows):
            self.leave([])  # those that are disabled
            self._take_in(rows)
            if self._states is not None:
                self._place(rows)
                self._states.rows = self._places
                if max(self._states.held.counts, default=0) > LONGEST_LAG:
                    self._catch_up(self._states)

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        """Draft for every row that may; see `BatchDrafter`.

        A row drafts nothing where the state before its newest token was never seen:
        it is out of a cache, or the prompt has one token.
        """
        assert ahead == 0
        found = [NOTHING] * len(rows)
        cache, states = self._cache, self._states
        if cache is None or states is None:
            return found
        pairs = zip(self._places, states.held.counts, strict=True)
        most = [max(0, limits[place]) if count else 0 for place, count in pairs]
        if any(most):
            with disabling(self, "propose", rows):
                drafts = self._drafted(cache, states, most)
                for place, draft in zip(self._places, drafts, strict=True):
                    found[place] = draft
        return found

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep the positions of committed text; those of drafts never stay."""
        states, head_round, chain = self._states, self._round, self._chain
        if head_round is None or states is None or chain is None:
            return
        chain.disable_unusable()
        with disabling(self, "settle", self._rows):
            head_round.commit([min(1, count) for count in states.held.counts])
            self._before, states.held = states.held, Unread(len(self._rows))

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows, and of those whose drafter is disabled."""
        stay = self._staying(gone)
        if len(stay) == len(self._rows):
            return
        if stay and self._cache is not None and self._states is not None:
            self._cache.leave(stay)
            self._states.held = self._states.held.only(stay)
        else:
            self._cache = self._states = self._target.follower = None
        self._rows = [self._rows[place] for place in stay]

    def _restore(self, before: Unread) -> None:
        if self._states is not None:
            self._states.held = before

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
        cache, states = self._cache, self._states
        if cache is None or states is None:
            first, mtp = _head(new[0]), handed[0][0].mtp
            cache = BatchMtpCache(mtp)
            states = BatchStates(first.committed.taps, first.committed.select)
        held = states.held.beside(Unread.of([unread for _, unread in handed]))
        mx.eval(held.arrays)
        cache.join([own for own, _ in handed])
        states.held = held
        self._rows = self._rows + new
        self._cache, self._states = cache, states
        self._target.follower = states
        for row in new:
            _head(row).let_go()

    def _catch_up(self, states: BatchStates) -> None:
        """Feed what plain steps have left, but for the newest position."""
        assert self._cache is not None
        held = states.held.gathered()
        # The pair of the newest position is known, that of a step in flight is not.
        known = [len(row.tokens) - 2 for row in self._rows]
        spare = [stop - end for stop, end in zip(known, self._cache.ends, strict=True)]
        feed = [max(0, min(*p)) for p in zip(spare, held.counts, strict=True)]
        if not any(feed):
            return
        head_round = self._cache.begin()
        try:
            self._feed(head_round, held, feed)
            left = held.behind(feed)
            head_round.evaluate()
            mx.eval(left.arrays)
        except BaseException:
            head_round.rollback()
            raise
        states.held = left

    def _feed(self, head_round: BatchMtpRound, held: Unread, counts: list[int]) -> None:
        """Feed the next positions of every row, so many of each."""
        width = max(counts)
        if not width:
            return
        assert self._cache is not None
        pairs = []
        for row, end, count in zip(self._rows, self._cache.ends, counts, strict=True):
            known = row.tokens[end + 1 : end + 1 + count]
            pairs.append(known + [0] * (width - count))
        tokens = mx.array(pairs, mx.uint32)
        head_round.feed(held.array[:, :width], tokens, counts)

    def _drafted(
        self, cache: BatchMtpCache, states: BatchStates, most: list[int]
    ) -> list[Proposal]:
        """Open a round, and draft the longest chain for all rows; cut it to `most`."""
        head = _head(self._rows[0])
        length = max(most) if head.depth is None else min(max(most), head.depth)
        held = states.held = states.held.gathered()
        self._round = cache.begin()
        self._feed(self._round, held, [max(0, count - 1) for count in held.counts])
        hidden = held.last()
        inputs = mx.array([row.tokens[-1:] for row in self._rows], mx.uint32)
        chain = self._chain = BatchChain(self._rows, head.ids)
        for _ in range(length):
            out = self._round.step(hidden, inputs)
            inputs = chain.choose(out.logits[:, -1])[:, None]
            hidden = out.recycled[:, -1:]
        mx.async_eval(chain.unusable)
        return chain.drafts([min(limit, length) for limit in most], head.source)


def _head(row: BatchRequest) -> MtpDrafter:
    head: MtpDrafter = row.drafter.batch_head
    return head


def _handed(row: BatchRequest) -> Handed | None:
    """Return what a row's own drafter holds; None: it fails, or has failed."""
    drafter, head = row.drafter, row.drafter.batch_head
    if drafter.disabled or head is None:
        return None
    drafter.begin(row.request.sequence)
    if drafter.disabled:
        return None
    try:
        handed: Handed = head.hand_over()
        return handed
    except Exception as error:
        drafter.fail("begin", error)  # which raises MemoryError
        return None
