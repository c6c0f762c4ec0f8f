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
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Unpack

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.batch.queue import BatchQueue
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
        self._next_uid = 0
        self._open = ExitStack()
        self.stats = stats = BatchStatistics()
        model, sizes = generator.model, RowSizes(max_rows, row_sizes)

        def group() -> RunningTogether:
            return RunningTogether(model, generator.lengths.for_batch(), stats, sizes)

        self._queue = BatchQueue(group, stats, max_rows)
        self._rows, self._groups = self._queue.rows, self._queue.groups

    @property
    def waiting(self) -> tuple[int, ...]:
        """The rows whose prompts are not read to the end, in their order."""
        return tuple(row.uid for row in self._queue.waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """The rows that are generating, in the order of their responses."""
        return tuple(row.uid for row in self._queue.running)

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
            self._queue.add(BatchRequest(uid, stream, alone))
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
            if self._queue.waiting and not self._wired:
                # For as long as the batch: rows that end restore what they have found.
                self._wired = True
                close_at_exit(self._open)
                self._open.enter_context(wired(self._generator.model))
            self._queue.advance()
        # Rows respond in the order of insertion, each in the order of its text.
        responses = sorted(self._queue.ready, key=attrgetter("uid"))
        # From here on nothing is called, and so no signal is handled.
        self._queue.ready = []
        return responses

    @property
    def memory(self) -> int:
        """Bytes of the caches of all rows that have not ended, as allocated.

        Of drafters that a row has for itself, those of models are counted.
        """
        return self._queue.nbytes

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
            self._queue.close(row)
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
                stack.callback(self._queue.close, row)

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
