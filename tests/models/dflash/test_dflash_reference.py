"""DFlash drafters, compared with an independent numpy implementation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine import DFlashDraft
from support.models.block_checkpoints import write_block
from support.models.dflash_checkpoints import VARIANTS, write_dflash
from support.references.blocks import dspark
from support.references.blocks.packagings import block_taps
from support.references.reference_target import Known, assert_drafts, read_folder
from support.references.tiny_files import add_biases

# Some cases have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH = 23
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
    )
    context = draft.dflash.states(known.states(draft.taps))
    # Number of context positions that the drafter reads before the block's forward.
    for known_rows in (0, 15):
        output = block(draft, context, known.tokens, known_rows)
        seen = [(output[:, row], None) for row in range(draft.dflash.head.depth)]
        assert_drafts(seen, draft.dflash.head.ids, expected)


def block(
    draft: DFlashDraft, context: mx.array, tokens: list[int], known_rows: int
) -> mx.array:
    caches = draft.dflash.head.new_caches()
    if known_rows:
        draft.dflash.history(
            context[:, :known_rows], mx.array([tokens[:known_rows]]), caches
        )
    newest = mx.array([tokens[-1:]])
    depth = draft.dflash.head.depth
    return draft.dflash.block(context[:, known_rows:], newest, caches, depth)
