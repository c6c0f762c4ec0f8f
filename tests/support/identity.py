"""Plain decoding by mlx-lm's own loop, and the check of texts against it."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_speculation.engine import identity
from mlx_speculation.samplers import Chooser


def plain_text(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """Decode greedily with mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]


def assert_same_text(
    model: nn.Module,
    chooser: Chooser,
    prompt: list[int],
    expected: list[int],
    got: list[int],
    *,
    width: int,
    bitwise: bool,
) -> identity.Parting | None:
    """Assert equality; families that are not bitwise may part at a near-tie."""
    assert expected == got or not bitwise, f"not bit for bit: {expected} and {got}"
    tie = identity.assert_same_text(model, chooser, prompt, expected, got, width=width)
    if tie is not None:
        print(f"near-tie: {tie}")  # noqa: T201  the count of near-ties is a result
    return tie
