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

    `from_draft` says whether the token was drafted and accepted. Unlike in mlx-lm, the
    last of `max_tokens` tokens is never drafted. `logprobs` are float32 [vocab],
    unevaluated; minus infinity for ids that the tokenizer lacks.

    Attributes:
        stats: counts and times so far, the same object in all responses of a text.
        seed: determines the text; None: greedy text, or a user's sampler.
    """

    stats: Statistics | None = None
    seed: int | None = None


def responses(
    stream: Stream,
    tokenizer: Any,
    detokenizer: Any,
    progress: "Progress",
    vocab: int,
    *,
    device: mx.Stream | mx.ThreadLocalStream | None = None,
    each: Callable[[], None] = lambda: None,
) -> Generator[SpeculativeResponse, None, None]:
    """Yield a response for every token.

    `stream` keeps the log-probabilities of all ids. `detokenizer` is new for this text.
    `vocab` is the number of logits in a row of the target. `device` is the stream that
    mlx works on; None: the default one. `each` is called before each response is
    yielded, and at the end.
    """
    # A local name: if Python exits before the text ends, globals are None in `finally`.
    working = _working(device)
    make = partial(
        SpeculativeResponse,
        prompt_tokens=progress.total,
        stats=stream.stats,
        seed=_seed(stream),
    )
    # `started`: the start of prefill, later the time of the first token
    started, prompt_seconds, tokens = time.perf_counter(), 0.0, 0
    progress.tell(0)
    try:
        while not stream.ended:
            with working():
                if (chunk := next(stream, None)) is None:
                    return
            each()
            if not tokens:
                progress.tell(progress.total)
                now = time.perf_counter()
                prompt_seconds, started = now - started, now
            tokens += 1
            yield make(
                text=_text(chunk, tokenizer, detokenizer),
                token=chunk.token,
                logprobs=_whole_row(chunk, vocab),
                from_draft=chunk.origin.writer == "accepted",
                prompt_tps=progress.total / max(prompt_seconds, 1e-9),
                generation_tokens=tokens,
                generation_tps=tokens / max(time.perf_counter() - started, 1e-9),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=chunk.finish_reason,
            )
    finally:
        try:
            with working():
                stream.close()
        finally:
            each()


def _working(
    device: mx.Stream | mx.ThreadLocalStream | None,
) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if device is None else partial(mx.stream, device)


def _seed(stream: Stream) -> int | None:
    """Return the seed of a text; None: it is greedy, or a user's sampler draws."""
    sampling = stream.request.verifier.chooser.sampling
    return None if sampling.greedy or sampling.sampler else stream.seed


def _text(chunk: Any, tokenizer: Any, detokenizer: Any) -> str:
    """Return the text that a token completes."""
    if chunk.token not in tokenizer.eos_token_ids:
        detokenizer.add_token(chunk.token)
    if chunk.finish_reason is not None:
        detokenizer.finalize()
    text: str = detokenizer.last_segment
    return text


class Progress:
    """Reports to a caller how many tokens of the prompt are read, as mlx-lm does."""

    def __init__(self, callback: Callable[[int, int], Any] | None, total: int) -> None:
        self._callback = callback
        self.total, self._read = total, 0

    def advance(self, tokens: int) -> None:
        """Report that `tokens` more tokens are read."""
        self._read = min(self._read + tokens, self.total)
        self.tell(self._read)

    def tell(self, read: int) -> None:
        """Report that `read` tokens are read."""
        if self._callback is not None:
            self._callback(read, self.total)


def _whole_row(chunk: Chunk, vocab: int) -> mx.array:
    assert chunk.logprob is not None
    row = chunk.logprob.row
    assert row is not None
    lacking = vocab - row.shape[0]
    if lacking <= 0:
        return row
    return mx.concatenate([row, mx.full((lacking,), -mx.inf, row.dtype)])
