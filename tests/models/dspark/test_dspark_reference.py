"""DSpark drafters against a numpy implementation that was written apart from them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.covering import covering
from support.drafters.block_drafts import Greedy
from support.references.blocks import dspark
from support.references.blocks.packagings import block_taps
from support.references.tiny_blocks.on_disk import Known, assert_drafts, write
from support.references.tiny_blocks.tiny_dspark import DSPARK, tiny_dspark
from support.references.tiny_blocks.tiny_tensors import TARGET_LAYERS

LENGTH = 23  # of a text; windows are of 8
CASES: list[tuple[str, dict[str, Any]]] = [
    *((packaging, {}) for packaging in DSPARK),
    *((packaging, {"markov": None}) for packaging in ("deepspec", "gguf")),
    *(
        (packaging, {"markov": markov, "with_markov": markov == "rnn"})
        for packaging in ("deepspec", "gemma4", "nemotron")
        for markov in ("gated", "rnn")
    ),
    ("lfm2", {"confidence": False}),
    ("speculators", {"draft_vocabulary": 96}),
    ("speculators", {"draft_vocabulary": 96, "markov": "gated"}),
]


@pytest.mark.parametrize(("case", "held"), covering(CASES, (0, 15)))
def test_drafts_are_those_of_the_reference(
    case: tuple[str, dict[str, Any]], held: int, tmp_path: Path
) -> None:
    packaging, options = case
    tiny = tiny_dspark(packaging, seed=3, **options)
    folder, source = draft_folder(write(tmp_path, tiny))
    known = Known.of(TARGET_LAYERS, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    drafter = draft.dflash
    assert list(drafter.layers) == block_taps(tiny.config)
    context = drafter.states(known.states(draft.taps))
    caches, choose = drafter.new_caches(), Greedy()
    if held:  # most of the context before, the rest with the block
        before = mx.array([known.tokens[1 : held + 1]])
        drafter.history(context[:, :held], before, caches)
    drafter.confident = draft.confident
    newest = mx.array([known.tokens[held + 1 :]])
    ids = drafter.head.ids

    def choose_next(logits: mx.array, own: mx.array | None = None) -> mx.array:
        return choose(logits, ids if own is None else own)

    sure = drafter.draft(
        context[:, held:], newest, caches, drafter.head.depth, choose_next
    )
    expected = dspark.forward(
        tiny.weights,
        tiny.config,
        known.hidden(block_taps(tiny.config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        chosen=choose.tokens,
    )
    assert_drafts(choose.seen, ids, expected.logits)
    assert (sure is None) == (expected.confidence is None)
    if expected.confidence is not None:
        np.testing.assert_allclose(np.array(sure), expected.confidence, atol=1e-4)
    first = drafter.first_logits(context, newest[:, -1:])
    assert_drafts([(first[:, 0], None)], ids, expected.logits[:1])
