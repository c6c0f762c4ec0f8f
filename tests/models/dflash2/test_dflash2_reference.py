"""DFlash2 drafters against a numpy implementation that was written apart from them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.drafters.block_drafts import Greedy
from support.references.blocks import dflash2
from support.references.blocks.packagings import block_taps
from support.references.tiny_blocks.on_disk import Known, assert_drafts, write
from support.references.tiny_blocks.tiny_dflash2 import DFLASH2, tiny_dflash2
from support.references.tiny_blocks.tiny_tensors import TARGET_LAYERS, TinyDrafter

LENGTH = 23  # of a text; windows are of 8
SCALES = {
    "input_embedding_scale": 2.0,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 3.0,
}


@pytest.mark.parametrize("packaging", DFLASH2)
@pytest.mark.parametrize("causal", [False, True, None])
@pytest.mark.parametrize(("held", "scales"), [(0, {}), (15, {}), (15, SCALES)])
def test_drafts_are_those_of_the_reference(
    packaging: str,
    causal: bool | None,
    held: int,
    scales: dict[str, float],
    tmp_path: Path,
) -> None:
    tiny = tiny_dflash2(packaging, seed=4, is_causal=causal)
    own = {**tiny.config.get("dflash_config", {}), **scales}
    where = {"dflash_config": own} if "dflash_config" in tiny.config else scales
    tiny = TinyDrafter({**tiny.config, **where}, tiny.weights)
    folder, source = draft_folder(write(tmp_path, tiny))
    known = Known.of(TARGET_LAYERS, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    drafter = draft.dflash
    assert list(drafter.layers) == block_taps(tiny.config)
    context = drafter.states(known.states(draft.taps))
    caches, choose = drafter.new_caches(), Greedy()
    if held:
        before = mx.array([known.tokens[1 : held + 1]])
        drafter.history(context[:, :held], before, caches)
    newest = mx.array([known.tokens[held + 1 :]])
    drafter.draft(context[:, held:], newest, caches, drafter.head.depth, choose)
    expected = dflash2.forward(
        tiny.weights,
        tiny.config,
        known.hidden(block_taps(tiny.config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        chosen=choose.tokens,
    )
    assert_drafts(choose.seen, None, expected.logits)
