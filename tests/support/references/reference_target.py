"""The target of drafters that are compared with numpy: eight layers, and its tables."""

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from support.models.tiny_models import TINY_MODELS, build_tiny

TOLERANCE = 1e-4


@cache
def target() -> nn.Module:
    """Return a target of eight layers, so that the three usual ones are different."""
    tiny = TINY_MODELS["llama"]
    return build_tiny(replace(tiny, args={**tiny.args, "num_hidden_layers": 8}))


@cache
def tables() -> dict[str, Any]:
    """Return the target's embedding and output matrix, for the reference."""
    model: Any = target()
    embedding = np.array(model.model.embed_tokens.weight, np.float64)
    tied = "lm_head" not in model
    head = embedding if tied else np.array(model.lm_head.weight, np.float64)
    return {"embedding": embedding, "head": head}


def assert_close(found: mx.array, expected: Any) -> None:
    """Assert that [1, rows, n] equals [rows, n] but for the rounding of float32."""
    got = np.array(found[0], np.float64)
    assert got.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(got - expected).max() <= TOLERANCE * scale
