"""What must hold for the numpy DFlash2 drafter, whatever its weights are."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from support.references.blocks import dflash2, dspark
from support.references.blocks.packagings import block_taps, canonical_weights
from support.references.blocks.primitives import Array, rms
from support.references.blocks.vocabulary import BlockDraft, draft_probs
from support.references.tiny_blocks.tiny_dflash2 import (
    DFLASH2,
    GROUP,
    TOP_K,
    tiny_dflash2,
)
from support.references.tiny_blocks.tiny_dspark import BLOCK, RANK, TAPS
from support.references.tiny_blocks.tiny_tensors import (
    HIDDEN,
    LAYERS,
    MASK,
    VOCABULARY,
    TinyDrafter,
    TinyInputs,
    tiny_inputs,
)

KNOWN = 12


@pytest.fixture
def inputs() -> TinyInputs:
    return tiny_inputs(len(TAPS), KNOWN)


def flash(drafter: TinyDrafter, inputs: TinyInputs, **more: Any) -> BlockDraft:
    tables = inputs.embeddings, inputs.lm_head
    drafted = drafter.weights, drafter.config
    return dflash2.forward(*drafted, inputs.hidden, *tables, inputs.tokens, **more)


def changed(drafter: TinyDrafter, **keys: Any) -> TinyDrafter:
    return TinyDrafter({**drafter.config, **keys}, drafter.weights)


@pytest.mark.parametrize("packaging", DFLASH2)
def test_both_packagings_name_the_same_taps(packaging: str) -> None:
    assert block_taps(tiny_dflash2(packaging).config) == TAPS


def reset(drafter: TinyDrafter, **base: float) -> TinyDrafter:
    """Convolutions of one weight per tap, and a selector that adds nothing."""
    weights = dict(drafter.weights)
    for name, tensor in weights.items():
        if name.endswith("base_kernel"):
            weights[name] = np.zeros_like(tensor)
            weights[name][:, 0] = base.get("now", 1.0)
            weights[name][:, 1] = base.get("before", 0.0)
        if "kernel_projection" in name or "codebook" in name:
            weights[name] = np.zeros_like(tensor)
    return TinyDrafter(drafter.config, weights)


@pytest.mark.parametrize("packaging", DFLASH2)
def test_an_empty_convolution_and_selector_leave_dflash(
    packaging: str, inputs: TinyInputs
) -> None:
    drafter = reset(tiny_dflash2(packaging))
    draft = flash(drafter, inputs)
    given = {**drafter.config, "sample_from_anchor": False, "is_causal": False}
    given["sliding_window_non_causal"] = True
    plain = dspark.forward(
        drafter.weights,
        given,
        inputs.hidden,
        inputs.embeddings,
        inputs.lm_head,
        inputs.tokens,
    )
    assert_allclose(draft.states, plain.states, atol=1e-9)
    assert_array_equal(draft.tokens, plain.tokens)
    assert_array_equal(np.isfinite(draft.logits).sum(axis=-1), [TOP_K] * (BLOCK - 1))


def test_a_convolution_of_the_row_before_shifts_the_block() -> None:
    drafter = reset(tiny_dflash2("z-lab"), now=0.0, before=1.0)
    weights = canonical_weights(drafter.weights, drafter.config)
    rows = np.random.default_rng(0).normal(size=(BLOCK, HIDDEN))
    for side in (0, 1):
        made = dflash2.convolve(
            weights, drafter.config, "layers.0.mlp_conv", rows, side, rows
        )
        assert_allclose(made, np.concatenate([rows[:1] * 0, rows[:-1]]))


def test_a_convolution_is_causal_and_grouped() -> None:
    drafter = tiny_dflash2("z-lab")
    weights = canonical_weights(drafter.weights, drafter.config)
    rng = np.random.default_rng(0)
    rows, read = rng.normal(size=(2, BLOCK, HIDDEN))

    def run(rows: Array, read: Array) -> Array:
        return dflash2.convolve(
            weights, drafter.config, "layers.0.attention_conv", rows, 1, read
        )

    later = rows.copy()
    later[2] += 1.0
    differs = ~np.isclose(run(rows, read), run(later, read)).all(axis=1)
    assert_array_equal(differs, [False, False, True, True])
    projection = weights["layers.0.attention_conv.kernel_projection.weight"]
    kernel = (projection @ read[1]).reshape(2, 2, HIDDEN // GROUP)[1]
    base = weights["layers.0.attention_conv.base_kernel"][1]
    c = 2 * GROUP + 5
    expected = (base[0, c] + kernel[0, 2]) * rows[1, c]
    expected += (base[1, c] + kernel[1, 2]) * rows[0, c]
    assert_allclose(run(rows, read)[1, c], expected)


def test_both_convolutions_read_the_rows_in_front(inputs: TinyInputs) -> None:
    """One layer whose attention is mute: the MLP half, by hand."""
    drafter = tiny_dflash2("z-lab")
    weights = canonical_weights(drafter.weights, drafter.config)
    for i in range(LAYERS):
        weights[f"layers.{i}.self_attn.o_proj.weight"] *= 0
    made = flash(TinyDrafter(drafter.config, weights), inputs).states
    x = inputs.embeddings[[inputs.tokens[-1]] + [MASK] * (BLOCK - 1)]
    for i in range(LAYERS):
        layer = f"layers.{i}"
        b = rms(x, weights[f"{layer}.post_attention_layernorm.weight"], 1e-6)
        name = f"{layer}.mlp_conv"
        delta = (b @ weights[f"{name}.kernel_projection.weight"].T).reshape(
            BLOCK, 2, 2, HIDDEN // GROUP
        )
        kernel = weights[f"{name}.base_kernel"] + delta.repeat(GROUP, axis=3)

        def conv(side: int, y: Array, kernel: Array = kernel) -> Array:
            before = np.concatenate([y[:1] * 0, y[:-1]])
            return np.asarray(kernel[:, side, 0] * y + kernel[:, side, 1] * before)

        y = conv(0, b)
        gate = y @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = y @ weights[f"{layer}.mlp.up_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * up
        x = x + conv(1, inner @ weights[f"{layer}.mlp.down_proj.weight"].T)
    assert_allclose(made, rms(x, weights["norm.weight"], 1e-6)[1:])


@pytest.mark.parametrize(
    ("packaging", "is_causal", "causal"),
    [
        ("z-lab", False, False),
        ("z-lab", True, True),
        ("z-lab", None, True),
        ("speculators", True, True),
        ("speculators", None, False),
    ],
)
def test_dflash2_reads_causality_by_packaging(
    packaging: str, is_causal: bool | None, causal: bool, inputs: TinyInputs
) -> None:
    drafter = reset(tiny_dflash2(packaging, is_causal=is_causal))
    whole = flash(drafter, inputs).states
    short = flash(drafter, inputs, drafts=2).states
    assert np.allclose(whole[:2], short, atol=1e-9) is causal


def test_the_greedy_walk_is_that_of_the_lattice(inputs: TinyInputs) -> None:
    drafter = tiny_dflash2("z-lab")
    draft = flash(drafter, inputs)
    anchor = inputs.tokens[-1]
    lattice = dflash2.lattice(
        drafter.weights, drafter.config, draft.states, inputs.lm_head, anchor
    )
    parent, walked = 0, []
    for s in range(BLOCK - 1):
        scores = lattice.unary[s] + lattice.edges[s][parent]
        ids = lattice.ids[s]
        assert_allclose(draft.logits[s][ids], scores)
        parent = int(scores.argmax())
        walked.append(int(ids[parent]))
    assert_array_equal(draft.tokens, walked)
    weights = {k: v.astype(np.float64) for k, v in drafter.weights.items()}
    a = weights["candidate_selector.predecessor_codebook"][anchor]
    b = weights["candidate_selector.successor_codebook"]
    p = weights["candidate_selector.hidden_projection.weight"]
    state, best = draft.states[0], draft.tokens[0]
    unary = inputs.lm_head[best] @ state
    edge = sum(a[r] * (p[r] @ state) * b[best, r] for r in range(RANK))
    assert_allclose(draft.logits[0, best], unary + edge)
    probs = draft_probs(draft.logits, 0.7)
    assert_allclose(probs.sum(axis=-1), 1.0)
    assert_array_equal((probs > 0).sum(axis=-1), [TOP_K] * (BLOCK - 1))


def test_padding_rows_of_the_head_are_never_candidates(inputs: TinyInputs) -> None:
    drafter = tiny_dflash2("z-lab")
    padded = np.concatenate([inputs.lm_head, 100 * np.abs(inputs.lm_head[:9])])
    wide = TinyInputs(inputs.hidden, inputs.embeddings, padded, inputs.tokens)
    draft = flash(drafter, wide)
    assert draft.logits.shape == (BLOCK - 1, VOCABULARY + 9)
    assert_allclose(draft.logits[:, :VOCABULARY], flash(drafter, inputs).logits)


def test_scales_of_the_target_hold_where_the_drafter_has_none(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dflash2("z-lab")
    options = drafter.config["dflash_config"]
    own = {**options, "output_multiplier": 3.0, "final_logit_softcapping": 5.0}
    own["input_embedding_scale"] = 2.0
    told = flash(changed(drafter, dflash_config=own), inputs)
    target = {"target_output_multiplier": 3.0, "target_softcap": 5.0}
    same = flash(drafter, inputs, target_embedding_scale=2.0, **target)
    assert_allclose(told.logits, same.logits)
    plain = flash(drafter, inputs)
    assert not np.isclose(told.states, plain.states).all(axis=1).any()
    lattice = dflash2.lattice(
        drafter.weights,
        drafter.config,
        told.states,
        inputs.lm_head,
        inputs.tokens[-1],
        output_multiplier=3.0,
        final_softcap=5.0,
    )
    head = inputs.lm_head[lattice.ids[1]] @ told.states[1]
    assert_allclose(lattice.unary[1], 5.0 * np.tanh(3.0 * head / 5.0))
