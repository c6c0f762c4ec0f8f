"""Rounds over logits from a script, and processors that keep a record.

Logits depend on the prefix alone: a row has the same bits in every kind of forward.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_speculation.samplers import Chooser, Rows, Verifier, pure

VOCAB = 10


def scripted(prefix: Sequence[int], script: int = 0) -> Any:
    """Return the logits after a prefix, numpy float32 [vocab]."""
    words = [script, len(prefix), *prefix[-3:]]
    return np.random.default_rng(words).normal(size=VOCAB).astype(np.float32) * 2


def scripted_rows(known: Sequence[int], drafted: Sequence[int]) -> mx.array:
    """Return the target's rows for a draft, [k + 1, vocab]."""
    whole = [*known, *drafted]
    lengths = range(len(known), len(whole) + 1)
    return mx.array(np.stack([scripted(whole[:length]) for length in lengths]))


class Recorder:
    """A processor, neither pure nor forkable, that writes into its arguments."""

    def __init__(self) -> None:
        self.state = 1
        self.calls: list[tuple[list[int], list[float]]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        seen: Any = tokens.tolist()
        values: Any = logits[0].tolist()
        self.calls.append((seen, values))
        self.state = (self.state * 31 + sum(seen) + int(np.argmax(values))) % 1009
        logits[:, mx.array([self.state % VOCAB])] -= 3.0
        tokens[0] = 0
        return logits


class Forkable(Recorder):
    """A recorder whose state, with its record, can be copied and restored."""

    def copy_state(self) -> Any:
        return self.state, tuple(self.calls)

    def restore_state(self, state: Any) -> None:
        self.state, calls = state
        self.calls = list(calls)


@pure
def alternating(tokens: mx.array, logits: mx.array) -> mx.array:
    """Increase one logit in place; the last token and the length pick its id."""
    logits[:, (tokens[-1:] + len(tokens)) % VOCAB] += 2.0
    return logits


class FailedRoundError(Exception):
    """Raised inside a round on purpose."""


def plain_text(chooser: Chooser, prompt: Sequence[int], count: int) -> list[int]:
    """Choose tokens one by one, with one call of each processor for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(next(sequential(chooser, scripted_rows(text, []), Rows(text))))
    return text


def sequential(chooser: Chooser, logits: mx.array, rows: Rows) -> Iterator[int]:
    """Choose row by row up to the first rejection; `rows.ahead` is the draft."""
    for verdict in Verifier(chooser).sequential(logits, rows, rows.ahead):
        token: Any = verdict.tokens.item()
        yield token
        if verdict.accepted is None or not verdict.accepted.item():
            return


def draft_tokens(
    chooser: Chooser, text: list[int], oracle: Sequence[int | None]
) -> list[int]:
    """Draft the oracle's tokens; where one is None, draft by another script."""
    drafted: list[int] = []
    for right in oracle:
        ahead = mx.array(drafted, dtype=mx.uint32) if drafted else None
        rows = Rows(text, ahead)
        logits = mx.array(scripted([*text, *drafted], script=1))[None]
        processed = chooser.processed(logits, rows, for_draft=True)
        likeliest: Any = mx.argmax(chooser.scores(processed, rows), axis=-1).item()
        drafted.append(likeliest if right is None else right)
    return drafted


def verify(
    chooser: Chooser, text: list[int], drafted: list[int], fail_at: int | None
) -> list[int]:
    """Run one round, keep or restore the processors' state; return the emitted tokens.

    The round fails after `fail_at` rows, or at its end if it has fewer. If `fail_at` is
    None, it succeeds.
    """
    ahead = mx.array(drafted, dtype=mx.uint32) if drafted else None
    rows = Rows(text, ahead, len(drafted) + 1)
    logits = scripted_rows(text, drafted)
    before = mx.array(logits)
    emitted: list[int] = []
    states = chooser.processors.fork()
    try:
        if chooser.processors.parallel:
            choices: Any = chooser.choose(logits, rows).tolist()
            for index, choice in enumerate(choices):
                emitted.append(choice)
                if index < len(drafted) and choice != drafted[index]:
                    break
        else:
            for token in sequential(chooser, logits, rows):
                emitted.append(token)
                if len(emitted) == fail_at:
                    raise FailedRoundError
        if fail_at is not None:
            raise FailedRoundError
        chooser.processors.keep(len(emitted))
    except FailedRoundError:
        chooser.processors.restore(states)
        return []
    finally:
        assert mx.array_equal(logits, before).item()
    return emitted
