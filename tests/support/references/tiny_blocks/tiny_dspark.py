"""Tiny random DSpark checkpoints, in every packaging that is described."""

from collections.abc import Callable
from typing import Any

from support.references.blocks.packagings import GGUF_LAYERS, GGUF_MODEL
from support.references.tiny_blocks.tiny_tensors import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MASK,
    SIZES,
    TARGET_LAYERS,
    VOCABULARY,
    Tensors,
    TinyDrafter,
)

TAPS = [1, 4, 6]
RANK, BLOCK, WINDOW = 8, 4, 8
Config = dict[str, Any]


def tiny_dspark(
    packaging: str,
    *,
    seed: int = 0,
    markov: str | None = "vanilla",
    confidence: bool = True,
    with_markov: bool = True,
    draft_vocabulary: int | None = None,
) -> TinyDrafter:
    """A DSpark drafter: 2 layers, block 4, taps [1, 4, 6] of a target of 8 layers.

    Args:
        packaging: A key of `DSPARK`.
        seed: Of all tensors.
        markov: vanilla, gated, rnn, or None (rank 0).
        confidence: With a confidence head.
        with_markov: The confidence head reads W1 of the id before.
        draft_vocabulary: Vd for speculators files, where it may be reduced.
    """
    if draft_vocabulary is not None and packaging != "speculators":
        raise ValueError("only speculators files have a reduced vocabulary")
    return DSPARK[packaging](seed, markov, confidence, with_markov, draft_vocabulary)


def _heads(
    tensors: Tensors,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    size: int = VOCABULARY,
) -> Config:
    """Markov and confidence heads, and the keys that describe them."""
    if markov is not None:
        tensors.normal("markov_head.markov_w1.weight", VOCABULARY, RANK)
        tensors.linear("markov_head.markov_w2", size, RANK)
    if markov == "gated":
        tensors.linear("markov_head.gate_proj", RANK, HIDDEN + RANK, bias=True)
    if markov == "rnn":
        tensors.linear("markov_head.joint_proj", 3 * RANK, 2 * RANK + HIDDEN, bias=True)
    reads_markov = with_markov and markov is not None
    if confidence:
        width = HIDDEN + (RANK if reads_markov else 0)
        tensors.linear("confidence_head.proj", 1, width, bias=True)
    return {
        "markov_rank": 0 if markov is None else RANK,
        "markov_head_type": markov or "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": reads_markov,
    }


def trunk(tensors: Tensors, *, tables: bool, centre: float = 1.0, **layer: Any) -> None:
    """fc, norms and layers; with `tables` an embedding and a head of its own."""
    tensors.linear("fc", HIDDEN, len(TAPS) * HIDDEN)
    tensors.norm("hidden_norm", HIDDEN, centre=centre)
    tensors.norm("norm", HIDDEN, centre=centre)
    for i in range(LAYERS):
        tensors.layer(f"layers.{i}", centre=centre, **layer)
    if tables:
        tensors.normal("embed_tokens.weight", VOCABULARY, HIDDEN)
        tensors.linear("lm_head", VOCABULARY, HIDDEN)


def _flat(architecture: str, kind: str, **more: Any) -> Config:
    return {
        **SIZES,
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "block_size": BLOCK,
        "tie_word_embeddings": False,
        **more,
    }


def _deepspec(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """1, flat. Rotary keys of the target that do not concern the drafter are there."""
    tensors = Tensors(seed)
    trunk(tensors, tables=True)
    heads = _heads(tensors, markov, confidence, with_markov)
    noise = {"partial_rotary_factor": 0.25}
    taps = {"target_layer_ids": TAPS, "mask_token_id": MASK, "num_anchors": 512}
    config = _flat("Qwen3DSparkModel", "qwen3", **taps, **heads, **noise)
    return TinyDrafter(config, tensors.found)


def _gemma4(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """1 with Gemma 4's layers: keys are values, heads of 32, one key head."""
    tensors = Tensors(seed)
    trunk(tensors, tables=True, head_dim=32, kv_heads=1, values=False)
    for i in range(LAYERS):
        tensors.sandwich(f"layers.{i}")
    full = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    config = _flat(
        "Gemma4DSparkModel",
        "gemma4_text",
        target_layer_ids=TAPS,
        mask_token_id=4,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=None,
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        **_heads(tensors, markov, confidence, with_markov),
    )
    return TinyDrafter(config, tensors.found)


def _speculators(
    seed: int, markov: str | None, confidence: bool, with_markov: bool, size: int | None
) -> TinyDrafter:
    """2: sizes nested, tuple ids, layer 1 slides; a head only with fewer ids."""
    tensors = Tensors(seed)
    trunk(tensors, tables=False)
    if size is not None:
        tensors.linear("lm_head", size, HIDDEN)
        tensors.reduced(size)
    heads = _heads(tensors, markov, confidence, with_markov, size or VOCABULARY)
    config: Config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {
            **SIZES,
            "model_type": "qwen3",
            "num_hidden_layers": LAYERS,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": WINDOW,
        },
        "draft_vocab_size": size or VOCABULARY,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        **heads,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": BLOCK}
            ],
            "verifier": {"name_or_path": "target", "architectures": []},
        },
    }
    return TinyDrafter(config, tensors.found)


def _gguf(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """3: metadata and tensors of a GGUF file, with log_snr conditioning."""
    if markov not in (None, "vanilla"):
        raise ValueError("a GGUF file has the vanilla head only")
    tensors = Tensors(seed)
    trunk(tensors, tables=True)
    tensors.linear("log_snr_fc1", HIDDEN, 128)
    tensors.linear("log_snr_fc2", HIDDEN, HIDDEN)
    heads = _heads(tensors, markov, confidence, with_markov)
    config: Config = {
        "general.architecture": "dspark",
        "dspark.block_count": LAYERS,
        "dspark.embedding_length": HIDDEN,
        "dspark.feed_forward_length": SIZES["intermediate_size"],
        "dspark.attention.head_count": HEADS,
        "dspark.attention.head_count_kv": KV_HEADS,
        "dspark.attention.key_length": SIZES["head_dim"],
        "dspark.attention.layer_norm_rms_epsilon": 1e-6,
        "dspark.rope.freq_base": 10000.0,
        "dspark.dspark.block_size": BLOCK,
        "dspark.dspark.mask_token_id": MASK,
        "dspark.dspark.target_layers": TAPS,
        "dspark.dspark.markov_rank": heads["markov_rank"],
        "dspark.dspark.confidence_head": confidence,
        "dspark.dspark.confidence_head_with_markov": heads[
            "confidence_head_with_markov"
        ],
        "dspark.dspark.log_snr_conditioning": True,
        "dspark.dspark.min_log_snr": -4.0,
        "dspark.dspark.max_log_snr": 4.0,
    }
    names = {ours: theirs for theirs, ours in GGUF_MODEL.items()}
    layer_names = {ours: theirs for theirs, ours in GGUF_LAYERS.items()}
    found = {}
    for name, tensor in tensors.found.items():
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("layers."):
            _, number, inner = stem.split(".", 2)
            published = f"blk.{number}.{layer_names[inner]}"
        else:
            published = names[stem]
        found[f"{published}.{kind}"] = tensor
    return TinyDrafter(config, found)


def _specforge(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """4: options in dflash_config, YaRN that is meant, tables of the target."""
    tensors = Tensors(seed)
    trunk(tensors, tables=False)
    options = {
        "projector_type": "dspark",
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        **_heads(tensors, markov, confidence, with_markov),
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }
    config = _flat("DSparkDraftModel", "qwen3", dflash_config=options)
    return TinyDrafter({**config, "rope_parameters": yarn}, tensors.found)


def _lfm2(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """5: no projector_type, interleaved rotation, tables of the target."""
    tensors = Tensors(seed)
    trunk(tensors, tables=False)
    options = {
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        **_heads(tensors, markov, confidence, with_markov),
    }
    config = _flat(
        "Lfm2DSparkDraftModel",
        "lfm2",
        dflash_config=options,
        rope_is_neox_style=False,
    )
    return TinyDrafter(config, tensors.found)


def _nemotron(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """6: causal, sliding, sinks, the anchor given, NVFP4, an embedding but no head."""
    tensors = Tensors(seed)
    trunk(tensors, tables=False)
    tensors.normal("embed_tokens.weight", VOCABULARY, HIDDEN)
    packed = ["fc"]
    for i in range(LAYERS):
        tensors.normal(f"layers.{i}.self_attn.attention_sink_bias", HEADS)
        packed += [f"layers.{i}.self_attn.{side}_proj" for side in "qkvo"]
        packed += [f"layers.{i}.mlp.{part}_proj" for part in ("gate", "up", "down")]
    heads = _heads(tensors, markov, confidence, with_markov)
    tensors.pack_nvfp4(packed)
    config = _flat(
        "Qwen3DSparkModel",
        "qwen3",
        target_layer_ids=TAPS,
        eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
        mask_token_id=MASK,
        sample_from_anchor=False,
        dflash_query_causal=True,
        attention_sink_bias=True,
        has_embed_tokens=True,
        has_lm_head=False,
        dflash_config={"use_swa": True, "swa_window_size": WINDOW},
        **heads,
    )
    return TinyDrafter(config, tensors.found)


def _qwen3_5(
    seed: int,
    markov: str | None,
    confidence: bool,
    with_markov: bool,
    _size: int | None,
) -> TinyDrafter:
    """4 with qwen3_5 layers: norms minus 1, partial rotation, gated queries."""
    tensors = Tensors(seed)
    trunk(tensors, tables=False, centre=0.0, gated=True)
    options = {
        "projector_type": "dspark",
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        **_heads(tensors, markov, confidence, with_markov),
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    }
    config = _flat(
        "DSparkDraftModel",
        "qwen3_5",
        dflash_config=options,
        rope_parameters=rope,
        enable_qwen35_gated_q_proj=True,
    )
    return TinyDrafter(config, tensors.found)


_Maker = Callable[[int, str | None, bool, bool, int | None], TinyDrafter]
DSPARK: dict[str, _Maker] = {
    "deepspec": _deepspec,
    "gemma4": _gemma4,
    "speculators": _speculators,
    "gguf": _gguf,
    "specforge": _specforge,
    "lfm2": _lfm2,
    "nemotron": _nemotron,
    "qwen3_5": _qwen3_5,
}
