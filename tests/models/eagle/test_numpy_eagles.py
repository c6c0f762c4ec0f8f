"""What must hold for the numpy EAGLE-3 and P-EAGLE heads, whatever their weights."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from support.references.blocks import eagle3_dialects, p_eagle
from support.references.blocks.eagle_layers import EagleHead
from support.references.blocks.packagings import eagle_taps
from support.references.blocks.primitives import Array, linear, rms
from support.references.blocks.vocabulary import BlockDraft
from support.references.tiny_blocks.tiny_eagles import (
    DRAFT_VOCABULARY,
    EAGLE3,
    P_EAGLE,
    tiny_eagle3,
    tiny_p_eagle,
)
from support.references.tiny_blocks.tiny_tensors import (
    HIDDEN,
    MASK,
    VOCABULARY,
    TinyDrafter,
    TinyInputs,
    tiny_inputs,
)

KNOWN, DRAFTS = 9, 4
FULL = ("deepspec", "deepspec-gemma4", "full-vocabulary", "tied")


def inputs_of(drafter: TinyDrafter) -> TinyInputs:
    fc = drafter.weights.get("fc.weight")
    return tiny_inputs(1 if fc is None else fc.shape[1] // HIDDEN, KNOWN)


def draft(drafter: TinyDrafter, inputs: TinyInputs, **more: Any) -> BlockDraft:
    masked = "mask_hidden" in drafter.weights
    forward = p_eagle.forward if masked else eagle3_dialects.forward
    return forward(
        drafter.weights,
        drafter.config,
        inputs.hidden,
        inputs.embeddings,
        inputs.lm_head,
        inputs.tokens,
        **{"drafts": DRAFTS, **more},
    )


def changed(drafter: TinyDrafter, **keys: Any) -> TinyDrafter:
    return TinyDrafter({**drafter.config, **keys}, drafter.weights)


def replaced(drafter: TinyDrafter, **tensors: Array) -> TinyDrafter:
    """Other tensors; in names a double underscore stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return TinyDrafter(drafter.config, {**drafter.weights, **named})


def same(one: BlockDraft, two: BlockDraft) -> list[bool]:
    pairs = zip(one.states, two.states, strict=True)
    return [bool(np.allclose(a, b, atol=1e-9)) for a, b in pairs]


def head_of(drafter: TinyDrafter, inputs: TinyInputs, **more: Any) -> EagleHead:
    tables = inputs.embeddings, inputs.lm_head
    return EagleHead(drafter.weights, drafter.config, *tables, **more)


@pytest.mark.parametrize("dialect", EAGLE3)
def test_every_dialect_drafts(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    made = draft(drafter, inputs_of(drafter))
    assert made.logits.shape == (DRAFTS, VOCABULARY)
    reached = VOCABULARY if dialect in FULL else DRAFT_VOCABULARY
    assert_array_equal(np.isfinite(made.logits).sum(axis=-1), [reached] * DRAFTS)
    assert_array_equal(made.tokens, made.logits.argmax(axis=-1))


@pytest.mark.parametrize("dialect", EAGLE3)
def test_a_step_sees_the_tokens_before_it_and_none_behind(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    inputs = inputs_of(drafter)
    one = draft(drafter, inputs, chosen=[5, 6, 7, 8])
    two = draft(drafter, inputs, chosen=[5, 9, 7, 8])
    assert same(one, two) == [True, True, False, False]


@pytest.mark.parametrize("dialect", EAGLE3)
def test_shifted_positions_change_nothing(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    inputs = inputs_of(drafter)
    shifted = draft(drafter, inputs, positions=np.arange(KNOWN) + 77)
    assert all(same(shifted, draft(drafter, inputs)))


@pytest.mark.parametrize("dialect", EAGLE3)
def test_the_history_is_read_up_to_the_window(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    inputs = inputs_of(drafter)
    hidden = [layer.copy() for layer in inputs.hidden]
    for layer in hidden:
        layer[0] += 1.0
    other = TinyInputs(hidden, inputs.embeddings, inputs.lm_head, inputs.tokens)
    unseen = dialect == "sliding"
    assert all(same(draft(drafter, inputs), draft(drafter, other))) is unseen
    assert any(same(draft(drafter, inputs), draft(drafter, other))) is unseen


def test_the_first_step_against_its_equations() -> None:
    """Layer 0 by hand, with one slot: attention returns the value itself."""
    drafter = tiny_eagle3("authors")
    inputs = tiny_inputs(3, 1)
    weights = {k: v.astype(np.float64) for k, v in drafter.weights.items()}
    g = weights["fc.weight"] @ np.concatenate([layer[0] for layer in inputs.hidden])
    e = inputs.embeddings[inputs.tokens[1]]

    def norm(name: str, x: Array) -> Array:
        size = np.sqrt((x**2).mean() + 1e-6)
        return np.asarray(x / size * weights[f"{name}.weight"])

    c = np.concatenate(
        [norm("midlayer.input_layernorm", e), norm("midlayer.hidden_norm", g)]
    )
    value = (weights["midlayer.self_attn.v_proj.weight"] @ c).reshape(2, -1)
    mixed = np.repeat(value, 2, axis=0).reshape(-1)
    attended = weights["midlayer.self_attn.o_proj.weight"] @ mixed
    for before in (False, True):
        x = (norm("midlayer.hidden_norm", g) if before else g) + attended
        y = norm("midlayer.post_attention_layernorm", x)
        gate = weights["midlayer.mlp.gate_proj.weight"] @ y
        up = weights["midlayer.mlp.up_proj.weight"] @ y
        x = x + weights["midlayer.mlp.down_proj.weight"] @ (
            gate / (1 + np.exp(-gate)) * up
        )
        logits = weights["lm_head.weight"] @ norm("norm", x)
        made = draft(drafter, inputs, drafts=1, absent_norm_before_residual=before)
        ids = np.arange(DRAFT_VOCABULARY) + drafter.weights["d2t"]
        assert_allclose(made.logits[0, ids], logits)
        named = changed(drafter, norm_before_residual=before)
        assert_allclose(draft(named, inputs, drafts=1).logits, made.logits)


@pytest.mark.parametrize("dialect", ["authors", "eagle3.1"])
def test_what_is_recycled_is_norm_output(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    inputs = inputs_of(drafter)
    head = head_of(drafter, inputs)
    fused = head.fuse(np.concatenate(inputs.hidden, axis=-1))
    tokens = np.array([*inputs.tokens[1:], 40])
    x = head.run(head.embed(tokens[:-1]), fused, np.arange(KNOWN))[-1:]
    recycled = head.states(x) if dialect == "eagle3.1" else x
    again = head.run(
        head.embed(tokens), np.concatenate([fused, recycled]), np.arange(KNOWN + 1)
    )
    made = draft(drafter, inputs, drafts=2, chosen=[40])
    assert_allclose(made.states[1], head.states(again)[-1])


def test_absent_norm_before_residual_is_true_for_speculators_only() -> None:
    for dialect, expected in (("speculators-qwen3", True), ("authors", False)):
        drafter = tiny_eagle3(dialect)
        drafter.config.pop("norm_before_residual", None)
        inputs = inputs_of(drafter)
        for before in (True, False):
            named = changed(drafter, norm_before_residual=before)
            equal = same(draft(drafter, inputs), draft(named, inputs))
            assert equal == [before is expected] * DRAFTS


@pytest.mark.parametrize("dialect", ["deepspec", "speculators-qwen3", "minimax"])
def test_head_norms_are_applied(dialect: str) -> None:
    drafter = tiny_eagle3(dialect)
    bare = {k: v for k, v in drafter.weights.items() if "q_norm" not in k}
    inputs = inputs_of(drafter)
    without = draft(TinyDrafter(drafter.config, bare), inputs)
    assert not any(same(without, draft(drafter, inputs)))


def test_a_bias_is_read_where_it_is() -> None:
    drafter = tiny_eagle3("biased")
    inputs = inputs_of(drafter)
    for part in ("fc", "q_proj", "v_proj", "o_proj"):
        bare = {k: v for k, v in drafter.weights.items() if f"{part}.bias" not in k}
        assert len(bare) == len(drafter.weights) - 1
        without = draft(TinyDrafter(drafter.config, bare), inputs)
        assert not any(same(without, draft(drafter, inputs)))


def test_heads_and_tables_come_from_the_file_then_from_the_target() -> None:
    full, tied = tiny_eagle3("full-vocabulary"), tiny_eagle3("tied")
    inputs = inputs_of(full)
    made = draft(full, inputs)
    assert_allclose(made.logits, made.states @ inputs.lm_head.T)
    made = draft(tied, inputs)
    table = tied.weights["embed_tokens.weight"]
    assert_allclose(made.logits, made.states @ table.T)
    loose = changed(tied, tie_word_embeddings=False)
    made = draft(loose, inputs)
    assert_allclose(made.logits, made.states @ inputs.lm_head.T)


def test_logits_are_scaled() -> None:
    drafter = tiny_eagle3("logit-scale")
    inputs = inputs_of(drafter)
    plain = draft(changed(drafter, logit_scale=1.0), inputs)
    assert_allclose(draft(drafter, inputs).logits, 0.25 * plain.logits)


def test_mrope_of_a_text_is_plain_rotation() -> None:
    drafter = tiny_eagle3("vision")
    inputs = inputs_of(drafter)
    plain = changed(drafter, rope_scaling=None)
    assert all(same(draft(drafter, inputs), draft(plain, inputs)))


def test_gemma_heads_are_capped_and_scale_their_embedding() -> None:
    drafter = tiny_eagle3("deepspec-gemma4")
    inputs = inputs_of(drafter)
    big = drafter.weights["lm_head.weight"] * 100
    assert (
        np.abs(draft(replaced(drafter, lm_head__weight=big), inputs).logits).max() > 29
    )
    assert (
        np.abs(draft(replaced(drafter, lm_head__weight=big), inputs).logits).max() <= 30
    )
    rows = head_of(drafter, inputs).embed(np.array([3]))
    assert_allclose(rows[0], 8.0 * drafter.weights["embed_tokens.weight"][3], rtol=1e-6)


def test_norms_of_the_taps_stand_before_fc() -> None:
    drafter = tiny_eagle3("eagle3.1")
    inputs = inputs_of(drafter)
    taps = np.concatenate(inputs.hidden, axis=-1)
    normed = np.concatenate(
        [
            rms(layer, drafter.weights[f"fc_norm.{j}.weight"], 1e-6)
            for j, layer in enumerate(inputs.hidden)
        ],
        axis=-1,
    )
    fused = linear(drafter.weights, "fc", normed)
    assert_allclose(head_of(drafter, inputs).fuse(taps), fused)
    old = {
        name.replace("fc_norm.0", "aux_norm_low")
        .replace("fc_norm.1", "aux_norm_mid")
        .replace("fc_norm.2", "aux_norm_high"): tensor
        for name, tensor in drafter.weights.items()
    }
    older = TinyDrafter(drafter.config, old)
    assert_allclose(head_of(older, inputs).fuse(taps), fused)
    whole = replaced(tiny_eagle3("authors"), input_norm__weight=np.ones(3 * HIDDEN))
    fused = linear(whole.weights, "fc", rms(taps, None, 1e-6))
    assert_allclose(head_of(whole, inputs).fuse(taps), fused)


def test_tapped_layers_of_every_key() -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}
    assert eagle_taps({}, 12) == [1, 5, 8]
    assert eagle_taps(ids, 12) == [1, 4, 6]
    assert eagle_taps({"eagle_config": ids}, 12) == [2, 5, 7]
    inside = eagle_taps({"eagle_config": ids}, 12, eagle_config_ids="tuple")
    assert inside == [1, 4, 6]
    assert eagle_taps(tiny_eagle3("deepspec").config, 12) == [1, 3, 5, 7, 9]
    assert eagle_taps(tiny_eagle3("last-hidden").config, 12) == [11]


@pytest.mark.parametrize("packaging", P_EAGLE)
def test_one_draft_of_p_eagle_is_eagle3s(packaging: str) -> None:
    drafter = tiny_p_eagle(packaging)
    inputs = inputs_of(drafter)
    weights = {k: v for k, v in drafter.weights.items() if k != "mask_hidden"}
    plain = draft(TinyDrafter(drafter.config, weights), inputs, drafts=1)
    many = draft(drafter, inputs)
    assert_allclose(many.logits[:1], plain.logits, atol=1e-9)
    assert_allclose(draft(drafter, inputs, drafts=1).logits, plain.logits)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("packaging", P_EAGLE)
def test_masked_slots_are_causal(packaging: str, layers: int) -> None:
    drafter = tiny_p_eagle(packaging, layers=layers)
    inputs = inputs_of(drafter)
    many = draft(drafter, inputs)
    for drafts in (1, 2, 3):
        few = draft(drafter, inputs, drafts=drafts)
        assert_allclose(few.logits, many.logits[:drafts], atol=1e-9)
    other = replaced(drafter, mask_hidden=-drafter.weights["mask_hidden"])
    assert same(many, draft(other, inputs)) == [True, False, False, False]
    table = drafter.weights["embed_tokens.weight"].copy()
    table[MASK] += 1.0
    other = replaced(drafter, embed_tokens__weight=table)
    assert same(many, draft(other, inputs)) == [True, False, False, False]


def test_a_masked_slot_is_fc_of_mask_hidden() -> None:
    drafter = tiny_p_eagle("aws")
    inputs = inputs_of(drafter)
    mask = drafter.weights["mask_hidden"].astype(np.float64).reshape(3, HIDDEN)
    hidden = [np.vstack([layer, mask[j]]) for j, layer in enumerate(inputs.hidden)]
    tokens = [*inputs.tokens, MASK]
    longer = TinyInputs(hidden, inputs.embeddings, inputs.lm_head, tokens)
    as_real = draft(drafter, longer, drafts=1)
    assert_allclose(as_real.logits[0], draft(drafter, inputs).logits[1], atol=1e-9)


def test_the_mask_id_has_four_names() -> None:
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    config: dict[str, Any] = {}
    for value, name in reversed(list(enumerate(names))):
        config[name] = value
        assert p_eagle.mask_token(config) == value
    config["dflash_config"] = {"mask_token_id": 9}
    assert p_eagle.mask_token(config) == 9
    with pytest.raises(ValueError, match="names no mask token"):
        p_eagle.mask_token({})


def test_a_mask_hidden_of_another_width_is_refused() -> None:
    drafter = tiny_p_eagle("aws")
    short = replaced(drafter, mask_hidden=np.zeros((1, 2 * HIDDEN)))
    with pytest.raises(ValueError, match="mask_hidden has 128 numbers, fc reads 192"):
        draft(short, inputs_of(drafter))
