"""Unrolled heads have the same logits as heads that draft token by token."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine import EagleDraft
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.mtp import Mtp
from mlx_speculation.training.unroll import Recorded, attend_split, unroll
from support.identity import prompt_of
from support.models import mtp_checkpoints
from support.models.eagle_checkpoints import write_eagle
from support.references.reference_target import Known, target

# The config.json of some heads lists no layers of the target.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

SLOTS, DEPTHS = 9, 4
HEADS = ("specforge", "vllm", "normed residual", "norm_output", "whole")


def logits_of(
    model: Any, hidden: mx.array, tokens: mx.array, depths: int
) -> list[mx.array]:
    """Return the logits of all depths.

    `tokens` lack the text's first token. `unroll` does not read it, so a copy of the
    second stands in for it.
    """
    whole = mx.concatenate([tokens[:, :1], tokens], axis=1)
    return unroll(model, hidden, Recorded([], whole, depths), lambda _, logits: logits)


def eagle_of(folder: Path, dialect: str) -> Any:
    return EagleDraft.from_folder(write_eagle(folder, dialect), target()).eagle


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dialect", HEADS)
def test_an_eagle_head_is_unrolled_as_it_drafts(
    dialect: str, split: bool, tmp_path: Path
) -> None:
    """test_eagle_dialects_reference.py compares drafting step by step with numpy."""
    eagle, known = eagle_of(tmp_path, dialect), Known.of(8, SLOTS + 1)
    taps = HiddenStates(known.model, layers=eagle.layers)
    states = eagle.states(known.states(taps))
    tokens = mx.array([prompt_of(SLOTS + DEPTHS + 1)[1:]])
    expected = []
    for slot in range(SLOTS):
        caches = eagle.head.new_caches()[0]
        out = eagle.rows(states[:, : slot + 1], tokens[:, : slot + 1], caches)
        for depth in range(DEPTHS):
            expected.append(out.logits[0, -1])
            given = tokens[:, slot + depth + 1][None]
            out = eagle.rows(out.recycled[:, -1:], given, caches)
    if split:
        attend_split(eagle.head.midlayer.self_attn)
    unrolled = logits_of(eagle, states, tokens, DEPTHS)
    for index, wanted in enumerate(expected):
        slot, depth = divmod(index, DEPTHS)
        got = unrolled[depth][0, slot]
        assert mx.abs(got - wanted).max() < 1e-4 * mx.maximum(1, mx.abs(wanted).max())


@pytest.mark.parametrize(
    "name", ["qwen3_next", "mimo", "deepseek_v3", "step3p5", "mimo_v2_flash"]
)
def test_an_mtp_head_is_unrolled_as_it_drafts(name: str) -> None:
    """Layers can be chained: layer k of "step3p5" makes drafted token k."""
    _, model, head = mtp_checkpoints.make(name)
    layout = mtp_checkpoints.LAYOUTS[name]
    head._chained = mtp_checkpoints.family(layout).layers == "chained"
    depths = len(head.layers) if head.chained else 3
    mtp = Mtp(head, HiddenStates(model, after_norm=True))
    dim = head.layers[0].norm_h.weight.shape[0]
    slots: Any = range(SLOTS)
    if name == "mimo_v2_flash":  # its layers have a window
        window: Any = head.layers[0]._blocks[0].window
        slots = (2, window - 2, window - 1, window, window + 5)
    hidden = mx.random.normal((1, slots[-1] + 1, dim), key=mx.random.key(5))
    tokens = mx.array([prompt_of(slots[-1] + 1 + DEPTHS)])
    unrolled = logits_of(mtp, hidden, tokens, depths)
    for slot in slots:
        caches = head.new_caches()
        state = hidden[:, : slot + 1]
        given = tokens[:, : slot + 1]
        for depth in range(depths):
            layer = depth if head.chained else 0
            out = mtp.rows(state, given, caches[layer], layer)
            got, expected = unrolled[depth][0, slot], out.logits[0, -1]
            assert mx.abs(got - expected).max() < 1e-4 * mx.abs(expected).max()
            if head.chained:
                state, given = out.recycled, tokens[:, depth + 1 : depth + slot + 2]
            else:
                state, given = out.recycled[:, -1:], tokens[:, slot + depth + 1][None]
