"""Dialects of EAGLE-3, and P-EAGLE, against numpy code that was written apart."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.engine.drafters.registry import draft_folder
from support.covering import covering
from support.drafters.block_drafts import Greedy
from support.references.blocks import eagle3_dialects, p_eagle
from support.references.blocks.packagings import eagle_taps
from support.references.tiny_blocks.on_disk import Known, assert_drafts, write
from support.references.tiny_blocks.tiny_eagles import (
    EAGLE3,
    P_EAGLE,
    tiny_eagle3,
    tiny_p_eagle,
)

# Some have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

LENGTH, DRAFTS = 23, 4
LAYERS = 12  # of the target


def layers_of(config: dict[str, Any]) -> list[int | None]:
    """Return the target's layers that a head reads; None: after the final norm."""
    inside = config.get("eagle_config") or {}
    if inside.get("use_aux_hidden_state") is False:
        return [None]
    return list(eagle_taps(config, LAYERS))


@pytest.mark.parametrize(("dialect", "held"), covering(EAGLE3, (0, 15)))
def test_chains_are_those_of_the_reference(
    dialect: str, held: int, tmp_path: Path
) -> None:
    tiny = tiny_eagle3(dialect, seed=5)
    known = Known.of(LAYERS, LENGTH)
    if dialect == "four-taps":  # no rule names four layers
        name = "eagle_aux_hidden_state_layer_ids"
        tiny.config[name] = [2, 4, 7, 9]
    folder, source = draft_folder(write(tmp_path, tiny))
    assert source.kind == "eagle"
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    eagle, ids = draft.eagle, draft.head.ids
    states = eagle.states(known.states(draft.taps))
    (caches,), choose = eagle.head.new_caches(), Greedy()
    tokens = mx.array([known.tokens[1:]])
    if held:
        eagle.history(states[:, :held], tokens[:, :held], caches)
    out = eagle.step(states[:, held:], tokens[:, held:], caches)
    seen = []
    for _ in range(DRAFTS):
        seen.append((out.logits[:, -1], None))
        token = choose(out.logits[:, -1], ids)
        out = eagle.step(out.recycled[:, -1:], token[None], caches)
    expected = eagle3_dialects.forward(
        tiny.weights,
        tiny.config,
        known.hidden(layers_of(tiny.config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        drafts=DRAFTS,
        chosen=choose.tokens,
    )
    assert_drafts(seen, ids, expected.logits)


@pytest.mark.parametrize(
    ("packaging", "layers", "part"),
    covering(P_EAGLE, (1, 2, 3), ((0, 4), (15, 4), (15, 1)), pairs=[(1, 2)]),
)
def test_parallel_drafts_are_those_of_the_reference(
    packaging: str, layers: int, part: tuple[int, int], tmp_path: Path
) -> None:
    held, drafts = part
    tiny = tiny_p_eagle(packaging, seed=6, layers=layers)
    folder, source = draft_folder(write(tmp_path, tiny))
    assert source.kind == "peagle"
    known = Known.of(LAYERS, LENGTH)
    draft: Any = source.from_folder(folder, known.model)  # type: ignore[attr-defined]
    eagle, ids = draft.eagle, draft.head.ids
    states = eagle.states(known.states(draft.taps))
    caches, choose = eagle.new_caches(), Greedy()
    tokens = mx.array([known.tokens[1:]])
    if held:
        eagle.history(states[:, :held], tokens[:, :held], caches)

    def choose_next(logits: mx.array, own: mx.array | None = None) -> mx.array:
        return choose(logits, ids if own is None else own)

    eagle.draft(states[:, held:], tokens[:, held:], caches, drafts, choose_next)
    expected = p_eagle.forward(
        tiny.weights,
        tiny.config,
        known.hidden(layers_of(tiny.config)),
        known.embeddings,
        known.lm_head,
        known.tokens,
        drafts=drafts,
    )
    assert_drafts(choose.seen, ids, expected.logits)
    assert np.array_equal(choose.tokens, expected.tokens)
