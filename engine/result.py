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
        writer: "accepted": a drafted token; "correction" or "bonus": the target's token
            after a rejection or after the whole draft; "step": a token without a draft.
        place: index of an accepted token in its draft, from 0; else None.
    """

    writer: Writer
    place: int | None = None


STEP = Origin("step")


@dataclass(frozen=True, slots=True)
class LogProb:
    """Log-probability of a token: after processors, before filters and temperature.

    Attributes:
        value: the natural logarithm of its probability.
        top: pairs of a token id and its log-probability, the most probable first; among
            equally probable tokens, the chosen token comes first.
        row: log-probabilities of all ids, float32 [ids], lazy; only in chunks of a
            stream with `logprob_rows`, else None.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()
    row: mx.array | None = field(default=None, compare=False, repr=False)


def listed(report: LogProbs, rows: slice) -> list[LogProb]:
    """Return the log-probabilities of some rows as plain numbers; waits for them."""
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
        text: empty while a character or a possible stop string is incomplete.
        token: the token id; the last chunk's may be a stop token.
        finish_reason: "stop" or "length" in the last chunk, else None.
        logprob: log-probability of the token; None: not requested.
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
        text: the joined texts of the chunks: `tokenizer.decode` of the tokens, without
            a stop token, a stop string or an incomplete character at the end.
        tokens: the generated token ids, a stop token included.
        finish_reason: "stop", "length", "closed" when the caller ended it, or "error".
        seed: the seed, which decides the text at a temperature above 0.
        cached_tokens: the known tokens that the target's caches hold, in order.
        next_token: the token that would have come next; None: not known. With it as the
            prompt and the same caches, seed and `cached_tokens`, the text goes on
            as if it had not ended.
        memory: bytes that were held at the end.
        logprobs: log-probability of each token; None: not requested.
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
