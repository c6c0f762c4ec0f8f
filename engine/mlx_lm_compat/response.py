"""From a stream to mlx-lm's responses: its text, its counts, its times."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

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
    """Fields of a response beside the chunk."""

    detokenizer: Any  # of mlx-lm, fresh
    ends: frozenset[int]  # the ids that end a text and are no part of it
    prompt_tokens: int  # how many the prompt has
    vocab: int  # how many log-probabilities the target has
    seed: int | None  # of the text, if there is one


def responses(
    stream: Stream,
    info: ResponseInfo,
    device: mx.Stream | mx.ThreadLocalStream | None,
    each: Callable[[], None],
    progress: "Progress",
) -> Generator[SpeculativeResponse, None, None]:
    """Yield a response for every token."""
    # A local name: where Python ends before the text does, globals are None below.
    working: Callable[[], AbstractContextManager[Any]] = (
        nullcontext if device is None else partial(mx.stream, device)
    )
    # Of the prompt until the first token is there, then of the tokens after it.
    started, prompt_seconds, tokens = time.perf_counter(), 0.0, 0
    progress.tell(0)
    try:
        while not stream.ended:
            with working():
                chunk = next(stream, None)
            if chunk is None:
                return
            each()
            if not tokens:
                progress.tell(progress.total)
                now = time.perf_counter()
                prompt_seconds, started = now - started, now
            tokens += 1
            seconds = prompt_seconds, time.perf_counter() - started
            yield _response(chunk, info, tokens, seconds, stream.stats)
    finally:
        try:
            with working():
                stream.close()
        finally:
            each()


class Progress:
    """Tells a caller how much of the prompt is read, as mlx-lm does."""

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


def _response(
    chunk: Chunk,
    info: ResponseInfo,
    tokens: int,
    seconds: tuple[float, float],
    stats: Statistics,
) -> SpeculativeResponse:
    """Return the response to a chunk, with mlx-lm's text of it.

    The seconds are those of the prompt, and since the first token.
    """
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
        prompt_tps=info.prompt_tokens / max(seconds[0], 1e-9),
        generation_tokens=tokens,
        generation_tps=tokens / max(seconds[1], 1e-9),
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
