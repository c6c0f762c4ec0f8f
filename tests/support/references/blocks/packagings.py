"""Converts published files to one form: names, GGUF, NVFP4, tapped layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.references.blocks.body import is_speculators, option
from support.references.blocks.primitives import Array, Config, Weights

GGUF_LAYERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_MODEL = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "dspark.fc": "fc",
    "dspark.hidden_norm": "hidden_norm",
    "dspark.markov_head_a": "markov_head.markov_w1",
    "dspark.markov_head_b": "markov_head.markov_w2",
    "dspark.confidence_head": "confidence_head.proj",
    "dspark.log_snr_fc1": "log_snr_fc1",
    "dspark.log_snr_fc2": "log_snr_fc2",
}
# Key of config.json -> key of a GGUF file.
_GGUF_KEYS = {
    "hidden_size": "dspark.embedding_length",
    "num_attention_heads": "dspark.attention.head_count",
    "num_key_value_heads": "dspark.attention.head_count_kv",
    "head_dim": "dspark.attention.key_length",
    "rms_norm_eps": "dspark.attention.layer_norm_rms_epsilon",
    "rope_theta": "dspark.rope.freq_base",
    "block_size": "dspark.dspark.block_size",
    "mask_token_id": "dspark.dspark.mask_token_id",
    "target_layer_ids": "dspark.dspark.target_layers",
    "markov_rank": "dspark.dspark.markov_rank",
    "log_snr_conditioning": "dspark.dspark.log_snr_conditioning",
    "min_log_snr": "dspark.dspark.min_log_snr",
    "max_log_snr": "dspark.dspark.max_log_snr",
}
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([_E2M1, -_E2M1])


def _e4m3() -> Array:
    """Values of the 256 bytes of float8 e4m3 (bias 7, no infinities)."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    small = mantissa / 8 * 2.0**-6
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    values = np.where(exponent == 0, small, normal) * np.where(bits < 128, 1, -1)
    values[[127, 255]] = np.nan
    return np.asarray(values)


E4M3 = _e4m3()


def is_gguf(config: Config) -> bool:
    return config.get("general.architecture") == "dspark"


def canonical_config(config: Config) -> Config:
    """A GGUF file's metadata under the keys of config.json; other configs unchanged."""
    if not is_gguf(config):
        return config
    return {key: config[name] for key, name in _GGUF_KEYS.items() if name in config}


def canonical_weights(weights: Weights, config: Config) -> dict[str, Array]:
    """Tensors in float64 under the names of the DeepSpec layout.

    Strips `model.`, renames `midlayer.` to `layers.0.`, reads GGUF names, and unpacks
    NVFP4. Integer and boolean tensors keep their types.
    """
    renamed = {
        _gguf_name(name) if is_gguf(config) else _plain_name(name): tensor
        for name, tensor in weights.items()
    }
    tensors: dict[str, Array] = {}
    for name, tensor in renamed.items():
        if name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        if f"{name}_scale" in renamed and tensor.dtype == np.uint8:
            scales = renamed[f"{name}_scale"], renamed[f"{name}_scale_2"]
            tensors[name] = unpack_nvfp4(tensor, *scales)
        else:
            keeps = tensor.dtype.kind in "biu"
            tensors[name] = tensor if keeps else tensor.astype(np.float64)
    return tensors


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, "weight"
    if stem.startswith("blk."):
        _, number, inner = stem.split(".", 2)
        return f"layers.{number}.{GGUF_LAYERS[inner]}.{kind}"
    return f"{GGUF_MODEL[stem]}.{kind}"


def unpack_nvfp4(packed: Array, scale: Array, scale_2: Array) -> Array:
    """Weights [out, in] of NVFP4 as modelopt writes it: pairs of E2M1, and two scales.

    `packed` is [out, in/2] uint8, the low nibble first. `scale` has one value per 16
    inputs, [out, in/16], bytes of float8 e4m3 or floats. `scale_2` is one number.
    """
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    values: Array = E2M1[nibbles.reshape(len(packed), -1)]
    scales = E4M3[scale] if scale.dtype == np.uint8 else scale
    shared = np.repeat(scales, 16, axis=1) * float(np.squeeze(scale_2))
    return np.asarray(values * shared)


def block_taps(config: Mapping[str, Any], target_layers: int = 0) -> list[int]:
    """Tapped layers of a block drafter, in the order that `fc` reads them.

    Returns indices of layers whose output is read; -1 is the output of the embedding.
    Ids of speculators count the embedding, so id i is the output of layer i - 1 (vLLM).
    Without a list DFlash reads three layers: 1, the third from the end, and the one
    halfway between.
    """
    if is_gguf(config):
        return [int(i) for i in config["dspark.dspark.target_layers"]]
    if is_speculators(config):
        return [int(i) - 1 for i in option(config, "aux_hidden_state_layer_ids")]
    ids = option(config, "target_layer_ids")
    if ids is None:
        return [round(1 + i * (target_layers - 4) / 2) for i in range(3)]
    return [int(i) for i in ids]


def eagle_taps(config: Mapping[str, Any], target_layers: int) -> list[int]:
    """Tapped layers of an EAGLE-3 or P-EAGLE head, as `block_taps` returns them.

    `target_layer_ids` (DeepSpec) are layer ids. `eagle_aux_hidden_state_layer_ids` has
    layer ids if it stands in `eagle_config`. If it stands at the top level, it has
    tuple ids: indices of transformers' hidden states, in which 0 is the embedding. If
    `use_aux_hidden_state` is false, only the last layer is tapped. Without a list, the
    tuple ids are 2, N // 2 and N - 3, where N is `target_layers`.
    """
    inside = config.get("eagle_config") or {}
    if inside.get("use_aux_hidden_state") is False:
        return [target_layers - 1]
    if config.get("target_layer_ids") is not None:
        return [int(i) for i in config["target_layer_ids"]]
    name = "eagle_aux_hidden_state_layer_ids"
    if config.get(name) is not None:
        return [int(i) - 1 for i in config[name]]
    if inside.get(name) is not None:
        return [int(i) for i in inside[name]]
    return [1, target_layers // 2 - 1, target_layers - 4]
