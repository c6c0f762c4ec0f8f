"""EAGLE-3 heads against a numpy implementation that was written apart from them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_speculation.engine import EagleDraft
from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.references import eagle3
from support.tiny_models import TINY_MODELS, build_tiny

LENGTH, DRAFTS = 23, 5
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "specforge": {"layer_ids": [0, 3, 6]},
    "specforge, default ids": {},
    "vllm": {"convention": "vllm", "layer_ids": [1, 2, 6], "own_embedding": True},
    "authors": {"convention": "authors"},
    "speculators": {"convention": "speculators", "own_embedding": True},
    "speculators, plain residual": {
        "convention": "speculators",
        "norm_before_residual": False,
    },
    "normed residual": {"norm_before_residual": True},
    "eagle 3.1": {"feature_norms": True, "norm_output": True},
    "whole vocabulary": {"draft_vocab": None},
    "target's head": {"draft_vocab": None, "own_head": False},
    "llama3 rotation": {"rope_scaling": LLAMA3},
}


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


@pytest.mark.parametrize("case", CASES)
def test_rows_and_drafts_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    tensors, config = eagle3.write_tiny(tmp_path, seed=3, **CASES[case])
    draft = EagleDraft.from_folder(tmp_path, target())
    layers = eagle3.feature_layers(config, 8)
    assert list(draft.eagle.layers) == layers
    tokens = prompt_of(LENGTH)
    taps = HiddenStates(target(), layers=layers)
    with taps.collect() as states:
        target()(mx.array([tokens[:-1]]))
    features = np.concatenate(
        [np.array(states.layer(i)[0], np.float64) for i in layers], axis=-1
    )
    paired = np.array(tokens[1:])
    expected = eagle3.forward(tensors, config, features, paired, **tables())
    eagle = draft.eagle
    caches = eagle.head.new_caches()[0]
    out = eagle.rows(eagle.states(states), mx.array([tokens[1:]]), caches)
    close(out.recycled, expected.recycled)
    close(out.logits, expected.logits)
    drafted = eagle3.draft(tensors, config, features, paired, DRAFTS, **tables())
    assert greedy_drafts(draft, states, tokens) == drafted
    close(eagle.states(states), eagle3.project(tensors, config, features))


def greedy_drafts(draft: EagleDraft, states: Any, tokens: list[int]) -> list[int]:
    """Return drafts made slot by slot, with a cache and keys and values of history."""
    eagle, found = draft.eagle, []
    caches = eagle.head.new_caches()[0]
    out = eagle.step(eagle.states(states), mx.array([tokens[1:]]), caches)
    for _ in range(DRAFTS):
        column = mx.argmax(out.logits[0, -1])
        ids = eagle.head.ids
        token: Any = (column if ids is None else ids[column]).item()
        found.append(token)
        out = eagle.step(out.recycled, mx.array([[token]]), caches)
    return found


def close(found: mx.array, expected: Any) -> None:
    """Assert equality but for the rounding of float32."""
    got = np.array(found[0], np.float64)
    assert got.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(got - expected).max() <= TOLERANCE * scale
