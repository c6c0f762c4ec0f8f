"""EAGLE-3 dialects and P-EAGLE, compared with an independent numpy implementation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.covering import covering
from support.drafters.block_drafts import Greedy
from support.models.eagle_checkpoints import DIALECTS, PARALLEL, VARIANTS, write_eagle
from support.references.blocks import eagle3_dialects, p_eagle
from support.references.blocks.packagings import eagle_taps
from support.references.reference_target import Known, assert_drafts, read_folder

# Some dialects have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH, DRAFTS = 23, 4
LAYERS = 12  # of the target


def layers_of(config: dict[str, Any]) -> list[int | None]:
    """Return the target's layers that a head reads; None stands for the final norm."""
    inside = config.get("eagle_config") or {}
    if inside.get("use_aux_hidden_state") is False:
        return [None]
    return list(eagle_taps(config, LAYERS))


# Layers of the target that a head reads, by dialect.
READ = {"four": (1, 3, 6, 8), "last state": (11,), "last state, projected": (11,)}


@pytest.mark.parametrize(
    ("dialect", "known_rows"), covering((*DIALECTS, *VARIANTS, "four"), (0, 15))
)
def test_chains_are_those_of_the_reference(
    dialect: str, known_rows: int, tmp_path: Path
) -> None:
    read = READ.get(dialect, (1, 4, 6))
    if dialect == "authors":  # no list, so the usual layers
        read = (1, 5, 8)
    name = "vllm" if dialect == "four" else dialect
    folder, source = draft_folder(write_eagle(tmp_path, name, read))
    config, weights = read_folder(tmp_path)
    known = Known.of(LAYERS, LENGTH)
    assert source.kind == "eagle"
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    eagle, ids = draft.eagle, draft.head.ids
    states = eagle.states(known.states(draft.taps))
    (caches,), choose = eagle.head.new_caches(), Greedy()
    tokens = mx.array([known.tokens[1:]])
    if known_rows:
        eagle.history(states[:, :known_rows], tokens[:, :known_rows], caches)
    out = eagle.step(states[:, known_rows:], tokens[:, known_rows:], caches)
    seen = []
    for _ in range(DRAFTS):
        seen.append((out.logits[:, -1], None))
        token = choose(out.logits[:, -1], ids)
        out = eagle.step(out.recycled[:, -1:], token[None], caches)
    expected = eagle3_dialects.forward(
        weights,
        config,
        known.hidden(layers_of(config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        drafts=DRAFTS,
        chosen=choose.tokens,
    )
    assert_drafts(seen, ids, expected)


@pytest.mark.parametrize(
    ("packaging", "layers", "part"),
    covering(PARALLEL, (1, 2, 3), ((0, 4), (15, 4), (15, 1)), pairs=[(1, 2)]),
)
def test_parallel_drafts_are_those_of_the_reference(
    packaging: str, layers: int, part: tuple[int, int], tmp_path: Path
) -> None:
    known_rows, drafts = part
    dialect = replace(PARALLEL[packaging], layers=layers)
    folder, source = draft_folder(write_eagle(tmp_path, dialect, (1, 4, 6)))
    config, weights = read_folder(tmp_path)
    assert source.kind == "peagle"
    known = Known.of(LAYERS, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    eagle, ids = draft.eagle, draft.head.ids
    states = eagle.states(known.states(draft.taps))
    caches, choose = eagle.new_caches(), Greedy()
    tokens = mx.array([known.tokens[1:]])
    if known_rows:
        eagle.history(states[:, :known_rows], tokens[:, :known_rows], caches)

    def choose_next(logits: mx.array, columns: mx.array | None = None) -> mx.array:
        return choose(logits, ids if columns is None else columns)

    eagle.draft(
        states[:, known_rows:], tokens[:, known_rows:], caches, drafts, choose_next
    )
    expected = p_eagle.forward(
        weights,
        config,
        known.hidden(layers_of(config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        drafts=drafts,
    )
    assert_drafts(choose.seen, ids, expected)
    assert np.array_equal(choose.tokens, expected.argmax(axis=-1))
