"""Comparison of two texts of one model, up to the rounding of its rows.

A forward over k + 1 tokens and k + 1 forwards over one token compute the same logits,
but with most matrix products not bit for bit. So two texts may part where two tokens
are almost equally good. Where they part, the text before is fed to the model again,
once token by token and once in blocks, and the row that decides is compared:

    difference   the largest change of a logit between the widths
    margin       how much better the one token's score is than the other's
    edge         how far a token is from the border of the top-p set

A near-tie has a margin within twice the difference (divided by the temperature) and
the spacing of the logits' own dtype at the largest of them, or an edge within twice the
difference. Anything else is a real difference of two texts. The spacing matters in
bfloat16, where two tokens next to each other are one rounding apart, and a few widths
may agree by chance.
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
    """The first position where two texts differ, and what was measured there."""

    index: int  # the position, counted from the first generated token
    expected: int | None  # the token of the one text there; None: it has ended
    got: int | None  # the token of the other
    margin: float  # between their scores, which are tempered and hold the noise
    difference: float  # of the untempered logits, between the widths
    allowed: float  # the largest margin of a near-tie
    edge: float  # the distance to the border of the top-p set; infinite without top-p

    @property
    def near_tie(self) -> bool:
        """Return whether rounding explains the difference of the texts."""
        return self.margin <= self.allowed or self.edge <= 2 * self.difference

    def __str__(self) -> str:
        return (
            f"token {self.index} is {self.got} instead of {self.expected}: their "
            f"margin is {self.margin:.3g}, and at most {self.allowed:.3g} is a "
            f"near-tie (the widths differ by {self.difference:.3g})"
        )


def find_parting(
    model: nn.Module,  # the target
    chooser: Chooser,  # what chose the tokens
    prompt: Sequence[int],  # token ids
    expected: Sequence[int],  # the text by single rows
    got: Sequence[int],  # the text by rows of several widths
    *,
    width: int,  # the most rows of a forward
    # Of a block to try, in which the row may have stood; None: all. Fewer are quicker,
    # and may find a smaller difference than there was.
    places: int | None = None,
    make_lane: MakeLane = Lane,  # makes the caches that both texts were written with
) -> Parting | None:
    """Return where two texts part and how near a tie is there; None: they are equal."""
    pairs = enumerate(zip_longest(expected, got))
    different = next(((i, one, two) for i, (one, two) in pairs if one != two), None)
    if different is None:
        return None
    index, one, two = different
    shared = [*prompt, *expected[:index]]
    deciding = partial(deciding_row, model, shared, len(prompt), make_lane=make_lane)
    single = deciding(first=1, width=1)
    # Nobody noted at which place of a block the row was: try each of them.
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

    The prompt but its last token is fed as both engines do, the rest in blocks: one
    of `first` tokens and then of `width`. The last block is filled up, because its
    width decides how the row is computed and the tokens after the row do not.
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
    """Measure how near a tie two tokens of a row [1, vocab] are."""
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
    """Return the spacing of a row's dtype at its largest logit.

    It is also the rounding of mlx-lm's `logits - logsumexp`, which the engine omits.
    """
    row, eps = row.astype(mx.float32), mx.finfo(row.dtype).eps
    largest = mx.maximum(mx.abs(row).max(), mx.abs(mx.logsumexp(row)))
    return float(largest) * float(eps)


def _distance_to_top_p(
    chooser: Chooser, row: mx.array, tokens: tuple[int, int]
) -> float:
    """Return how far the nearer token is from the border of the top-p set."""
    top_p = chooser.sampling.top_p
    if chooser.sampling.greedy or not 0 < top_p < 1:
        return float("inf")
    probabilities = np.array(mx.softmax(row.astype(mx.float32), axis=-1))[0]
    above = [probabilities[probabilities > probabilities[t]].sum() for t in tokens]
    return min(abs(float(mass) - top_p) for mass in above)
