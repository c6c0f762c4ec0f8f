"""DFlash2 drafters, compared with an independent numpy implementation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.drafters.block_drafts import Greedy
from support.models.block_checkpoints import altered, write_block
from support.references.blocks import dflash2
from support.references.blocks.packagings import block_taps
from support.references.reference_target import Known, assert_drafts, read_folder

LENGTH = 23  # tokens of the text, more than a window of 12
SCALES = {
    "input_embedding_scale": 2.0,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 3.0,
}
CAUSAL: dict[str, tuple[dict[str, bool], ...]] = {
    "dflash2": ({"is_causal": False}, {"is_causal": True}, {}),
    "dflash2, speculators": (
        {"sliding_window_non_causal": True},
        {"sliding_window_non_causal": False},
        {},
    ),
}


@pytest.mark.parametrize(
    ("packaging", "keys"),
    [(name, keys) for name, all in CAUSAL.items() for keys in all],
)
@pytest.mark.parametrize(("known_rows", "scales"), [(0, {}), (15, {}), (15, SCALES)])
def test_drafts_are_those_of_the_reference(
    packaging: str,
    keys: dict[str, bool],
    known_rows: int,
    scales: dict[str, float],
    tmp_path: Path,
) -> None:
    changed = altered(packaging, inner=scales, **{"is_causal": None, **keys})
    folder, source = draft_folder(write_block(tmp_path, changed, (1, 4, 6)))
    config, weights = read_folder(tmp_path)
    known = Known.of(8, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    drafter = draft.dflash
    assert list(drafter.layers) == block_taps(config)
    context = drafter.states(known.states(draft.taps))
    caches, choose = drafter.new_caches(), Greedy()
    if known_rows:
        before = mx.array([known.tokens[1 : known_rows + 1]])
        drafter.history(context[:, :known_rows], before, caches)
    newest = mx.array([known.tokens[known_rows + 1 :]])
    drafter.draft(context[:, known_rows:], newest, caches, drafter.head.depth, choose)
    expected = dflash2.forward(
        weights,
        config,
        known.hidden(block_taps(config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        chosen=choose.tokens,
    )
    assert_drafts(choose.seen, None, expected)
