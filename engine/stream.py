"""One running generation: an iterator of chunks that can be closed at any time."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

from mlx_speculation.engine.decoding import Cut, Decoder
from mlx_speculation.engine.results import Chunk, Result
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.statistics import Statistics
from mlx_speculation.engine.text import TextStream
from mlx_speculation.errors import SpeculationError


class Stream:
    """Yields one `Chunk` per emitted token.

    With the caller's own `prompt_cache`: after the last chunk or `close()` it holds
    exactly `cached_tokens`. These start with the prompt and the yielded tokens, and
    exceed them by less than one round. After an error they are what was committed
    before the failing round.

    Args:
        make_decoder: builds the decoder from the function that cuts its rounds.
        sequence: the tokens in the caches and the prompt.
        text: turns tokens into text.
        max_tokens: how many tokens to emit at most.
        seed: what the chooser was given, for the result.
        hold_all: let the caches hold the last token too when the stream ends.
        running: entered at the first chunk, left at the end.
    """

    def __init__(
        self,
        *,
        make_decoder: Callable[[Callable[[list[int]], Cut]], Decoder],
        sequence: Sequence,
        text: TextStream,
        max_tokens: int,
        seed: int,
        hold_all: bool,
        running: AbstractContextManager[None],
    ) -> None:
        self._decoder = make_decoder(self._cut)
        self._sequence = sequence
        self._text = text
        self._max_tokens = max_tokens
        self._seed = seed
        self._hold_all = hold_all
        self._ready: deque[Chunk] = deque()
        self._yielded: list[Chunk] = []
        self._result: Result | None = None
        self._chunks = self._run(running)

    @property
    def stats(self) -> Statistics:
        """Counts and times so far."""
        return self._decoder.statistics

    @property
    def seed(self) -> int:
        """What decides the text at a temperature above 0."""
        return self._seed

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    @property
    def cached_tokens(self) -> list[int]:
        """The known tokens that the target's caches hold now, in order."""
        return self._sequence.tokens[: self._decoder.seen]

    @property
    def result(self) -> Result:
        """The generation as a whole, once it has ended.

        Raises:
            SpeculationError: it is still running.
        """
        if self._result is None:
            raise SpeculationError(
                f"The stream has yielded {len(self._yielded)} of at most "
                f"{self._max_tokens} tokens and is still running. Read it to its end, "
                "or call close() first."
            )
        return self._result

    def close(self) -> None:
        """End the generation now. The second call does nothing."""
        if self._result is not None:
            return
        self._chunks.close()
        self._end("closed")

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self, running: AbstractContextManager[None]
    ) -> Generator[Chunk, None, None]:
        with running:
            reason = None
            try:
                self._decoder.prefill()
                while reason is None and self.stats.emitted < self._max_tokens:
                    self._ready.clear()
                    reason = self._decoder.next_round(
                        self._max_tokens - self.stats.emitted
                    )
                    if reason is not None and self._hold_all:
                        self._decoder.hold_all()
                    yield from self._give(reason)
                if reason is None:  # a budget of nothing
                    self._end("length")
            except Exception:
                self._set_result("error")
                raise

    def _give(self, reason: str | None) -> Iterator[Chunk]:
        """Yield the round's chunks; the result is there with the last of all."""
        while self._ready:
            chunk = self._ready.popleft()
            self._yielded.append(chunk)
            if reason is not None and not self._ready:
                self._end(reason)
            yield chunk

    def _end(self, reason: str) -> None:
        if self._hold_all:
            self._decoder.hold_all()
        self._set_result(reason)

    def _set_result(self, reason: str) -> None:
        self._result = Result(
            text="".join(chunk.text for chunk in self._yielded),
            tokens=[chunk.token for chunk in self._yielded],
            finish_reason=reason,
            stats=self.stats,
            seed=self._seed,
            cached_tokens=self.cached_tokens,
            next_token=self._decoder.next_token() if self._hold_all else None,
        )

    def _cut(self, emitted: list[int]) -> Cut:
        """Turn a round's tokens into chunks, up to a stop or the budget."""
        reason: str | None = None
        for token in emitted:
            text, stopped = self._text.add(token)
            if stopped:
                reason = "stop"
            elif self.stats.emitted + len(self._ready) + 1 == self._max_tokens:
                reason = "length"
                text += self._text.finish()
            self._ready.append(Chunk(text, token, reason))
            if reason is not None:
                break
        return Cut(len(self._ready), reason)
