"""Comparison of two texts of one model, with tolerance for rounding.

A forward over k + 1 tokens and k + 1 forwards over one token compute the same logits,
but usually not bit for bit. The texts may therefore part where two tokens are almost
equally good. The tokens before that position are fed again, once one by one and once in
blocks, and the logits at the position are compared:

    difference   the largest change of a logit between the two ways
    margin       the difference between the scores of the two tokens
    edge         how far top_p is from the total probability of all tokens that are
                 more probable than one of the two (the smaller distance)

The texts differ by a near-tie if margin <= 2 * difference / temperature + spacing, or
if edge <= 2 * difference. The spacing is that of the logits' dtype at the largest
logit. In bfloat16, rounding may move a score by one spacing even if the ways that were
tried agree by chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.caches import states
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser, Rows

MakeLane = Callable[[nn.Module], Lane]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first position at which two texts differ, and the measurements there."""

    index: int  # the position, counted from the first generated token
    expected: int | None  # the expected text's token there; None: that text has ended
    got: int | None  # the other text's token there; None: that text has ended
    margin: float  # between the two scores, which include temperature and noise
    difference: float  # the largest difference of a logit, before the temperature
    allowed: float  # the largest margin of a near-tie
    edge: float  # see above; infinite without top-p

    @property
    def near_tie(self) -> bool:
        """Return whether rounding explains the difference of the texts."""
        return self.margin <= self.allowed or self.edge <= 2 * self.difference

    def __str__(self) -> str:
        return (
            f"token {self.index} is {self.got} instead of {self.expected}: their "
            f"margin is {self.margin:.3g}, and a near-tie has at most "
            f"{self.allowed:.3g} (logits differ by up to {self.difference:.3g})"
        )


def find_parting(
    model: nn.Module,
    chooser: Chooser,  # of both texts
    prompt: Sequence[int],
    expected: Sequence[int],  # the text by forwards over one token
    got: Sequence[int],  # the text by forwards over several tokens
    *,
    width: int,  # the largest number of tokens of a forward
    # Number of places in a block at which the position is computed; None: all. Fewer
    # places may give a smaller difference than the texts had.
    places: int | None = None,
    make_lane: MakeLane = Lane,  # makes the kinds of caches that the texts were in
) -> Parting | None:
    """Return the first difference of two texts; None: they are equal."""
    pairs = enumerate(zip_longest(expected, got))
    different = next(((i, one, two) for i, (one, two) in pairs if one != two), None)
    if different is None:
        return None
    index, one, two = different
    shared = [*prompt, *expected[:index]]
    deciding = partial(deciding_row, model, shared, len(prompt), make_lane=make_lane)
    single = deciding(first=1, width=1)
    # The position's place in its block is not known: try each one.
    wide = [
        deciding(first=first, width=width)
        for first in range(1, min(width, places or width) + 1)
    ]
    changes = (single.astype(mx.float32) - row.astype(mx.float32) for row in wide)
    difference = max(float(mx.abs(change).max()) for change in changes)
    return weigh(chooser, single, Rows(shared), (index, one, two), difference)


def deciding_row(
    model: nn.Module,
    tokens: Sequence[int],
    prompt: int,
    *,
    first: int,
    width: int,
    make_lane: MakeLane = Lane,
) -> mx.array:
    """Return the logits after the last of `tokens`, [1, vocab], in the model's dtype.

    All tokens of the prompt but the last are fed as in prefill, the others in blocks.
    The first block has `first` tokens, each further block has `width` tokens. The last
    block is filled up, since its width affects the row's rounding.
    """
    lane = make_lane(model)
    head, rest = list(tokens[: prompt - 1]), list(tokens[prompt - 1 :])
    lane.feed(head)
    start, size = 0, first
    while True:
        block = rest[start : start + size]
        last = start + size >= len(rest)
        if last:
            block += [rest[-1]] * (min(max(width, 1), lane.room) - len(block))
        with lane.begin() as lane_round:
            rows = lane_round.forward(mx.array(block))
            lane_round.commit(len(block))
        if last:
            place = len(rest) - 1 - start
            return rows[place : place + 1]
        mx.eval(rows, states(lane.caches))
        start, size = start + size, width


def weigh(
    chooser: Chooser,
    row: mx.array,
    rows: Rows,
    parting: tuple[int, int | None, int | None],
    difference: float,
) -> Parting:
    """Measure how close the scores of two tokens are; `row` is logits [1, vocab]."""
    index, expected, got = parting
    processed = chooser.processed(row.astype(mx.float32), rows)
    scores = np.array(chooser.scores(processed, rows))[0]
    allowed = 2 * difference / (chooser.sampling.temperature or 1.0) + _ulp(row)
    margin = edge = np.inf
    if expected is not None and got is not None and max(expected, got) < len(scores):
        with np.errstate(invalid="ignore"):
            margin = abs(float(scores[expected] - scores[got]))
        margin = margin if np.isfinite(margin) else np.inf
        edge = _distance_to_top_p(chooser, row, (expected, got))
    return Parting(index, expected, got, margin, difference, allowed, edge)


def _ulp(row: mx.array) -> float:
    """Return the spacing of a row's dtype at its largest logit."""
    row, eps = row.astype(mx.float32), mx.finfo(row.dtype).eps
    # mlx-lm's `logits - logsumexp` also rounds at the size of the logsumexp.
    largest = mx.maximum(mx.abs(row).max(), mx.abs(mx.logsumexp(row)))
    return float(largest) * float(eps)


def _distance_to_top_p(
    chooser: Chooser, row: mx.array, tokens: tuple[int, int]
) -> float:
    """Return `edge` for two tokens; infinite without top-p."""
    top_p = chooser.sampling.top_p
    if chooser.sampling.greedy or not 0 < top_p < 1:
        return float("inf")
    probabilities = np.array(mx.softmax(row.astype(mx.float32), axis=-1))[0]
    above = [probabilities[probabilities > probabilities[t]].sum() for t in tokens]
    return min(abs(float(mass) - top_p) for mass in above)
