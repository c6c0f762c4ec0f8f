"""Many requests at once: rows that join and leave between rounds.

    batch = BatchGenerator(generator)
    uid = batch.insert("def fib(n):", max_tokens=64)
    while batch.running or batch.waiting:
        for response in batch.next():
            ...
    batch.remove(uid).text

What a row generates does not depend on the others: it is the text of the same prompt,
options and seed alone.
"""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Unpack

from mlx_speculation.caches import KVQuantization, array_bytes
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import (
    BatchRequest,
    StreamSource,
    reason_alone,
)
from mlx_speculation.engine.batch.results import BatchResponse, BatchStatistics
from mlx_speculation.engine.batch.running import RunningTogether
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.engine.result import Result
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.interrupts import (
    DeferredSignals,
    close_at_exit,
    finalize,
    raised_by_signal,
)
from mlx_speculation.models import RowSizes, wired


class BatchGenerator:
    """Generates the text of many requests, which come and go.

    `next` runs one round of every row. Rows that are inserted later join between two
    rounds, where one chunk's worth of their prompts is read at most, and rows that have
    ended make room. It is used by one thread at a time. Ctrl-C, as whatever else a
    signal's handler raises, waits for the end of a round or of a chunk of a prompt;
    what the interrupted call has not returned, the next one does.

    Args:
        generator: a `SpeculativeGenerator`, whose options are those of the rows.
        max_rows: how many rows run at once; others wait, in their order.
        row_sizes: show the models few numbers of rows, see `models/shape_buckets.py`;
            the texts are the same. None: where each new number is dear.

    Raises:
        InvalidRequestError: `max_rows` is not at least 1.
    """

    _ending = staticmethod(sys.is_finalizing)  # globals are None when it is needed

    def __init__(
        self,
        generator: StreamSource,
        *,
        max_rows: int = 32,
        row_sizes: bool | None = None,
    ) -> None:
        self._closed = self._wired = False
        checked_count("max_rows", max_rows, 1)
        if generator.ranks > 1:
            raise InvalidRequestError(
                f"A batch was asked for, and the target is on {generator.ranks} ranks, "
                "which generate one text at a time. Use generator.generate()."
            )
        self._generator = generator
        self._max_rows = max_rows
        self._next_uid = 0
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._rows: dict[int, BatchRequest] = {}
        self._joining: list[BatchRequest] = []  # their prompts were read
        self._ready: list[BatchResponse] = []  # not handed out yet
        self._open = ExitStack()
        self.stats = BatchStatistics()
        self._sizes = RowSizes(max_rows, row_sizes)
        # Those that run together, by the quantization of their caches
        self._groups: dict[KVQuantization | None, RunningTogether] = {}
        self._group(None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The rows whose prompts are not read to the end, in their order."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """The rows that are generating, in the order of their responses."""
        return tuple(self._running)

    def insert(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> int:
        """Add a row, and return its name; nothing runs before the next round.

        Args:
            prompt: text, token ids or messages, see `SpeculativeGenerator.stream`.
            options: whatever that takes beside it.

        Raises:
            InvalidRequestError: an argument is out of range; the batch is as before.
            SpeculationError: the batch was closed.
        """
        if self._closed:
            raise SpeculationError(
                "insert was called on a batch that was closed. Make another "
                "BatchGenerator of the same generator."
            )
        stream = self._generator.stream(prompt, **options)
        alone = reason_alone(stream, self._generator.model, options)
        with DeferredSignals():
            uid, self._next_uid = self._next_uid, self._next_uid + 1
            self._rows[uid] = BatchRequest(uid, stream, alone)
            self._waiting.append(uid)
            self._count_alone(self._rows[uid])
        return uid

    def next(self) -> list[BatchResponse]:
        """Read prompts, let their rows join, and run one round of every row.

        Prompts are read in their order while there is room for rows, at most one
        chunk's worth (`prefill_step_size`) in a call, which short ones share. The
        call costs the running rows that much and no more.

        Returns:
            What each row has emitted, in the order in which the rows were inserted,
            and of each row in the order of the text. Empty: there are no rows, or all
            of them are waiting for the first prompt.
        """
        with DeferredSignals(checkpoints=True):
            self._advance()
        # Rows respond in the order of insertion, each in the order of its text.
        responses = sorted(self._ready, key=lambda response: response.uid)
        # From here on nothing is called, and so no signal is handled.
        self._ready = []
        return responses

    def _advance(self) -> None:
        """Read prompts, let their rows join, and run one round of every row."""
        if self._waiting and not self._wired:
            # For as long as the batch: rows that end restore what they have found.
            self._wired = True
            close_at_exit(self._open)
            self._open.enter_context(wired(self._generator.model))
        if not any(group.in_flight for group in self._groups.values()):
            self._join()
        self.stats.rounds += bool(self._running)
        room = len(self._running) < self._max_rows
        for group in self._groups.values():
            rows = tuple(group.rows)
            try:
                if rows:
                    group.next_round(drain=room and bool(self._waiting))
            finally:  # what was read before an error is handed out
                for row in rows:
                    self._respond(row)
        running = [self._rows[uid] for uid in self._running]
        alone = [row for row in running if row.alone is not None]
        steps = [row.request.target.prefill_step for row in alone]
        drafts = PrefillBudget(max(steps, default=0))
        for row in alone:
            self._round_alone(row, drafts)

    @property
    def memory(self) -> int:
        """Bytes of the caches of all rows that have not ended, as allocated.

        Of drafters that a row has for itself, those of models are counted.
        """
        rows = [self._rows[uid] for uid in (*self._running, *self._waiting)]
        own = sum(array_bytes(lane.caches) for row in rows for lane in row.lanes)
        return sum(group.nbytes for group in self._groups.values()) + own

    def why_alone(self, uid: int) -> str | None:
        """Return why a row does not run together with others; None: it does.

        Raises:
            InvalidRequestError: there is no such row.
        """
        return self._row(uid).alone

    def result(self, uid: int) -> Result:
        """Return the result of a row that has ended; `remove` lets go of it.

        Raises:
            InvalidRequestError: there is no such row.
            SpeculationError: it has not ended.
        """
        return self._row(uid).stream.result

    def error(self, uid: int) -> Exception | None:
        """Return what ended a row, if an error did.

        Raises:
            InvalidRequestError: there is no such row.
        """
        return self._row(uid).error

    def remove(self, uid: int) -> Result:
        """End a row if it has not ended, forget it, and return its result.

        Legal at any time between two rounds. Results are kept until then.

        Raises:
            InvalidRequestError: there is no such row.
        """
        row = self._row(uid)
        with DeferredSignals():
            self._close(row)
            self._rows.pop(uid, None)
        return row.stream.result

    def close(self) -> None:
        """End every row that has not ended; results stay. The second does nothing.

        Nor does one that Python makes while it ends.
        """
        if self._closed or self._ending():
            return
        with DeferredSignals(), ExitStack() as stack:  # which calls all, in this order
            self._closed = True
            stack.callback(self._open.close)
            for group in self._groups.values():
                stack.callback(group.end)
            for row in reversed(self._rows.values()):
                stack.callback(self._close, row)

    def __enter__(self) -> "BatchGenerator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        """Leave what was entered, when the batch is dropped before it is closed."""
        if self._wired and not self._closed:
            finalize(self._open.close)

    def _row(self, uid: int) -> BatchRequest:
        if uid not in self._rows:
            raise InvalidRequestError(
                f"There is no row {uid!r}: the batch has {len(self._rows)} rows, "
                "and forgets those that were removed. Pass what insert() returned."
            )
        return self._rows[uid]

    def _join(self) -> None:
        """Read prompts while there is room, and let those rows join that are read."""
        room: PrefillBudget | None = None
        while self._waiting and len(self._running) < self._max_rows:
            row = self._rows[self._waiting[0]]
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
            self._running.append(self._waiting.popleft())
            if row.ended:
                self._respond(row)
        groups: dict[KVQuantization | None, list[BatchRequest]] = {}
        for row in self._joining:
            if not row.ended:
                groups.setdefault(row.quantization, []).append(row)
        for key, joining in groups.items():
            try:
                self._group(key).join(joining)
            except Exception as error:  # nothing was put together
                for row in joining:
                    row.alone = f"its caches cannot be put beside others: {error}"
                    self._count_alone(row)
        self._joining = []

    def _group(self, key: KVQuantization | None) -> RunningTogether:
        if key not in self._groups:
            lengths = self._generator.lengths.for_batch()
            self._groups[key] = RunningTogether(
                self._generator.model, lengths, self.stats, self._sizes
            )
        return self._groups[key]

    def _count_alone(self, row: BatchRequest) -> None:
        if row.alone is not None:
            self.stats.alone[row.alone] = self.stats.alone.get(row.alone, 0) + 1

    def _respond(self, row: BatchRequest) -> None:
        """Give out what a row has got in this round."""
        uid = row.uid
        self._ready += [BatchResponse(uid, c, c.finish_reason) for c in row.chunks]
        if row.error is not None:
            self._ready.append(BatchResponse(uid, None, "error", row.error))
            self.stats.failed += 1
        elif row.ended and not row.chunks:
            self._ready.append(
                BatchResponse(uid, None, row.stream.result.finish_reason)
            )
        row.chunks = []
        if row.ended:
            row.let_go()
            self._running.remove(uid)
            self.stats.finished += 1

    def _round_alone(self, row: BatchRequest, room: PrefillBudget) -> None:
        """Run a round of one row by itself, with room for what its draft reads."""
        stats = row.stream.stats
        drafted, accepted = stats.drafted, stats.accepted
        try:
            row.chunks = row.stream.next_round(room.fits)
        except Exception as error:
            if raised_by_signal(error):
                raise
            row.error = error
        self.stats.drafted += stats.drafted - drafted
        self.stats.accepted += stats.accepted - accepted
        self.stats.emitted += len(row.chunks)
        self._respond(row)

    def _close(self, row: BatchRequest) -> None:
        """End a row that has not ended, whatever it is about."""
        if row.ended:
            return
        for uids in (self._waiting, self._running):
            if row.uid in uids:
                uids.remove(row.uid)
        self._joining = [other for other in self._joining if other is not row]
        self.stats.finished += 1
        try:
            for group in self._groups.values():
                if row in group.rows:
                    try:
                        group.give_back(row)
                    finally:
                        group.leave([row])
            row.stream.close()
        except Exception:  # such as running out of memory
            row.fail()
            raise
        finally:
            row.let_go()
