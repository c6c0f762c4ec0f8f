"""DFlash drafters, compared with an independent numpy implementation and transformers.

transformers has a drafter of another family with the same layers under other names.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from mlx_speculation.engine import DFlashDraft
from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.models.block_checkpoints import write_block
from support.models.dflash_checkpoints import VARIANTS, write_dflash
from support.references.blocks import dspark
from support.references.blocks.packagings import block_taps
from support.references.reference_target import (
    Known,
    assert_close,
    assert_drafts,
    read_folder,
    tables,
    target,
)
from support.references.tiny_files import add_biases
from support.references.torch_heads import fill, to_torch

# Some cases have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH, BLOCK = 23, 5
SLIDING = ["sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "no list of layers": {"dflash_config": {"mask_token_id": 255}},
    "last layer": {"layers": (2, 7)},
    "sliding": {},
    "not causal": {},
    "swa keys": {},
    "own ends": {},
    "a window that is longer": {"layer_types": SLIDING, "sliding_window": 64},
    "a window shorter than a block": {"layer_types": SLIDING, "sliding_window": 3},
    "biases": {},
    "mimo": {},  # with sinks and scaled values
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    keys = {"layers": (0, 2, 6), **CASES[case]}
    if case == "mimo":
        write_block(tmp_path, case, **keys)
    else:
        write_dflash(tmp_path, case if case in VARIANTS else "full", **keys)
    if case == "biases":
        add_biases(tmp_path)
    config, weights = read_folder(tmp_path)
    known = Known.of(8, LENGTH)
    draft = DFlashDraft.from_folder(tmp_path, known.model)
    layers = block_taps(config, 8)
    assert list(draft.dflash.layers) == layers
    read = known.hidden([None if layer == 7 else layer for layer in layers])
    expected = dspark.forward(
        weights,
        config,
        read,
        known.embeddings,
        known.lm_head,
        known.tokens,
        samples=False,
    ).logits
    context = draft.dflash.states(known.states(draft.taps))
    # The context is new to the caches, or most of it has been fed before.
    for known_rows in (0, 15):
        output = block(draft, context, known.tokens, known_rows)
        seen = [(output[:, row], None) for row in range(draft.dflash.head.depth)]
        assert_drafts(seen, draft.dflash.head.ids, expected)


@pytest.mark.parametrize("window", [None, 3, 5, 30])
@pytest.mark.parametrize("known_rows", [0, 15])
def test_a_block_equals_that_of_transformers(
    tmp_path: Path, window: int | None, known_rows: int
) -> None:
    kinds = ["full_attention", "sliding_attention"]
    if window is None:
        kinds[1] = "full_attention"
    write_dflash(
        tmp_path,
        "full",
        (1, 4, 6),
        layer_types=kinds,
        # In transformers a block row sees `window` tokens to either side.
        sliding_window=None if window is None else window + 1,
        is_causal=False,
    )
    config, tensors = read_folder(tmp_path)
    draft = DFlashDraft.from_folder(tmp_path, target())
    taps = HiddenStates(target(), layers=draft.dflash.layers)
    tokens = prompt_of(LENGTH)
    with taps.collect() as states:
        target()(mx.array([tokens[:-1]]))
    output = block(draft, draft.dflash.states(states), tokens, known_rows)
    same = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
        *("layer_types", "block_size"),
    )
    theirs: Any = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: config[name] for name in same},
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            sliding_window=window or 99,
            target_layer_ids=config["dflash_config"]["target_layer_ids"],
            mask_token_id=255,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    renamed = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    fill(theirs, renamed)
    layers = [np.array(states.layer(i)[0], np.float64) for i in draft.dflash.layers]
    wide = to_torch(np.concatenate(layers, axis=-1))[None]
    ids = [tokens[-1]] + [255] * (BLOCK - 1)
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    count = LENGTH - 1
    cache.set_previous_accepted_tokens(count)
    with torch.no_grad():
        out = theirs(
            noise_embeds=to_torch(tables()["embedding"][ids])[None],
            context_hidden_states=wide,
            position_ids=torch.arange(count + BLOCK)[None],
            cache=cache,
        )
    rows = out.last_hidden_state[0].numpy().astype(np.float64)[1:]
    assert_close(output, rows @ tables()["head"].T)


def block(
    draft: DFlashDraft, context: mx.array, tokens: list[int], known_rows: int
) -> mx.array:
    """Return the logits of a block after `known_rows` positions of context are fed."""
    caches = draft.dflash.head.new_caches()
    if known_rows:
        draft.dflash.history(
            context[:, :known_rows], mx.array([tokens[:known_rows]]), caches
        )
    newest = mx.array([tokens[-1:]])
    depth = draft.dflash.head.depth
    return draft.dflash.block(context[:, known_rows:], newest, caches, depth)
