"""EAGLE-3 heads against a numpy implementation that was written apart from them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_speculation.engine import EagleDraft
from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.references import eagle3
from support.references.reference_target import assert_close, tables, target
from support.references.tiny_files import add_biases

# Some have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH, DRAFTS = 23, 5
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
    "joined norm": {},
    "biases": {"convention": "vllm", "own_embedding": True},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_drafts_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    tensors, config = eagle3.write_tiny(tmp_path, seed=3, **CASES[case])
    if case == "joined norm":
        _add_joined_norm(tmp_path, tensors)
    elif case == "biases":
        add_biases(tmp_path, tensors)
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
    assert_close(out.recycled, expected.recycled)
    assert_close(out.logits, expected.logits)
    drafted = eagle3.draft(tensors, config, features, paired, DRAFTS, **tables())
    assert greedy_drafts(draft, states, tokens) == drafted
    assert_close(eagle.states(states), eagle3.project(tensors, config, features))


def _add_joined_norm(folder: Path, tensors: dict[str, Any]) -> None:
    """Give a head a norm over the joined outputs of layers."""
    scale = np.random.default_rng(9).uniform(0.5, 1.5, 3 * 64).astype(np.float32)
    tensors["input_norm.weight"] = scale
    save_file(tensors, folder / "model.safetensors")


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
