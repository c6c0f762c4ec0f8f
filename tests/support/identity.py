"""What it means that two texts are equal, and the check of it.

Rows of a wide forward and of single-row forwards may differ in the last bits. Two
texts are equal when their tokens are, up to the first position where the choice could
change within the measured difference between the widths. Such a position is asserted
to be one, counted and printed.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.samplers import Chooser


def plain_text(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """Decode greedily with mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]


@dataclass(frozen=True, slots=True)
class NearTie:
    """A position where the choice could change within the widths' difference."""

    index: int
    expected: int
    got: int
    margin: float
    difference: float


def rows_by_width(
    model: nn.Module, prompt: list[int], text: list[int], width: int
) -> mx.array:
    """Return the logits after each token of `text`, fed in blocks of `width`."""
    caches = make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    fed, rows = [prompt[-1], *text], []
    for start in range(0, len(fed), width):
        block = mx.array(fed[start : start + width])
        rows.append(model(block[None], cache=caches)[0])
        mx.eval(rows)
    return mx.concatenate(rows)


def assert_same_text(
    model: nn.Module,
    chooser: Chooser,
    prompt: list[int],
    expected: list[int],
    got: list[int],
    *,
    width: int,
    bitwise: bool,
) -> NearTie | None:
    """Assert equality as defined above; return the near-tie where the texts part."""
    if expected == got:
        return None
    assert not bitwise, f"not equal bit for bit: {expected} and {got}"
    pairs = zip(expected, got, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert index is not None, f"lengths {len(expected)} and {len(got)}"
    shared = expected[:index]
    single = rows_by_width(model, prompt, shared, 1)
    wide = rows_by_width(model, prompt, shared, width)
    difference = float(mx.abs(single - wide).max())
    tie = near_tie(
        chooser,
        single[-1:],
        len(prompt) + index,
        (index, expected[index], got[index]),
        difference,
    )
    print(f"near-tie: {tie}")  # noqa: T201  the count of near-ties is a result
    return tie


def near_tie(
    chooser: Chooser,
    row: mx.array,
    position: int,
    parting: tuple[int, int, int],
    difference: float,
) -> NearTie:
    """Assert that two tokens of `row` [1, vocab] are close enough to swap."""
    index, expected, got = parting
    temperature = chooser.sampling.temperature or 1.0
    scores = np.array(chooser.scores(row, mx.array([position])))[0]
    margin = float(scores[expected] - scores[got])
    if not np.isfinite(margin):
        margin = _distance_to_top_p(chooser, row, (expected, got))
    allowed = 2 * difference / temperature
    assert margin <= allowed, (
        f"token {index}: {got} instead of {expected}, margin {margin}, and the widths "
        f"differ by {difference}"
    )
    return NearTie(index, expected, got, margin, difference)


def _distance_to_top_p(
    chooser: Chooser, row: mx.array, tokens: tuple[int, int]
) -> float:
    """Return how far the nearer token is from the edge of the top-p set."""
    probabilities = np.array(mx.softmax(row.astype(mx.float32), axis=-1))[0]
    distances = []
    for token in tokens:
        above = probabilities[probabilities > probabilities[token]].sum()
        distances.append(abs(float(above) - chooser.sampling.top_p))
    return min(distances)
