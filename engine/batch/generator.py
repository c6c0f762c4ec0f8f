"""Continuous batching: requests join and leave a batch between two rounds.

    batch = BatchGenerator(generator)
    uid = batch.insert("def fib(n):", max_tokens=64)
    while batch.running or batch.waiting:
        for response in batch.next():
            ...
    batch.remove(uid).text

A request of a batch is called a row. It gets the text that a stream with the same
prompt, options and seed generates.
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
    """Generates the text of many requests, the rows of a batch.

    Only one thread at a time may use a batch. Ctrl-C, like any error of a signal
    handler, is raised at the end of a round or of a chunk of a prompt. The next call of
    `next` then returns the responses that the interrupted call did not return.

    Methods that take a `uid` raise InvalidRequestError if no row has this id.

    Args:
        generator: a `SpeculativeGenerator`; the rows have its options.
        max_rows: the largest number of rows that run at once. Further rows wait.
        row_sizes: True: pad the batch to 1, 2, 3, 4, 6, 8, 12, ... rows, see
            `models/shape_buckets.py`. Padding changes no text. None: pad only if a new
            number of rows takes long to compile. False: never pad.

    Raises:
        InvalidRequestError: `max_rows` is below 1, or the target is on several ranks.
    """

    _ending = staticmethod(sys.is_finalizing)  # globals are None when Python exits

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
                f"A batch cannot run on the {generator.ranks} ranks of this target, "
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
        """Ids of rows whose prompts are not completely read, in order of insertion."""
        return tuple(row.uid for row in self._queue.waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the rows that are generating, in the order of their responses."""
        return tuple(sorted(row.uid for row in self._queue.running))

    def insert(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> int:
        """Add a row, which `next` will run, and return its id.

        The arguments are those of `SpeculativeGenerator.stream`.

        Raises:
            InvalidRequestError: an argument is out of range; no row was added.
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

        A call reads at most one chunk (`prefill_step_size` tokens), which may hold
        several short prompts, while there is room for rows. Prompts are read in the
        order of insertion, but every second chunk begins with one that is at most a
        quarter as long as what is left of the oldest.

        Responses are in the order in which their rows were inserted. The responses of
        one row are in the order of its tokens. A row has no response before its prompt
        is read.
        """
        with DeferredSignals(checkpoints=True):
            if self._queue.waiting and not self._wired:
                # A stream sets mlx's limit of wired memory, and restores the earlier
                # limit at its end. The batch sets the limit before any stream does, so
                # the limit stays until the batch is closed.
                self._wired = True
                close_at_exit(self._open)
                self._open.enter_context(wired(self._generator.model))
            self._queue.advance()
        responses = sorted(self._queue.ready, key=attrgetter("uid"))
        # From here on no function is called, so no signal handler can run and lose
        # the responses.
        self._queue.ready = []
        return responses

    @property
    def memory(self) -> int:
        """Allocated bytes of the caches of rows that have not ended.

        The caches of their drafters are included.
        """
        return self._queue.nbytes

    def why_alone(self, uid: int) -> str | None:
        """Return why a row runs in forwards of its own; None: it shares forwards."""
        return self._row(uid).alone

    def result(self, uid: int) -> Result:
        """Return the result of a row that has ended. It is kept until `remove`.

        Raises:
            SpeculationError: the row has not ended.
        """
        return self._row(uid).stream.result

    def error(self, uid: int) -> Exception | None:
        """Return the error that ended a row, or None."""
        return self._row(uid).error

    def remove(self, uid: int) -> Result:
        """End a row if it has not ended, forget it, and return its result."""
        row = self._row(uid)
        with DeferredSignals():
            self._queue.close(row)
            self._rows.pop(uid, None)
        return row.stream.result

    def close(self) -> None:
        """End every row. Results stay until `remove`. Do nothing while Python exits."""
        if self._closed or self._ending():
            return
        with DeferredSignals(), ExitStack() as stack:  # calls all, even if one raises
            self._closed = True
            stack.callback(self._open.close)
            for row in reversed(self._rows.values()):
                stack.callback(self._queue.close, row)

    def __enter__(self) -> "BatchGenerator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        """Restore the wired limit if a batch is dropped before it is closed."""
        if self._wired and not self._closed:
            finalize(self._open.close)

    def _row(self, uid: int) -> BatchRequest:
        if uid not in self._rows:
            raise InvalidRequestError(
                f"There is no row {uid!r}: the batch has {len(self._rows)} rows, "
                "and forgets those that were removed. Pass what insert() returned."
            )
        return self._rows[uid]
