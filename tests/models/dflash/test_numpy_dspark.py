"""What must hold for the numpy DSpark drafter, whatever their weights are."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from support.references.blocks import dspark
from support.references.blocks.layers import seen_by_block
from support.references.blocks.packagings import (
    block_taps,
    canonical_config,
    canonical_weights,
)
from support.references.blocks.vocabulary import BlockDraft
from support.references.tiny_blocks.tiny_dspark import (
    BLOCK,
    DSPARK,
    RANK,
    TAPS,
    WINDOW,
    tiny_dspark,
)
from support.references.tiny_blocks.tiny_tensors import (
    HEAD_DIM,
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


def spark(drafter: TinyDrafter, inputs: TinyInputs, **more: Any) -> BlockDraft:
    tables = inputs.embeddings, inputs.lm_head
    drafted = drafter.weights, drafter.config
    return dspark.forward(*drafted, inputs.hidden, *tables, inputs.tokens, **more)


def with_state(inputs: TinyInputs, position: int) -> TinyInputs:
    """Other states at one position."""
    hidden = [layer.copy() for layer in inputs.hidden]
    for layer in hidden:
        layer[position] += 1.0
    return TinyInputs(hidden, inputs.embeddings, inputs.lm_head, inputs.tokens)


def with_embedding(inputs: TinyInputs, token: int) -> TinyInputs:
    """Another embedding of one token."""
    table = inputs.embeddings.copy()
    table[token] = -table[token] + 0.5
    return TinyInputs(inputs.hidden, table, inputs.lm_head, inputs.tokens)


def changed(drafter: TinyDrafter, **keys: Any) -> TinyDrafter:
    return TinyDrafter({**drafter.config, **keys}, drafter.weights)


def moves(one: BlockDraft, two: BlockDraft) -> list[bool]:
    """Which drafted rows differ."""
    pairs = zip(one.states, two.states, strict=True)
    return [not np.allclose(a, b, atol=1e-9) for a, b in pairs]


@pytest.mark.parametrize("packaging", DSPARK)
def test_every_packaging_drafts_a_block(packaging: str, inputs: TinyInputs) -> None:
    draft = spark(tiny_dspark(packaging), inputs)
    rows = BLOCK - (packaging == "nemotron")
    assert draft.logits.shape == (rows, VOCABULARY)
    assert draft.confidence is not None
    assert draft.confidence.shape == (rows,)
    assert np.all((draft.confidence > 0) & (draft.confidence < 1))
    assert np.all(np.isfinite(draft.logits))
    assert_array_equal(draft.tokens, draft.logits.argmax(axis=-1))


@pytest.mark.parametrize("packaging", DSPARK)
def test_every_packaging_names_the_same_taps(packaging: str) -> None:
    assert block_taps(tiny_dspark(packaging).config) == TAPS


def test_ids_that_sources_count_differently_are_a_keyword() -> None:
    config = tiny_dspark("speculators").config
    assert block_taps(config, speculators_ids="layer") == [tap + 1 for tap in TAPS]
    config = tiny_dspark("gguf").config
    assert block_taps(config, gguf_ids="tuple") == [tap - 1 for tap in TAPS]


@pytest.mark.parametrize("packaging", ["deepspec", "nemotron"])
def test_an_oracle_markov_head_walks_its_permutation(
    packaging: str, inputs: TinyInputs
) -> None:
    drafter = tiny_dspark(packaging, confidence=False)
    after = np.random.default_rng(0).permutation(VOCABULARY)
    weights = {
        **drafter.weights,
        "lm_head.weight": np.zeros((VOCABULARY, HIDDEN)),
        "markov_head.markov_w1.weight": np.eye(VOCABULARY),
        "markov_head.markov_w2.weight": np.eye(VOCABULARY)[after].T,
    }
    draft = spark(TinyDrafter(drafter.config, weights), inputs)
    token = inputs.tokens[-1]
    for drafted in draft.tokens:
        token = int(after[token])
        assert drafted == token


def test_the_gguf_packaging_is_deepspecs_with_log_snr(inputs: TinyInputs) -> None:
    gguf = tiny_dspark("gguf")
    weights = canonical_weights(gguf.weights, gguf.config)
    plain = {**tiny_dspark("deepspec").config, "log_snr_conditioning": False}
    without = changed(gguf, **{"dspark.dspark.log_snr_conditioning": False})
    bare = {name: t for name, t in weights.items() if "log_snr" not in name}
    same = spark(TinyDrafter(plain, bare), inputs)
    assert_allclose(spark(without, inputs).logits, same.logits)
    assert np.abs(spark(gguf, inputs).logits - same.logits).max() > 0.1
    assert canonical_config(gguf.config)["block_size"] == BLOCK


@pytest.mark.parametrize("packaging", DSPARK)
def test_a_constant_shift_of_positions_changes_nothing(
    packaging: str, inputs: TinyInputs
) -> None:
    drafter = tiny_dspark(packaging)
    here = spark(drafter, inputs)
    shifted = spark(drafter, inputs, positions=np.arange(KNOWN) + 100)
    assert_allclose(shifted.logits, here.logits, atol=1e-9)
    apart = np.arange(KNOWN) - np.arange(KNOWN, 0, -1)
    assert all(moves(here, spark(drafter, inputs, positions=apart)))


def test_context_ends_before_the_anchor_and_reaches_every_row(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("deepspec")
    draft = spark(drafter, inputs)
    for position in (0, KNOWN - 1):
        assert all(moves(draft, spark(drafter, with_state(inputs, position))))


def test_rows_see_the_masks_unless_they_are_causal(inputs: TinyInputs) -> None:
    drafter = tiny_dspark("specforge")
    other = with_embedding(inputs, MASK)
    assert all(moves(spark(drafter, inputs), spark(drafter, other)))
    for keys in (
        {"is_causal": True},
        {"dflash_config": {**drafter.config["dflash_config"], "causal": True}},
        {"dflash_query_causal": True},
    ):
        causal = changed(drafter, **keys)
        after = moves(spark(causal, inputs), spark(causal, other))
        assert after == [False, True, True, True]


def test_a_causal_block_does_not_depend_on_its_length(inputs: TinyInputs) -> None:
    drafter = changed(tiny_dspark("deepspec"), is_causal=True)
    whole, short = spark(drafter, inputs), spark(drafter, inputs, drafts=2)
    assert_allclose(short.logits, whole.logits[:2], atol=1e-9)
    free = tiny_dspark("deepspec")
    whole, short = spark(free, inputs), spark(free, inputs, drafts=2)
    assert not np.isclose(short.states, whole.states[:2]).all(axis=1).any()


def test_sliding_layers_of_speculators_are_causal_until_told(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("speculators")
    sliding = {"layer_types": ["sliding_attention"] * LAYERS}
    inner = {**drafter.config["transformer_layer_config"], **sliding}
    causal = changed(drafter, transformer_layer_config=inner)
    free = changed(causal, sliding_window_non_causal=True)
    other = with_embedding(inputs, MASK)
    assert not moves(spark(causal, inputs), spark(causal, other))[0]
    assert moves(spark(free, inputs), spark(free, other))[0]
    assert moves(spark(drafter, inputs), spark(drafter, other))[0]  # layer 0 is full


@pytest.mark.parametrize(
    ("window_from", "last_unseen"), [("row", KNOWN - WINDOW), ("anchor", 3)]
)
def test_a_window_hides_what_lies_before_it(
    window_from: str, last_unseen: int, inputs: TinyInputs
) -> None:
    drafter = tiny_dspark("nemotron")
    draft = spark(drafter, inputs, window_from=window_from)
    hidden = spark(drafter, with_state(inputs, last_unseen), window_from=window_from)
    seen = with_state(inputs, last_unseen + 1)
    assert not any(moves(draft, hidden))
    # Row 0, the anchor's, sees it; those behind it see the anchor's row.
    assert any(moves(draft, spark(drafter, seen, window_from=window_from)))


def test_windows_are_counted_per_row_or_from_the_anchor() -> None:
    rows = seen_by_block(np.arange(6), 3, 4, True, "row")
    first = [list(np.flatnonzero(row)) for row in rows]
    assert first == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    rows = seen_by_block(np.arange(6), 3, 4, False, "anchor")
    assert [list(np.flatnonzero(row)) for row in rows] == [[2, 3, 4, 5, 6, 7, 8]] * 3


def test_the_given_form_starts_one_row_later(inputs: TinyInputs) -> None:
    drafter = tiny_dspark("deepspec")
    given = changed(drafter, sample_from_anchor=False)
    samples, later = spark(drafter, inputs), spark(given, inputs)
    assert_allclose(later.states, samples.states[1:], atol=1e-9)
    assert len(later.tokens) == BLOCK - 1
    # The predecessor of the first drafted row is the anchor in both forms.
    heads = dspark.MarkovHead(drafter.weights, drafter.config)
    bias = heads.bias(inputs.tokens[-1], later.states[0])
    head = drafter.weights["lm_head.weight"]
    assert_allclose(later.logits[0], later.states[0] @ head.T + bias, atol=1e-5)


def test_the_number_of_proposals_tells_the_anchor() -> None:
    config = dict(tiny_dspark("speculators").config)
    del config["sample_from_anchor"]
    for proposals, samples in ((BLOCK, True), (BLOCK - 1, False)):
        methods = {"proposal_methods": [{"speculative_tokens": proposals}]}
        told = {**config, "speculators_config": methods}
        assert dspark.anchor_samples(told) is samples
        assert dspark.anchor_samples({**told, "sample_from_anchor": False}) is False
    silent = {**config, "speculators_config": {}}
    assert dspark.anchor_samples(silent)
    assert not dspark.anchor_samples(silent, "given")


def test_a_reduced_vocabulary_is_the_full_one_without_some_ids(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("speculators", draft_vocabulary=96)
    ids = np.arange(96) + drafter.weights["d2t"]
    assert_array_equal(np.flatnonzero(drafter.weights["t2d"]), ids)
    draft = spark(drafter, inputs)
    assert_array_equal(np.flatnonzero(np.isfinite(draft.logits[0])), ids)
    full = {k: v for k, v in drafter.weights.items() if k not in ("d2t", "t2d")}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        wide = np.zeros((VOCABULARY, full[name].shape[1]))
        wide[ids] = full[name]
        full[name] = wide
    same = TinyDrafter(drafter.config, full)
    chosen = [int(token) for token in draft.tokens]
    wide_draft = spark(same, inputs, chosen=chosen)
    assert_allclose(draft.logits[:, ids], wide_draft.logits[:, ids])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_against_their_equations(kind: str, inputs: TinyInputs) -> None:
    drafter = tiny_dspark("deepspec", markov=kind)
    chosen = [3, 200, 17, 9]
    draft = spark(drafter, inputs, chosen=chosen)
    bare = spark(tiny_dspark("deepspec", markov=None, confidence=False), inputs)
    weights = {k: v.astype(np.float64) for k, v in drafter.weights.items()}
    base = draft.states @ weights["lm_head.weight"].T
    assert_allclose(bare.states, draft.states, atol=1e-9)
    one, two = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    s = np.zeros(RANK)
    for k, prev in enumerate([inputs.tokens[-1], *chosen[:-1]]):
        e, g = one[prev], draft.states[k]
        if kind == "gated":
            w, b = (weights[f"markov_head.gate_proj.{p}"] for p in ("weight", "bias"))
            e = e / (1 + np.exp(-(w[:, :HIDDEN] @ g + w[:, HIDDEN:] @ e + b)))
        if kind == "rnn":
            w, b = (weights[f"markov_head.joint_proj.{p}"] for p in ("weight", "bias"))
            o = w[:, :RANK] @ s + w[:, RANK : 2 * RANK] @ e + w[:, 2 * RANK :] @ g + b
            gate = 1 / (1 + np.exp(-o[:RANK]))
            s = gate * s + (1 - gate) * np.tanh(o[RANK : 2 * RANK])
            e = np.tanh(o[2 * RANK :])
        assert_allclose(draft.logits[k] - base[k], two @ e, atol=1e-9)


def test_confidence_reads_what_was_drafted_before_only(inputs: TinyInputs) -> None:
    drafter = tiny_dspark("deepspec")
    one = spark(drafter, inputs, chosen=[1, 2, 3, 4]).confidence
    two = spark(drafter, inputs, chosen=[1, 2, 9, 4]).confidence
    assert one is not None
    assert two is not None
    assert_array_equal(one == two, [True, True, True, False])
    narrow = tiny_dspark("deepspec", with_markov=False)
    assert narrow.weights["confidence_head.proj.weight"].shape == (1, HIDDEN)
    free = spark(narrow, inputs, chosen=[1, 2, 9, 4]).confidence
    assert_array_equal(free, spark(narrow, inputs).confidence)
    cooled = changed(drafter, confidence_temperatures=[1.0, 2.0, 2.0, 2.0])
    warm = spark(cooled, inputs, chosen=[1, 2, 3, 4]).confidence
    assert warm is not None
    odds, warm_odds = np.log(one / (1 - one)), np.log(warm / (1 - warm))
    assert_allclose(warm_odds, odds / [1, 2, 2, 2])


def test_gemma_caps_the_head_and_not_the_bias(inputs: TinyInputs) -> None:
    drafter = tiny_dspark("gemma4")
    weights = {**drafter.weights}
    weights["lm_head.weight"] = weights["lm_head.weight"] * 100
    w2 = "markov_head.markov_w2.weight"
    quiet = TinyDrafter(drafter.config, {**weights, w2: weights[w2] * 0})
    loud = TinyDrafter(drafter.config, {**weights, w2: weights[w2] * 100})
    assert 29 < np.abs(spark(quiet, inputs).logits).max() <= 30
    assert np.abs(spark(loud, inputs).logits).max() > 60


def test_interleaved_rotation_is_the_other_order_of_channels(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("lfm2")
    order = np.concatenate([np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)])
    weights = dict(drafter.weights)
    for i in range(LAYERS):
        for side in "qk":
            name = f"layers.{i}.self_attn.{side}_proj.weight"
            heads = weights[name].reshape(-1, HEAD_DIM, HIDDEN)
            weights[name] = heads[:, order].reshape(weights[name].shape)
            name = f"layers.{i}.self_attn.{side}_norm.weight"
            weights[name] = weights[name][order]
    halves = TinyDrafter({**drafter.config, "rope_is_neox_style": True}, weights)
    assert_allclose(spark(halves, inputs).logits, spark(drafter, inputs).logits)


def test_sinks_take_a_share_of_the_attention(inputs: TinyInputs) -> None:
    drafter = tiny_dspark("nemotron")
    weights = dict(drafter.weights)
    without = {k: v for k, v in weights.items() if "sink" not in k}
    deep = {k: v * 0 - 60 if "sink" in k else v for k, v in weights.items()}
    none = spark(TinyDrafter(drafter.config, without), inputs)
    assert_allclose(
        spark(TinyDrafter(drafter.config, deep), inputs).logits, none.logits
    )
    assert all(moves(none, spark(drafter, inputs)))


def test_gemma_scales_its_embedding_by_the_root_of_its_width(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("gemma4")
    told = spark(drafter, inputs, embedding_scale=HIDDEN**0.5)
    assert_allclose(spark(drafter, inputs).logits, told.logits)
    assert all(moves(told, spark(drafter, inputs, embedding_scale=1.0)))


def test_log_snr_adds_one_vector_to_the_anchor_and_one_to_masks(
    inputs: TinyInputs,
) -> None:
    """The anchor has t = 1000 and masks have t = 0: sin 0 and cos 1."""
    drafter = tiny_dspark("gguf")
    one, two = (
        drafter.weights[f"dspark.log_snr_fc{i}.weight"].astype(np.float64)
        for i in (1, 2)
    )
    angles = 1000.0 / 10000.0 ** (np.arange(64) / 64)
    features = np.array(
        [
            [*np.sin(angles), *np.cos(angles)],
            [*np.zeros(64), *np.ones(64)],
        ]
    )
    inner = features @ one.T
    added = (inner / (1 + np.exp(-inner))) @ two.T
    table = drafter.weights["token_embd.weight"].astype(np.float64)
    anchor = inputs.tokens[-1]
    table[anchor] += added[0]
    table[MASK] += added[1]
    baked = TinyDrafter(
        {**drafter.config, "dspark.dspark.log_snr_conditioning": False},
        {**drafter.weights, "token_embd.weight": table},
    )
    assert_allclose(spark(baked, inputs).states, spark(drafter, inputs).states)


def test_a_mask_without_an_embedding_is_refused(inputs: TinyInputs) -> None:
    with pytest.raises(ValueError, match="mask_token_id 256 outside 256"):
        spark(changed(tiny_dspark("deepspec"), mask_token_id=VOCABULARY), inputs)


def test_the_context_reaches_a_block_only_through_attention(
    inputs: TinyInputs,
) -> None:
    drafter = tiny_dspark("deepspec")
    weights = canonical_weights(drafter.weights, drafter.config)
    for i in range(LAYERS):
        weights[f"layers.{i}.self_attn.o_proj.weight"] *= 0
    mute = TinyDrafter(drafter.config, weights)
    assert not any(moves(spark(mute, inputs), spark(mute, with_state(inputs, 3))))
