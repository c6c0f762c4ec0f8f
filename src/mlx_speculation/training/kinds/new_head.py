"""Sizes and initial weights of new heads, taken from the target or random."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.rotation import read_rotation

SPREAD = 0.02  # standard deviation of random matrices


def layer_sizes(config: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return a head's config.json entries for layers of the target's sizes."""

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
    """Copy the target's last norm and output rows into a head; draw other matrices.

    Args:
        head: a module with a last norm, and with an output layer if `ids` is given.
        taps: hidden states of the target, which give access to its parts.
        ids: the target's id of each row of the output layer; None: it has none.
        seed: the seed of the random matrices.
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
    """Return the target's output rows of ids in float32; None: no matrix was found."""
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
    """Return the factors of a norm; some norms store them reduced by one."""
    probe = mx.ones((1, 1, weight.shape[0]), mx.float32)
    scaled: mx.array = norm(probe.astype(weight.dtype))[0, 0]
    return scaled.astype(mx.float32)
