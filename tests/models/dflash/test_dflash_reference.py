"""DFlash drafters against a numpy implementation that was written apart from them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine import DFlashDraft
from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.references import dflash
from support.references.reference_target import assert_close, tables, target
from support.references.tiny_files import add_biases

# Some have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH, BLOCK = 23, 4
SLIDING = ["sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "usual layers, not named": {"name_layers": False},
    "usual layers, named": {"prefix": "model."},
    "named layers": {"target_layer_ids": [0, 2, 6]},
    "last layer": {"target_layer_ids": [2, 7]},
    "sliding": {"layer_types": SLIDING, "sliding_window": 8},
    "sliding, not causal": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "causal": False,
    },
    "a window that is longer": {"layer_types": SLIDING, "sliding_window": 64},
    "a window shorter than a block": {"layer_types": SLIDING, "sliding_window": 3},
    "biases": {"prefix": "model."},
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    options = {"block_size": BLOCK, **CASES[case]}
    tensors, config = dflash.write_tiny(tmp_path, seed=5, **options)
    if case == "biases":
        add_biases(tmp_path, tensors)
    draft = DFlashDraft.from_folder(tmp_path, target())
    features = 2 if case == "last layer" else 3
    layers = dflash.feature_layers(config, features, 8)
    assert list(draft.dflash.layers) == layers
    tokens = prompt_of(LENGTH)
    taps = HiddenStates(target(), layers=layers, after_norm=True)
    with taps.collect() as states:
        target()(mx.array([tokens[:-1]]))
    read = [states.after_norm if i == 7 else states.layer(i) for i in layers]
    wide = np.concatenate([np.array(each[0], np.float64) for each in read], axis=-1)
    ids = [tokens[-1]] + [255] * (BLOCK - 1)
    expected = dflash.forward(
        tensors, config, wide, tables()["embedding"][ids], head=tables()["head"]
    )[1:]
    context = draft.dflash.states(states)
    assert_close(context, dflash.context_states(tensors, config, wide))
    assert_close(block(draft, context, tokens, 0), expected)
    # The same with most of the context in the caches, and the rest in two parts.
    assert_close(block(draft, context, tokens, 15), expected)


def block(
    draft: DFlashDraft, context: mx.array, tokens: list[int], held: int
) -> mx.array:
    """Return the logits of a block, `held` positions of its context fed before."""
    caches = draft.dflash.head.new_caches()
    if held:
        draft.dflash.history(context[:, :held], mx.array([tokens[:held]]), caches)
    newest = mx.array([tokens[-1:]])
    return draft.dflash.block(context[:, held:], newest, caches, BLOCK - 1)
