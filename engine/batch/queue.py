"""Queue of a batch: requests wait, join, run together or alone, and end."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from mlx_speculation.caches import KVQuantization, array_bytes
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.batch.results import BatchResponse, BatchStatistics
from mlx_speculation.engine.batch.running import RunningTogether
from mlx_speculation.interrupts import raised_by_signal
from mlx_speculation.models import PrefillBudget

# A prompt is read before an older one that has this many times as many tokens left.
# Nearly equal ones wait: they often share a beginning, which is then read once.
MUCH_SHORTER = 4


class BatchQueue:
    """The requests of a batch, of which at most `most` run at once.

    `waiting` is in the order of insertion, `running` in the order of beginning.
    `groups` maps each quantization of caches to its requests, which share forwards.
    `ready` holds responses for the next call of `BatchGenerator.next`.
    """

    def __init__(
        self,
        new_group: Callable[[], RunningTogether],
        statistics: BatchStatistics,
        most: int,
    ) -> None:
        self.rows: dict[int, BatchRequest] = {}
        self.waiting: deque[BatchRequest] = deque()
        self.running: list[BatchRequest] = []
        self.groups = defaultdict[KVQuantization | None, RunningTogether](new_group)
        self.ready: list[BatchResponse] = []
        self._joining: list[BatchRequest] = []  # have read their prompts; in no group
        self._overtakes = False  # whether a short prompt may be read before the oldest
        self._statistics, self._most = statistics, most

    def add(self, row: BatchRequest) -> None:
        """Append a request."""
        self.rows[row.uid] = row
        self.waiting.append(row)
        self._count_alone(row)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches of all requests that have not ended."""
        rows = (*self.running, *self.waiting)
        lanes = sum(array_bytes(lane.caches) for row in rows for lane in row.lanes)
        return sum(group.nbytes for group in self.groups.values()) + lanes

    def advance(self) -> None:
        """Read prompts, let their rows join, and run one round of every row."""
        if self.waiting or self._joining:
            self._join()
        self._statistics.rounds += bool(self.running)
        drain = bool(self.waiting) and len(self.running) < self._most
        for group in self.groups.values():
            rows = tuple(group.rows)
            try:
                if rows:
                    group.next_round(drain=drain)
            finally:  # chunks made before an error are returned too
                self._respond(rows)
        alone = []
        for row in self.running:  # a comprehension would cost a call
            if row.alone is not None:
                alone.append(row)
        if alone:
            steps = [row.request.target.prefill_step for row in alone]
            drafts = PrefillBudget(max(steps))
            for row in alone:
                self._round_alone(row, drafts)

    def close(self, row: BatchRequest) -> None:
        """End a row, waiting or running, if it has not ended."""
        if row.ended:
            return
        for rows in (self.waiting, self.running, self._joining):
            if row in rows:
                rows.remove(row)
        self._statistics.finished += 1
        try:
            for group in self.groups.values():
                if row in group.rows:
                    group.release(row)
            row.stream.close()
        except Exception:  # such as running out of memory
            row.fail()
            raise
        finally:
            row.let_go()

    def _join(self) -> None:
        if any(group.in_flight for group in self.groups.values()):
            return
        room: PrefillBudget | None = None
        while self.waiting and len(self.running) < self._most:
            row = self._next_prompt()
            room = room or PrefillBudget(row.request.target.prefill_step)
            try:
                if not row.begin(room.fits):
                    break
            except Exception as error:
                if raised_by_signal(error):
                    raise
                row.error = error
            if row.alone is None and not row.ended:
                row.keep_prompt()
                self._joining.append(row)
            self.waiting.remove(row)
            self.running.append(row)
            if row.ended:
                self._respond([row])
        self._overtakes = not self._overtakes
        joining = defaultdict[KVQuantization | None, list[BatchRequest]](list)
        for row in self._joining:
            if not row.ended:
                joining[row.quantization].append(row)
        for key, rows in joining.items():
            try:
                self.groups[key].join(rows)
            except Exception as error:  # none of `rows` has joined
                for row in rows:
                    row.alone = f"its caches cannot be put beside others: {error}"
                    self._count_alone(row)
        self._joining = []

    def _next_prompt(self) -> BatchRequest:
        """Return the request whose prompt is read next.

        In every second chunk a prompt that is much shorter than the oldest one is read
        first, so that short requests do not wait for long ones, which take up to some
        twice as many rounds. The last free place is kept for the oldest one.
        """
        oldest = self.waiting[0]
        if self._overtakes and len(self.running) + 1 < self._most:
            longest = oldest.unread // MUCH_SHORTER
            for row in self.waiting:
                if row.unread <= longest:
                    return row
        return oldest

    def _count_alone(self, row: BatchRequest) -> None:
        if row.alone is not None:
            counts = self._statistics.alone
            counts[row.alone] = counts.get(row.alone, 0) + 1

    def _round_alone(self, row: BatchRequest, room: PrefillBudget) -> None:
        """Run a round of one row alone; `room` limits what its drafter may read."""
        counts, stats = self._statistics, row.stream.stats
        drafted, accepted = stats.drafted, stats.accepted
        try:
            row.chunks = row.stream.next_round(room.fits)
        except Exception as error:
            if raised_by_signal(error):
                raise
            row.error = error
        counts.drafted += stats.drafted - drafted
        counts.accepted += stats.accepted - accepted
        counts.emitted += len(row.chunks)
        self._respond([row])

    def _respond(self, rows: Sequence[BatchRequest]) -> None:
        """Queue the responses of rows for this round, and drop the rows that ended."""
        for row in rows:
            uid, chunks, row.chunks = row.uid, row.chunks, []
            for chunk in chunks:
                self.ready.append(BatchResponse(uid, chunk, chunk.finish_reason))
            if row.error is not None:
                self.ready.append(BatchResponse(uid, None, "error", row.error))
                self._statistics.failed += 1
            elif row.generation.result is None:
                continue
            elif not chunks:
                reason = row.generation.result.finish_reason
                self.ready.append(BatchResponse(uid, None, reason))
            row.let_go()
            self.running.remove(row)
            self._statistics.finished += 1
