"""Tiny random DFlash2 and DSpark drafters, laid out on disk as real ones are.

One entry for each packaging that is published, and one for each part that some of them
have. The names of tensors and keys stand here a second time.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models.dflash_checkpoints import (
    DIM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLP,
    VOCAB,
    config_of,
    tensors_of,
)

BLOCK, RANK, TOP, GROUP = 4, 8, 6, 16
MASK = VOCAB - 1
DRAFT_IDS = list(range(1, VOCAB, 3))
Tensors = dict[str, mx.array]
Config = dict[str, Any]
_SIZES = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_theta",
)


@dataclass(frozen=True, slots=True)
class Packaging:
    """Layout of an origin's files.

    Attributes:
        kind: "dflash", "dflash2" or "dspark".
        config: makes config.json, or the keys of a GGUF file, of the tapped layers.
        parts: what there is beside the backbone, see `parts_of`.
        depth: the most drafts.
        write: writes tensors in another way than safetensors.
        names: beginnings of tensors' names that are others here.
    """

    kind: str
    config: Callable[[tuple[int, ...]], Config]
    parts: tuple[str, ...] = ()
    depth: int = BLOCK
    write: str = "safetensors"
    names: dict[str, str] = field(default_factory=dict)


def sizes() -> Config:
    """Return the sizes of the layers, as a config.json has them."""
    return {key: config_of("full", ())[key] for key in _SIZES}


def _dflash(own: Config, **more: Any) -> Callable[[tuple[int, ...]], Config]:
    def config(layers: tuple[int, ...]) -> Config:
        inner = {"mask_token_id": MASK, "target_layer_ids": list(layers), **own}
        return {
            "architectures": ["DFlashDraftModel"],
            **sizes(),
            "vocab_size": VOCAB,
            "block_size": BLOCK,
            "dflash_config": inner,
            **more,
        }

    return config


def _dflash2(**more: Any) -> Callable[[tuple[int, ...]], Config]:
    selector = {
        "block_size": BLOCK,
        "conv_kernel_size": 2,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP,
    }
    top = {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 12,
    }
    return _dflash(selector | more.pop("dflash_config", {}), **top | more)


def _deepspec(**more: Any) -> Callable[[tuple[int, ...]], Config]:
    def config(layers: tuple[int, ...]) -> Config:
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            **sizes(),
            # Of the target, and not of these layers.
            "partial_rotary_factor": 0.25,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            "layer_types": ["full_attention"] * 2,
            "vocab_size": VOCAB,
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "target_layer_ids": list(layers),
            "num_anchors": 16,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            **more,
        }

    return config


def _gemma(layers: tuple[int, ...]) -> Config:
    return _deepspec(
        architectures=["Gemma4DSparkModel"],
        model_type="gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        global_head_dim=2 * HEAD_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            }
        },
    )(layers)


def _speculators(drafts: int | None, kind: str = "dspark", **more: Any) -> Any:
    def config(layers: tuple[int, ...]) -> Config:
        proposal = {} if drafts is None else {"speculative_tokens": drafts}
        return {
            "speculators_model_type": kind,
            "architectures": ["DSparkSpeculator"],
            "transformer_layer_config": {
                "model_type": "qwen3",
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 12,
                **sizes(),
            },
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "speculators_config": {"algorithm": kind, "proposal_methods": [proposal]},
            **more,
        }

    return config


def _gguf(layers: tuple[int, ...]) -> Config:
    own = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layers": list(layers),
        "markov_rank": RANK,
        "confidence_head": True,
        "confidence_head_with_markov": True,
        "log_snr_conditioning": True,
        "min_log_snr": -5.0,
        "max_log_snr": 10.0,
    }
    arch = {
        "block_count": 2,
        "embedding_length": DIM,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "context_length": 2048,
    }
    return {
        "general.architecture": "dspark",
        **{f"dspark.{key}": value for key, value in arch.items()},
        **{f"dspark.dspark.{key}": value for key, value in own.items()},
    }


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
}
_MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
_GGUF_NAMES = {
    "fc.": "dspark.fc.",
    "hidden_norm.": "dspark.hidden_norm.",
    "markov_head.markov_w1.": "dspark.markov_head_a.",
    "markov_head.markov_w2.": "dspark.markov_head_b.",
    "confidence_head.proj.": "dspark.confidence_head.",
    "log_snr_fc": "dspark.log_snr_fc",
    "norm.": "output_norm.",
    **{
        f"layers.{i}.{ours}": f"blk.{i}.{theirs}"
        for i in range(2)
        for ours, theirs in {
            "input_layernorm.": "attn_norm.",
            "post_attention_layernorm.": "ffn_norm.",
            "self_attn.q_proj.": "attn_q.",
            "self_attn.k_proj.": "attn_k.",
            "self_attn.v_proj.": "attn_v.",
            "self_attn.o_proj.": "attn_output.",
            "self_attn.q_norm.": "attn_q_norm.",
            "self_attn.k_norm.": "attn_k_norm.",
            "mlp.gate_proj.": "ffn_gate.",
            "mlp.up_proj.": "ffn_up.",
            "mlp.down_proj.": "ffn_down.",
        }.items()
    },
}
_SELECTOR = ("convolutions", "selector")
_SPARK = ("markov", "confidence")
PACKAGINGS: dict[str, Packaging] = {
    "dflash2": Packaging("dflash2", _dflash2(), _SELECTOR, BLOCK - 1),
    "dflash2, causal": Packaging(
        "dflash2", _dflash2(is_causal=True), _SELECTOR, BLOCK - 1
    ),
    "dflash2, scaled": Packaging(
        "dflash2",
        _dflash2(
            dflash_config={
                "input_embedding_scale": 2.0,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 20.0,
            }
        ),
        _SELECTOR,
        BLOCK - 1,
    ),
    "dflash2, speculators": Packaging(
        "dflash2",
        _speculators(
            BLOCK - 1,
            "dflash2",
            architectures=["DFlash2Speculator"],
            conv_kernel_size=2,
            conv_group_size=GROUP,
            selector_rank=RANK,
            selector_top_k=TOP,
        ),
        _SELECTOR,
        BLOCK - 1,
    ),
    "deepspec": Packaging("dspark", _deepspec(), ("own ends", *_SPARK)),
    "deepspec, gated": Packaging(
        "dspark",
        _deepspec(markov_head_type="gated"),
        ("own ends", "markov gated", "confidence of states"),
    ),
    "deepspec, rnn": Packaging(
        "dspark", _deepspec(markov_head_type="rnn"), ("own ends", "markov rnn")
    ),
    "deepspec, dflash": Packaging("dspark", _deepspec(markov_rank=0), ("own ends",)),
    "deepspec, gemma": Packaging("dspark", _gemma, ("gemma", "own ends", *_SPARK)),
    "speculators": Packaging(
        "dspark", _speculators(BLOCK, draft_vocab_size=85), ("reduced", *_SPARK)
    ),
    "speculators, given": Packaging(
        "dspark", _speculators(BLOCK - 1), _SPARK, BLOCK - 1
    ),
    "speculators, said": Packaging(
        "dspark", _speculators(3, sample_from_anchor=True), _SPARK
    ),
    "specforge": Packaging(
        "dspark",
        _dflash(
            {"projector_type": "dspark", **_MARKOV},
            architectures=["DSparkDraftModel"],
            rope_parameters=_YARN,
            max_position_embeddings=2048,
        ),
        _SPARK,
    ),
    "lfm2": Packaging(
        "dspark",
        _dflash(
            _MARKOV, architectures=["Lfm2DSparkDraftModel"], rope_is_neox_style=False
        ),
        ("markov",),
    ),
    "nvidia": Packaging(
        "dspark",
        lambda layers: _deepspec(
            sample_from_anchor=False,
            dflash_query_causal=True,
            dflash_config={"use_swa": True, "swa_window_size": 12},
            layer_types=None,
            eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in layers],
            has_embed_tokens=True,
            has_lm_head=False,
        )(layers),
        ("embedding", "markov", "sinks"),
        BLOCK - 1,
        write="nvfp4",
    ),
    "prism": Packaging(
        "dspark", _gguf, (*_SPARK, "levels"), write="gguf", names=_GGUF_NAMES
    ),
    "qwen3.5": Packaging(
        "dspark",
        _deepspec(
            model_type="qwen3_5",
            partial_rotary_factor=0.5,
            rope_scaling=None,
            enable_qwen35_gated_q_proj=True,
        ),
        ("gated", *_SPARK),
    ),
    "mimo": Packaging(
        "dflash",
        _dflash({"attention_value_scale": 0.7, "use_swa": True, "swa_window_size": 12}),
        ("sinks",),
        BLOCK - 1,
    ),
    "muse": Packaging(
        "dflash",
        _dflash(
            {"is_causal": False},
            architectures=["MuseGlimmerAssistantModel"],
            layer_types=["sliding_attention"] * 2,
            sliding_window=12,
        ),
        (),
        BLOCK - 1,
        names={"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
    ),
}


class Draws:
    """Random tensors."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def matrix(self, *shape: int, scale: float = 1.0) -> mx.array:
        """Return numbers whose products with others of size one are of that scale."""
        values = self._rng.standard_normal(shape) * (scale / shape[-1] ** 0.5)
        return mx.array(values.astype(np.float32))

    def vector(self, size: int, mean: float = 1.0) -> mx.array:
        """Return numbers around a mean."""
        values = mean + 0.3 * self._rng.standard_normal(size)
        return mx.array(values.astype(np.float32))


def parts_of(packaging: Packaging, features: int) -> Tensors:
    """Return all tensors, under the names of DeepSpec and DFlash."""
    found, draws = tensors_of("full", features), Draws()
    parts = packaging.parts
    layers = [f"layers.{i}." for i in range(2)]
    columns = len(DRAFT_IDS) if "reduced" in parts else VOCAB
    if "own ends" in parts or "embedding" in parts:
        found["embed_tokens.weight"] = draws.matrix(VOCAB, DIM, scale=8.0)
    if "own ends" in parts or "reduced" in parts:
        found["lm_head.weight"] = draws.matrix(columns, DIM, scale=4.0)
    if "reduced" in parts:
        ids = np.array(DRAFT_IDS)
        found["d2t"] = mx.array(ids - np.arange(ids.size))
        found["t2d"] = mx.array(np.isin(np.arange(VOCAB), ids))
    for part in parts:
        if part.startswith("markov"):
            found |= _markov(draws, part.removeprefix("markov").strip(), columns)
    if "confidence" in parts or "confidence of states" in parts:
        wide = DIM + RANK if "confidence" in parts else DIM
        found["confidence_head.proj.weight"] = draws.matrix(1, wide, scale=3.0)
        found["confidence_head.proj.bias"] = draws.vector(1, 0.0)
    if "levels" in parts:
        for index, wide in enumerate((128, DIM), start=1):
            found[f"log_snr_fc{index}.weight"] = draws.matrix(DIM, wide)
            found[f"log_snr_fc{index}.bias"] = draws.vector(DIM, 0.0)
    for layer in layers:
        if "sinks" in parts:
            found[f"{layer}self_attn.attention_sink_bias"] = draws.vector(HEADS)
        if "gated" in parts:
            wide = 2 * HEADS * HEAD_DIM
            found[f"{layer}self_attn.q_proj.weight"] = draws.matrix(wide, DIM)
        if "convolutions" in parts:
            for name in ("attention_conv", "mlp_conv"):
                kernel = draws.matrix(2, 2, DIM, scale=4.0)
                found[f"{layer}{name}.base_kernel"] = kernel
                found[f"{layer}{name}.kernel_projection.weight"] = draws.matrix(
                    4 * (DIM // GROUP), DIM, scale=0.5
                )
        if "gemma" in parts:
            found |= _gemma_layer(draws, layer)
            del found[f"{layer}self_attn.v_proj.weight"]
    if "selector" in parts:
        for name in ("predecessor_codebook", "successor_codebook"):
            found[f"candidate_selector.{name}"] = draws.matrix(VOCAB, RANK, scale=3.0)
        projection = draws.matrix(RANK, DIM)
        found["candidate_selector.hidden_projection.weight"] = projection
    if "gated" in parts:  # stored without their one
        found = {n: v - 1 if "norm" in n else v for n, v in found.items()}
    return found


def _markov(draws: Draws, kind: str, columns: int) -> Tensors:
    head = "markov_head."
    found = {
        f"{head}markov_w1.weight": draws.matrix(VOCAB, RANK, scale=4.0),
        f"{head}markov_w2.weight": draws.matrix(columns, RANK, scale=4.0),
    }
    if kind == "gated":
        found[f"{head}gate_proj.weight"] = draws.matrix(RANK, DIM + RANK)
        found[f"{head}gate_proj.bias"] = draws.vector(RANK, 0.0)
    elif kind == "rnn":
        wide = (3 * RANK, 2 * RANK + DIM)
        found[f"{head}joint_proj.weight"] = draws.matrix(*wide, scale=2.0)
        found[f"{head}joint_proj.bias"] = draws.vector(3 * RANK, 0.0)
    return found


def _gemma_layer(draws: Draws, layer: str) -> Tensors:
    size, attention = 2 * HEAD_DIM, f"{layer}self_attn."
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        f"{attention}q_proj.weight": draws.matrix(HEADS * size, DIM),
        f"{attention}k_proj.weight": draws.matrix(size, DIM),
        f"{attention}o_proj.weight": draws.matrix(DIM, HEADS * size),
        f"{attention}q_norm.weight": draws.vector(size),
        f"{attention}k_norm.weight": draws.vector(size),
        **{f"{layer}{name}.weight": draws.vector(DIM) for name in norms},
        f"{layer}layer_scalar": draws.vector(1),
    }


def altered(
    name: str, *parts: str, own: Config | None = None, **keys: Any
) -> Packaging:
    """Return a packaging with other parts, and other keys in its config.json.

    Args:
        name: of the packaging.
        parts: see `parts_of`; none: its own.
        own: keys that go into `dflash_config` where there is one.
        keys: those at the top.
    """
    old = PACKAGINGS[name]

    def config(layers: tuple[int, ...]) -> Config:
        made = {**old.config(layers), **keys}
        if "dflash_config" in made:
            return {**made, "dflash_config": {**made["dflash_config"], **(own or {})}}
        return {**made, **(own or {})}

    return replace(old, config=config, parts=parts or old.parts)


def write_block(
    folder: Path,
    name: str | Packaging,
    layers: tuple[int, ...] = (0, 1, 3),
    **changed: mx.array,
) -> Path:
    """Write a drafter in a packaging, and return its folder.

    Args:
        folder: where.
        name: of the packaging, or one of its own.
        layers: of the target that it reads, from 0.
        changed: tensors that are others.
    """
    packaging = PACKAGINGS[name] if isinstance(name, str) else name
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = packaging.config(layers), parts_of(packaging, len(layers))
    tensors |= changed
    if packaging.write == "nvfp4":
        tensors = packed(tensors)
    tensors = {_named(each, packaging.names): v for each, v in tensors.items()}
    if packaging.write == "gguf":
        held: dict[str, Any] = {
            k: v if isinstance(v, str) else mx.array(v) for k, v in config.items()
        }
        mx.save_gguf(str(folder / "drafter.gguf"), tensors, held)
        return folder
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder


def _named(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def packed(tensors: Tensors) -> Tensors:
    """Return tensors with those of the layers' linear parts packed as NVFP4."""
    found: Tensors = {}
    for name, value in tensors.items():
        part = name.removesuffix(".weight")
        if not (part.startswith("layers.") and part.endswith("_proj")):
            found[name] = value
            continue
        whole = mx.abs(value).max() / 6
        scale = mx.to_fp8(mx.ones((value.shape[0], value.shape[1] // 16)))
        sizes = mx.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        near = mx.argmin(mx.abs(mx.abs(value / whole)[..., None] - sizes), axis=-1)
        codes = (near + mx.where(value < 0, 8, 0)).astype(mx.uint8)
        found[name] = codes[:, ::2] | (codes[:, 1::2] << 4)
        found[f"{part}.weight_scale"] = scale
        found[f"{part}.weight_scale_2"] = whole
    return found
