"""Test of exact mode: do the bits of a row depend on its place in the forward?

In exact mode all forwards have the same shape. The test checks that the bits of a row's
logits then depend only on the tokens up to the row. It feeds a text of random tokens in
four ways, and compares rows at the beginning and at the end of each view of the keys
(see `caches.types.fixed_view`):

    alone       each token alone, with padding; this gives the expected bits
    places      each token at each place of a forward over tokens of the text
    company     each token at the first place, with other random tokens after it
    rounds      tokens of the text, then other random tokens; only the text is
                committed, which tests the rollback of the caches
"""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.caches import FixedShape, snapshot
from mlx_speculation.engine.exact_verdict import ExactVerdict
from mlx_speculation.models import (
    Lane,
    ModelHooks,
    check_fixed_shape,
    logit_width,
    position_table,
)

TIMED = 9  # timed steps; the first two are not counted, since they may compile
Report = Callable[[int, int], None]
Row = tuple[int, Any]  # the position of a row, and its logits


def check_exact(
    model: nn.Module,
    shape: FixedShape,
    context: int,
    *,
    seed: int = 0,
    report: Report = lambda done, total: None,
) -> ExactVerdict:
    """Test a model in exact mode, in all views up to a context length.

    `context` is in positions and rounded up to whole views. `report` is called with the
    numbers of finished steps and of all steps.

    Raises:
        UnsupportedModelError: exact mode does not support the model's architecture.
        UnsupportedCacheError: a cache of the model has no view of a fixed size.
    """
    check_fixed_shape(model)
    draw, vocab = np.random.default_rng(seed), logit_width(model)
    views = max(-(-context // shape.step), 1)
    width = min(2 * shape.rows, shape.step // 2)
    text = draw.integers(vocab, size=views * shape.step).tolist()
    starts = [
        view * shape.step + within
        for view in range(views)
        for within in (0, shape.step - width)
    ]
    last = (position_table(model) or sys.maxsize) - width - 1  # 1 for the timed step
    starts = [start for start in starts if start <= last]
    hooks = ModelHooks(model)
    try:
        lane = Lane(model, sliding="slack", shape=shape)
        rows, different, largest = 0, 0, 0.0
        for number, start in enumerate(starts):
            lane.feed(text[lane.seen : start])
            alone, others = _both_ways(lane, text[start : start + width], draw, vocab)
            for position, result in others:
                expected = alone[position]
                rows += 1
                if result.tobytes() != expected.tobytes():
                    different += 1
                    largest = max(largest, float(np.abs(result - expected).max()))
            report(number + 1, len(starts))
        plain, exact = _seconds(lane)
        return ExactVerdict(rows, different, largest, lane.seen, plain, exact)
    finally:
        hooks.remove()


def _both_ways(
    lane: Lane, text: Sequence[int], draw: np.random.Generator, vocab: int
) -> tuple[dict[int, Any], list[Row]]:
    """Commit the text; return the rows that its tokens get alone and in other ways."""
    other = _twin(lane, lane.shape)
    alone: dict[int, Any] = {}
    result: list[Row] = []
    for place, token in enumerate(text):
        fed = list(text[place : place + lane.room])
        strangers = draw.integers(vocab, size=len(fed)).tolist()
        result += _rows(lane, fed, len(fed))
        result += _rows(lane, [token, *strangers[1:]], 1)
        ((position, logits),) = _rows(lane, [token], 1, keep=1)
        alone[position] = logits
    end = other.seen + len(text)
    while other.seen < end:
        fed = list(text[len(text) - (end - other.seen) :])[: other.room]
        right = int(draw.integers(len(fed))) + 1
        fed[right:] = draw.integers(vocab, size=len(fed) - right).tolist()
        result += _rows(other, fed, right, keep=right)
    return alone, result


def _rows(lane: Lane, fed: Sequence[int], count: int, keep: int = 0) -> list[Row]:
    """Feed tokens, commit the first `keep`, and return the first `count` rows."""
    first = lane.seen
    with lane.begin() as lane_round:
        logits = lane_round.forward(mx.array(list(fed)))[:count].astype(mx.float32)
        mx.eval(logits)
        if keep:
            lane_round.commit(keep)
    values = np.array(logits)
    return [(first + row, values[row]) for row in range(count)]


def _twin(lane: Lane, shape: FixedShape | None) -> Lane:
    twin = Lane(lane.model, sliding="slack", shape=shape)
    if lane.seen:
        twin.resume(snapshot(lane.caches, 0, lane.seen))
    return twin


def _seconds(lane: Lane) -> tuple[float, float]:
    result = []
    for one in (_twin(lane, None), lane):
        times = []
        for _ in range(TIMED):
            started = time.perf_counter()
            with one.begin(whole=True) as lane_round:
                mx.eval(lane_round.forward(mx.array([1])))
            times.append(time.perf_counter() - started)
        result.append(median(times[2:]))
    return result[0], result[1]
