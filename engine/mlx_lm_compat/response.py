"""From a stream to mlx-lm's responses: its text, its counts, its times."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.mlx_lm_compat.api import GenerationResponse
from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.stream import Stream


@dataclass
class SpeculativeResponse(GenerationResponse):
    """mlx-lm's response, with our statistics.

    `from_draft` says whether the token was drafted and accepted, as mlx-lm's, but for
    the last of `max_tokens`: nothing would be gained by a draft of it. `logprobs` are
    float32 [vocab], not evaluated, and minus infinity for ids that the tokenizer lacks.

    Attributes:
        stats: counts and times so far, the same object in all responses of a text.
        seed: decides the text above temperature 0; None where a sampler draws.
    """

    stats: Statistics | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """What responses say beside the chunk.

    Attributes:
        detokenizer: of mlx-lm, fresh.
        ends: the ids that end a text and are no part of it.
        prompt_tokens: how many the prompt has.
        vocab: how many log-probabilities the target has.
        seed: of the text, if there is one.
    """

    detokenizer: Any
    ends: frozenset[int]
    prompt_tokens: int
    vocab: int
    seed: int | None


def responses(
    stream: Stream,
    info: ResponseInfo,
    device: mx.Stream | mx.ThreadLocalStream | None,
    each: Callable[[], None],
    progress: "Progress",
) -> Generator[SpeculativeResponse, None, None]:
    """Yield a response for every token.

    Args:
        stream: not started.
        info: what the responses say.
        device: the stream that mlx works on; None: the usual one.
        each: called when caches may have changed.
        progress: tells how far the prompt is read.
    """

    def working() -> AbstractContextManager[Any]:
        return nullcontext() if device is None else mx.stream(device)

    clock = _Clock(time.perf_counter())
    progress.tell(0)
    try:
        while not stream.ended:
            with working():
                chunk = next(stream, None)
            if chunk is None:
                return
            each()
            if not clock.tokens:
                progress.tell(progress.total)
            yield _response(chunk, info, clock.tick(), stream.stats)
    finally:
        try:
            with working():
                stream.close()
        finally:
            each()


class Progress:
    """Tells a caller how much of the prompt is read, as mlx-lm does.

    Args:
        callback: gets the tokens read so far and all of them; None: nobody.
        total: how many the prompt has.
    """

    def __init__(self, callback: Callable[[int, int], Any] | None, total: int) -> None:
        self._callback = callback
        self.total, self._read = total, 0

    def advance(self, tokens: int) -> None:
        """Note that so many more are read."""
        self._read = min(self._read + tokens, self.total)
        self.tell(self._read)

    def tell(self, read: int) -> None:
        """Tell the caller."""
        if self._callback is not None:
            self._callback(read, self.total)


class _Clock:
    """Tells the prompt's time from that of the tokens after the first, as mlx-lm."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.tokens = 0
        self.prompt_seconds = 0.0

    def tick(self) -> "_Clock":
        """Note that a token is there."""
        now = time.perf_counter()
        if self.tokens == 0:
            self.prompt_seconds, self.started = now - self.started, now
        self.tokens += 1
        return self

    @property
    def speed(self) -> float:
        """Tokens per second since the first one was there."""
        return self.tokens / max(time.perf_counter() - self.started, 1e-9)


def _response(
    chunk: Chunk, info: ResponseInfo, clock: _Clock, stats: Statistics
) -> SpeculativeResponse:
    """Return the response to a chunk, with mlx-lm's text of it."""
    if chunk.token not in info.ends:
        info.detokenizer.add_token(chunk.token)
    if chunk.finish_reason is not None:
        info.detokenizer.finalize()
    assert chunk.logprob is not None
    assert chunk.logprob.row is not None
    return SpeculativeResponse(
        text=info.detokenizer.last_segment,
        token=chunk.token,
        logprobs=_whole(chunk.logprob.row, info.vocab),
        from_draft=chunk.origin.writer == "accepted",
        prompt_tokens=info.prompt_tokens,
        prompt_tps=info.prompt_tokens / max(clock.prompt_seconds, 1e-9),
        generation_tokens=clock.tokens,
        generation_tps=clock.speed,
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=chunk.finish_reason,
        stats=stats,
        seed=info.seed,
    )


def _whole(row: mx.array, vocab: int) -> mx.array:
    lacking = vocab - row.shape[0]
    if lacking <= 0:
        return row
    return mx.concatenate([row, mx.full((lacking,), -mx.inf, row.dtype)])
