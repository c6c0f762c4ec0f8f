"""New heads: the target's sizes and output, and random matrices."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.rotation import read_rotation

SPREAD = 0.02  # of matrices that begin at random


def layer_sizes(config: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return the sizes of a head's layers for config.json: those of the target's."""

    def number(key: str, default: int) -> int:
        value = config.get(key)
        return value if isinstance(value, int) and value > 0 else default

    heads = number("num_attention_heads", max(1, dim // 64))
    return {
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": number("intermediate_size", 3 * dim),
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": number("head_dim", dim // heads),
        "rms_norm_eps": 1e-5,
        "rope_theta": read_rotation(config, "target").theta,
        "max_position_embeddings": number("max_position_embeddings", 4096),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }


def begin_head(head: Any, taps: HiddenStates, ids: mx.array | None, seed: int) -> None:
    """Take the target's way from states to logits, and random matrices.

    Args:
        head: a module with a last norm, and an output layer if it has ids.
        taps: on the target.
        ids: the target's ids of its output layer.
        seed: of the matrices.
    """
    key = mx.random.key(seed)

    def drawn(value: mx.array) -> mx.array:
        nonlocal key
        if value.ndim < 2:
            return mx.ones_like(value)
        key, part = mx.random.split(key)
        return SPREAD * mx.random.normal(value.shape, key=part)

    head.update(tree_map(drawn, head.parameters()))
    rows = None if ids is None else output_rows(taps, ids)
    if rows is not None:
        head.lm_head.weight = rows
    norm = taps.parts.norm
    weight = None if norm is None else norm.get("weight")
    if weight is not None and weight.shape == head.norm.weight.shape:
        head.norm.weight = applied_weight(norm, weight)
    mx.eval(head.parameters())


def output_rows(taps: HiddenStates, ids: mx.array) -> mx.array | None:
    """Return the target's output matrix for ids in float32, if it shows one."""
    layer: Any = taps.parts.output
    if layer is None or "weight" not in layer:
        return None
    if "scales" in layer:
        form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        biases = layer.get("biases")
        rows = mx.dequantize(
            layer.weight[ids],
            layer.scales[ids],
            None if biases is None else biases[ids],
            **form,
        )
    else:
        rows = layer.weight[ids]
    return rows.astype(mx.float32)


def applied_weight(norm: Any, weight: mx.array) -> mx.array:
    """Return what a norm multiplies by: some store it less one."""
    probe = mx.ones((1, 1, weight.shape[0]), mx.float32)
    scaled: mx.array = norm(probe.astype(weight.dtype))[0, 0]
    return scaled.astype(mx.float32)
