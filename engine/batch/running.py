"""Requests of a batch that share forwards: how they join and leave, and their rounds.

Between two rounds the caches hold every request's known tokens except the last token.
If a plain step is in flight (its tokens are fed, its choices not read), the caches hold
the last token too.

An error that concerns all requests, such as a lack of memory, is raised after the round
is rolled back; the round can be run again. An error of one request ends that request.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import mlx.nn as nn

from mlx_speculation.engine.batch.planning import BatchDecoder
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.draft_length.ruled import BatchDraftLength
from mlx_speculation.engine.round.outcome import Read
from mlx_speculation.engine.round.request import Running
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.models import BatchLane, RowSizes


class RunningTogether:
    """Runs the rounds of requests that share forwards."""

    def __init__(
        self,
        model: nn.Module,
        lengths: BatchDraftLength,
        statistics: BatchStatistics,
        sizes: RowSizes,
    ) -> None:
        self.rows: list[BatchRequest] = []  # in the order in which they joined
        self._lane = BatchLane(model, sizes)
        self._statistics = statistics
        self._running = Running(self._lane, [], RoundClock(), alone=False)
        self._decoder = BatchDecoder(self._running, lengths, sizes, self._emit)
        self._rounds = self._decoder.rounds

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
        """Add requests whose prompts are read, except the last token of each."""
        assert not self.in_flight
        if not rows:
            return
        self._lane.join([row.request.target for row in rows])
        self._take([*self.rows, *rows])
        for row in rows:
            if not row.request.drafts:
                row.request.target.follower = None  # without drafts nothing reads it

    def _take(self, rows: list[BatchRequest]) -> None:
        self.rows = rows
        self._running.take([row.request for row in rows])
        self._decoder.take(rows)

    def give_back(self, row: BatchRequest) -> None:
        """Copy a request's caches to its own lane, for the prefix cache to keep."""
        if row.generation.prefixes is not None:
            row.request.target.caches = self._lane.extract(self.rows.index(row))
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.give_back(row.request)

    def release(self, row: BatchRequest) -> None:
        """Let a request leave; copy its caches for its prefix cache, if it has one."""
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

        With `drain`, no further step is submitted, so that requests can join.
        """
        self._begin()
        rows, budgets, cuts, known = self.rows, [], [], []
        if not rows:
            return
        for row in rows:
            chunks = row.generation.chunks
            budgets.append(chunks.max_tokens - row.request.statistics.emitted)
            cuts.append(chunks.cut)
            known.append(len(row.tokens))
        try:
            self._decoder.next_round(budgets, cuts, drain=drain)
        except BaseException:
            for row, count in zip(rows, known, strict=True):
                if len(row.tokens) == count:  # the round was undone, can run again
                    row.generation.chunks.undo()
            raise
        finally:  # also if a policy raised an error after the commit
            gone = [row for row in rows if row.ended]
            if gone:
                self.leave(gone)
        self._statistics.forwards += 1
        self._statistics.row_rounds += len(rows)
        if self._running.interrupt is not None:
            raise self._running.interrupt

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
        if self._rounds.proposals.shared is not None:
            self._rounds.proposals.shared.follow(self._running.requests)

    def _emit(self, result: Sequence[Read]) -> None:
        """Turn outcomes into chunks; end requests that failed or whose text ends."""
        for row, one in zip(self.rows, result, strict=True):
            generation = row.generation
            try:
                if isinstance(one, Exception):
                    raise one
                self._statistics.drafted += one.drafted
                self._statistics.accepted += one.accepted
                if row.request.statistics.drafter_faults:
                    generation.warn_of_faults()
                if one.reason is None and generation.prefixes is not None:
                    generation.prefixes.between_rounds(partial(self._lent, row))
                row.chunks = generation.chunks.take()
                if one.reason is not None:
                    with self._lent(row):
                        generation.end(one.reason)
            except BaseException as error:
                row.chunks = []
                row.fail(self._running.failure(error))
            self._statistics.emitted += len(row.chunks)

    @contextmanager
    def _lent(self, row: BatchRequest) -> Iterator[None]:
        """Let a request's own lane hold a copy of its caches inside the context."""
        try:
            self.give_back(row)
            yield
        finally:
            row.request.target.caches = []
            if self._rounds.proposals.shared is not None:
                self._rounds.proposals.shared.take_back(row.request)
