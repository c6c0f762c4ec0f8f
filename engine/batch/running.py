"""The requests of a batch that run together: how they join and leave, and their rounds.

Between rounds the caches hold all known tokens of every request but the last, or all of
them where a step is in flight: fed, and its choices not read. Rounds are those of
`engine.round`, for all requests at once: `drafting` plans their drafts, and here what
they bring is given to each request.

What fails for all, such as running out of memory, is rolled back and raised; the round
can be run again. What fails for one request ends that request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import mlx.nn as nn

from mlx_speculation.caches import KVQuantization
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
        self._lane = BatchLane(model, sizes)
        self._statistics = statistics
        self._running = Running(self._lane, [], RoundClock(), alone=False)
        self._rounds = Rounds(self._running)
        self._drafting = BatchDrafting(self._rounds, lengths, sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of target and draft."""
        shared = self._rounds.proposals.shared
        return self._lane.nbytes + (0 if shared is None else shared.nbytes)

    @property
    def in_flight(self) -> bool:
        """Return whether a submitted step is unread: no request can join then."""
        return self._rounds.in_flight is not None

    def join(self, rows: Sequence[BatchRequest]) -> None:
        """Let requests join whose prompts have been read, but for the last token."""
        assert not self.in_flight
        if not rows:
            return
        self._lane.join([row.request.target for row in rows])
        self._take([*self.rows, *rows])
        for row in rows:
            if not row.request.drafts:
                row.request.target.follower = None  # nobody reads its states

    def _take(self, rows: list[BatchRequest]) -> None:
        self.rows = rows
        self._running.take([row.request for row in rows])
        self._drafting.take(rows)

    def end(self) -> None:
        """Keep what was learnt of draft lengths."""
        self._drafting.lengths.end()

    def give_back(self, row: BatchRequest) -> None:
        """Let a request that is to be closed have its caches again to keep them."""
        if row.generation.prefixes is not None:
            row.request.target.caches = self._lane.extract(self.rows.index(row))
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.give_back(row.request)

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let requests leave, at any time between two rounds."""
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
        """Run a round of all requests; each has its `chunks` or its `error` then.

        With `drain` nothing is submitted ahead, so that others can join afterwards.
        """
        self._begin()
        rows, rounds, drafting = self.rows, self._rounds, self._drafting
        if not rows:
            return
        before = rounds.begin()
        context, ahead = 0, int(before.in_flight is not None)
        room, cuts = [], []
        for row in rows:  # no comprehensions, which are calls
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
        """Let go of what has ended, and end texts that can neither go on nor end."""
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
        """Let each request take its tokens, learn, and let go of those that end."""
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
            if draft.source == "forced":  # by a constraint: no source has drafted it
                drafted[place] = accepted[place] = 0
        lengths = self._drafting.lengths
        lengths.note(self.rows, context, drafted, accepted, feedback)
        if gone:
            self.leave(gone)
        if self._running.interrupt is not None:
            raise self._running.interrupt

    def _emit(self, result: Sequence[Read]) -> list[int]:
        """Turn what requests have got into chunks; return how many each accepted."""
        accepted = []
        common = self._drafting.lengths.plan
        for row, one in zip(self.rows, result, strict=True):
            generation, right = row.generation, 0
            plan = row.planned or common
            if plan is not None and plan.compared:
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
        """Let a request's lane hold a copy of its caches, for later ones."""
        try:
            self.give_back(row)
            yield
        finally:
            row.request.target.caches = []
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.take_back(row.request)


class RowGroups(dict[KVQuantization | None, RunningTogether]):
    """The requests that run together, by the quantization of their caches.

    Args:
        new: makes a group without requests.
    """

    def __init__(self, new: Callable[[], RunningTogether]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, key: KVQuantization | None) -> RunningTogether:
        self[key] = self._new()
        return self[key]

    def join(self, rows: Sequence[BatchRequest]) -> list[BatchRequest]:
        """Let requests join; return those that cannot, which say why they run alone."""
        groups: dict[KVQuantization | None, list[BatchRequest]] = {}
        for row in rows:
            if not row.ended:
                groups.setdefault(row.quantization, []).append(row)
        refused: list[BatchRequest] = []
        for key, joining in groups.items():
            try:
                self[key].join(joining)
            except Exception as error:  # nothing was put together
                for row in joining:
                    row.alone = f"its caches cannot be put beside others: {error}"
                refused += joining
        return refused

    def leave(self, row: BatchRequest) -> None:
        """Let a request leave that is to be closed, with its caches."""
        for group in self.values():
            if row in group.rows:
                try:
                    group.give_back(row)
                finally:
                    group.leave([row])
