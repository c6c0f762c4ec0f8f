"""Result of a generation: tokens, text, and the origin of each token."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from mlx_speculation.engine.memory import Memory
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.samplers import LogProbs

Writer = Literal["step", "accepted", "correction", "bonus"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a token.

    Attributes:
        writer: "accepted" for a drafted token; "correction" or "bonus" for the
            target's own after it; "step" for the target's without a draft.
        place: of an accepted token in its draft, from 0; None for the others.
    """

    writer: Writer
    place: int | None = None


STEP = Origin("step")


@dataclass(frozen=True, slots=True)
class LogProb:
    """Log-probability of a token: after processors, before filters and temperature.

    Attributes:
        value: the natural logarithm of its probability.
        top: pairs of a token id and its log-probability, the most probable first, of
            equals the chosen one.
        row: of all ids, float32 [ids], not evaluated; in chunks of streams that were
            asked for it, and never in a result.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()
    row: mx.array | None = field(default=None, compare=False, repr=False)


def listed(report: LogProbs, rows: slice) -> list[LogProb]:
    """Return the report on some rows as plain numbers; waits for it."""
    values: Any = report.tokens[rows].tolist()
    ids: Any = report.top_ids[rows].tolist()
    top: Any = report.top[rows].tolist()
    every = [None] * len(values) if report.rows is None else [*report.rows[rows]]
    return [
        LogProb(value, tuple(zip(*pair, strict=True)), row)
        for value, row, *pair in zip(values, every, ids, top, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One emitted token and the text that it made certain.

    Attributes:
        text: may be empty, while a character or a stop string may still be going on.
        token: the token id; the last chunk's may be a stop token.
        finish_reason: "stop" or "length" in the last chunk, else None.
        logprob: how probable the token was, if the stream was asked for it.
        origin: who wrote the token.
    """

    text: str
    token: int
    finish_reason: str | None = None
    logprob: LogProb | None = None
    origin: Origin = STEP

    @property
    def without_row(self) -> "Chunk":
        """The chunk without the log-probabilities of all ids, which are large."""
        if self.logprob is None or self.logprob.row is None:
            return self
        return replace(self, logprob=replace(self.logprob, row=None))


@dataclass(frozen=True, slots=True)
class Result:
    """A generation, finished or closed early.

    Attributes:
        text: the texts of the chunks together: `tokenizer.decode` of the tokens,
            without stop token, stop string and half a character at the end.
        tokens: the generated token ids, a stop token included.
        finish_reason: "stop", "length", "closed" when the caller ended it, or "error".
        stats: counts and times.
        seed: decides the text at a temperature above 0.
        cached_tokens: the known tokens that the target's caches hold, in order.
        next_token: the token that would have come next; with it as the prompt and the
            same caches, seed and `cached_tokens`, the text goes on as if it had not
            been interrupted. None where it is not known.
        memory: bytes that were held at the end.
        logprobs: how probable each of `tokens` was; None if not asked for.
        origins: who wrote each of `tokens`.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Statistics
    seed: int
    cached_tokens: list[int]
    next_token: int | None
    memory: Memory
    logprobs: list[LogProb] | None = None
    origins: tuple[Origin, ...] = ()
