"""Models with random weights, in the shapes of published ones, and a head for each."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma3_text, llama, qwen3_5

from mlx_speculation.models import find_parts
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.eagle import EagleHead
from mlx_speculation.models.eagle.config import EagleSettings


def shape_of(name: str, size: str, layers: int | None, vocabulary: int) -> nn.Module:
    """Return a model with random weights: llama's, gemma3's or qwen3.5's layers."""
    small = size == "tiny"
    layers = layers or (4 if small else 16)
    full = min(layers, 4)  # every fourth layer attends to all, or the last
    common: dict[str, Any] = {
        "hidden_size": 64 if small else 2048,
        "intermediate_size": 128 if small else 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 if small else 32,
        "num_key_value_heads": 2 if small else 8,
        "head_dim": 16 if small else 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    if name == "llama":
        return llama.Model(llama.ModelArgs.from_dict({"model_type": name, **common}))
    if name == "sliding":
        window = {
            "sliding_window": 16 if small else 128,
            "sliding_window_pattern": full,
        }
        own = {"model_type": "gemma3_text", "query_pre_attn_scalar": 64, **window}
        args = gemma3_text.ModelArgs.from_dict({**common, **own})
        return gemma3_text.Model(args)
    heads = 2 if small else 16
    linear = {
        "linear_num_value_heads": 2 * heads,
        "linear_num_key_heads": heads,
        "linear_key_head_dim": 16 if small else 64,
        "linear_value_head_dim": 16 if small else 64,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": full,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    }
    text = {"model_type": "qwen3_5_text", **common, **linear}
    args = {"model_type": "qwen3_5", "text_config": text}
    return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))


def randomise(model: nn.Module) -> None:
    """Give matrices weights of a scale at which the text goes on changing."""
    pairs: Any = tree_flatten(model.parameters())
    made = []
    for number, (path, weight) in enumerate(pairs):
        if weight.ndim > 1 and mx.issubdtype(weight.dtype, mx.floating):
            inputs = weight.shape[-1] if weight.shape[-1] > 1 else weight.shape[-2]
            scale = 0.25 if "embed" in path else 2 / inputs**0.5
            noise = mx.random.normal(weight.shape, key=mx.random.key(number))
            made.append((path, noise * scale))
    model.update(tree_unflatten(made))


def random_head(model: nn.Module) -> EagleHead:
    """Return an EAGLE-3 head with random weights, whose ends are the target's."""
    dim = find_parts(model).dim
    heads = max(dim // 64, 1)
    layer = llama.ModelArgs(
        model_type="llama",
        hidden_size=dim,
        num_hidden_layers=1,
        intermediate_size=2 * dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-5,
        vocab_size=1,
    )
    settings = EagleSettings(layer, dim, None, False, False, False)
    head = EagleHead(settings, 3, OwnEnds())
    randomise(head)
    return head
