"""DSpark drafters, compared with an independent numpy implementation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.covering import covering
from support.drafters.block_drafts import Greedy
from support.models.block_checkpoints import PACKAGINGS, altered, write_block
from support.references.blocks import dspark
from support.references.blocks.packagings import block_taps
from support.references.reference_target import Known, assert_drafts, read_folder

LENGTH, LAYERS = 23, 8  # the text has more tokens than a window of 12
KINDS = ("gated", "rnn")
CASES = {
    **{name: each for name, each in PACKAGINGS.items() if each.kind == "dspark"},
    "prism, dflash": altered("prism", "levels", inner={"dspark.dspark.markov_rank": 0}),
    **{
        f"gemma, {kind}": altered(
            "deepspec, gemma",
            *("gemma", "own ends", f"markov {kind}", "confidence"),
            markov_head_type=kind,
        )
        for kind in KINDS
    },
    **{
        f"nvidia, {kind}": altered(
            "nvidia",
            *("embedding", "sinks", f"markov {kind}", "confidence of states"),
            markov_head_type=kind,
        )
        for kind in KINDS
    },
    "speculators, gated": altered(
        "speculators", "reduced", "markov gated", "confidence", markov_head_type="gated"
    ),
}


@pytest.mark.parametrize(("case", "known_rows"), covering(CASES, (0, 15)))
def test_drafts_are_those_of_the_reference(
    case: str, known_rows: int, tmp_path: Path
) -> None:
    folder, source = draft_folder(write_block(tmp_path, CASES[case], (1, 4, 6)))
    config, weights = read_folder(tmp_path)
    known = Known.of(LAYERS, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    drafter = draft.dflash
    assert list(drafter.layers) == block_taps(config)
    context = drafter.states(known.states(draft.taps))
    caches, choose = drafter.new_caches(), Greedy()
    if known_rows:  # feed most of the context first, the rest with the block
        before = mx.array([known.tokens[1 : known_rows + 1]])
        drafter.history(context[:, :known_rows], before, caches)
    newest = mx.array([known.tokens[known_rows + 1 :]])
    ids = drafter.head.ids

    def choose_next(logits: mx.array, columns: mx.array | None = None) -> mx.array:
        return choose(logits, ids if columns is None else columns)

    drafter.draft(
        context[:, known_rows:], newest, caches, drafter.head.depth, choose_next
    )
    expected = dspark.forward(
        weights,
        config,
        known.hidden(block_taps(config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        chosen=choose.tokens,
    )
    assert len(expected) == CASES[case].depth
    assert_drafts(choose.seen, ids, expected)
    first = drafter.first_logits(context, newest[:, -1:])
    assert_drafts([(first[:, 0], None)], ids, expected[:1])
