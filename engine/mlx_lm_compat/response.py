"""Conversion of a stream's chunks to mlx-lm's responses."""

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
    """mlx-lm's response, with statistics and the seed.

    As in mlx-lm, `from_draft` says whether the token was drafted and accepted. Unlike
    in mlx-lm, the last of `max_tokens` is never drafted, since that would gain nothing.
    `logprobs` are float32 [vocab], unevaluated; minus infinity for unused ids.

    Attributes:
        stats: counts and times so far, the same object in all responses of a text.
        seed: determines the text; None: greedy text, or a user's sampler.
    """

    stats: Statistics | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """Values of a response that do not come from the chunk."""

    detokenizer: Any  # mlx-lm's, new for this text
    ends: frozenset[int]  # ids that end the text and are no part of it
    prompt_tokens: int  # the number of tokens of the prompt
    vocab: int  # the number of log-probabilities of the target
    seed: int | None  # the seed of the text; None: it has none


def responses(
    stream: Stream,
    info: ResponseInfo,
    device: mx.Stream | mx.ThreadLocalStream | None,
    each: Callable[[], None],
    progress: "Progress",
) -> Generator[SpeculativeResponse, None, None]:
    """Yield a response for every token; call `each` after each one and at the end."""
    # A local name: if Python exits before the text ends, globals are None in `finally`.
    working: Callable[[], AbstractContextManager[Any]] = (
        nullcontext if device is None else partial(mx.stream, device)
    )
    # `started` is the beginning of the prompt, then the time of the first token
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
    """Reports to a caller how many tokens of the prompt are read, as mlx-lm does."""

    def __init__(self, callback: Callable[[int, int], Any] | None, total: int) -> None:
        self._callback = callback
        self.total, self._read = total, 0

    def advance(self, tokens: int) -> None:
        """Note and report that `tokens` more tokens are read."""
        self._read = min(self._read + tokens, self.total)
        self.tell(self._read)

    def tell(self, read: int) -> None:
        """Report that `read` tokens are read."""
        if self._callback is not None:
            self._callback(read, self.total)


def _response(
    chunk: Chunk,
    info: ResponseInfo,
    tokens: int,
    seconds: tuple[float, float],
    stats: Statistics,
) -> SpeculativeResponse:
    """Return the response of a chunk, with the text of mlx-lm's detokenizer.

    `seconds` are those of the prompt, and those since the first token.
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
