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

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlx_speculation.engine.batch_results import BatchResponse, BatchStatistics
from mlx_speculation.engine.results import Result
from mlx_speculation.engine.stream import Stream
from mlx_speculation.errors import InvalidRequestError, SpeculationError

if TYPE_CHECKING:
    from mlx_speculation.engine.generator import SpeculativeGenerator


class BatchGenerator:
    """Generates the text of many requests, which come and go.

    `next` runs one round of every row. Rows that are inserted later join between two
    rounds, and rows that have ended make room. It is used by one thread at a time.

    Args:
        generator: the target and its draft, whose options are those of the rows.
        max_rows: how many rows run at once; others wait, in their order.

    Raises:
        InvalidRequestError: `max_rows` is not at least 1.
    """

    def __init__(
        self, generator: "SpeculativeGenerator", *, max_rows: int = 32
    ) -> None:
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
            raise InvalidRequestError(
                f"max_rows is {max_rows!r}, and a whole number of at least 1 is needed."
            )
        self._generator = generator
        self._max_rows = max_rows
        self._next_uid = 0
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._streams: dict[int, Stream] = {}
        self._errors: dict[int, Exception] = {}
        self._ready: list[BatchResponse] = []  # Ctrl-C keeps them for the next call
        self._closed = False
        self.stats = BatchStatistics()

    @property
    def waiting(self) -> tuple[int, ...]:
        """The rows that have not begun, in their order."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """The rows that have begun and not ended, in the order of their responses."""
        return tuple(self._running)

    def insert(self, prompt: str | Sequence[int], **options: Any) -> int:
        """Add a row, and return its name; nothing runs before the next round.

        Args:
            prompt: text or token ids, see `SpeculativeGenerator.stream`.
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
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        self._streams[uid] = stream
        self._waiting.append(uid)
        return uid

    def next(self) -> list[BatchResponse]:
        """Let waiting rows join while there is room, and run one round of every row.

        Returns:
            What each row has emitted, in the order in which the rows were inserted,
            and of each row in the order of the text. Empty: there are no rows.
        """
        while self._waiting and len(self._running) < self._max_rows:
            self._running.append(self._waiting.popleft())
        self.stats.rounds += bool(self._running)
        for uid in tuple(self._running):
            self._ready += self._round_alone(uid)
        responses, self._ready = self._ready, []
        return responses

    def result(self, uid: int) -> Result:
        """Return the result of a row that has ended; `remove` lets go of it.

        Raises:
            InvalidRequestError: there is no such row.
            SpeculationError: it has not ended.
        """
        return self._stream(uid).result

    def error(self, uid: int) -> Exception | None:
        """Return what ended a row, if an error did.

        Raises:
            InvalidRequestError: there is no such row.
        """
        self._stream(uid)
        return self._errors.get(uid)

    def remove(self, uid: int) -> Result:
        """End a row if it has not ended, forget it, and return its result.

        Legal at any time between two rounds. Results are kept until then.

        Raises:
            InvalidRequestError: there is no such row.
        """
        stream = self._stream(uid)
        if uid in self._waiting:
            self._waiting.remove(uid)
        if not stream.ended:
            stream.close()
            self._end(uid)
        del self._streams[uid]
        self._errors.pop(uid, None)
        return stream.result

    def close(self) -> None:
        """End every row that has not ended; results stay. The second does nothing."""
        for uid, stream in self._streams.items():
            if not stream.ended:
                stream.close()
                self._end(uid)
        self._waiting.clear()
        self._closed = True

    def __enter__(self) -> "BatchGenerator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, uid: int) -> Stream:
        if uid not in self._streams:
            raise InvalidRequestError(
                f"There is no row {uid!r}: the batch has {len(self._streams)} rows, "
                "and forgets those that were removed. Pass what insert() returned."
            )
        return self._streams[uid]

    def _round_alone(self, uid: int) -> list[BatchResponse]:
        """Run a round of one row by itself."""
        stream = self._streams[uid]
        drafted, accepted = stream.stats.drafted, stream.stats.accepted
        try:
            chunks = stream.next_round()
        except Exception as error:
            self._errors[uid] = error
            self.stats.failed += 1
            self._end(uid)
            return [BatchResponse(uid, None, "error", error)]
        self.stats.drafted += stream.stats.drafted - drafted
        self.stats.accepted += stream.stats.accepted - accepted
        self.stats.emitted += len(chunks)
        if stream.ended:
            self._end(uid)
        if not chunks:
            return [BatchResponse(uid, None, stream.result.finish_reason)]
        return [BatchResponse(uid, chunk, chunk.finish_reason) for chunk in chunks]

    def _end(self, uid: int) -> None:
        """Let a row that has ended make room."""
        if uid in self._running:
            self._running.remove(uid)
        self.stats.finished += 1
