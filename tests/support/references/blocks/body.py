"""Shapes and rules of a drafter's layers, read from its config, flat or nested."""

from dataclasses import dataclass
from typing import Any

from support.references.blocks.primitives import Config, Weights
from support.references.blocks.rotary import Rope, rope_of


@dataclass(frozen=True, slots=True)
class Body:
    """Shapes and rules of the decoder layers."""

    layers: int  # number of layers, counted in the tensors
    heads: int  # number of query heads (nh)
    kv_heads: int  # number of key heads (nkv)
    head_dim: int  # channels of a head (hd)
    eps: float  # of every RMSNorm
    scale: float  # of attention scores: hd^-0.5, or 1 for Gemma 4
    rope: Rope  # of queries and keys
    windows: tuple[int | None, ...]  # by layer; None: full attention
    gemma: bool  # sandwich norms, a norm of the values, tanh-GELU, `layer_scalar`
    norm_offset: float  # added to norm weights (1 for qwen3_5)
    gated_query: bool  # q_proj gives [query | gate] per head
    value_scale: float  # of the values (`attention_value_scale`)


def inner_config(config: Config) -> Config:
    """The config that has the sizes of layers: a nested one, or `config` itself."""
    nested = config.get("transformer_layer_config") or config.get("text_config")
    return nested if nested else config


def option(config: Config, name: str, default: Any = None) -> Any:
    """A value from the top level, `dflash_config`, or the config of the layers."""
    places = (config, config.get("dflash_config") or {}, inner_config(config))
    for place in places:
        if place.get(name) is not None:
            return place[name]
    return default


def is_speculators(config: Config) -> bool:
    return config.get("speculators_model_type") is not None


def is_gemma(config: Config) -> bool:
    """Return whether the layers are Gemma 4's, by the architecture or their type.

    `target_model_type` is the type of the target, and is not read.
    """
    names = "".join(config.get("architectures") or ())
    kind = str(inner_config(config).get("model_type", ""))
    return names.startswith("Gemma4") or kind.startswith("gemma4")


def is_qwen3_5(config: Config) -> bool:
    return str(inner_config(config).get("model_type", "")).startswith("qwen3_5")


def count_layers(weights: Weights) -> int:
    numbers = {
        int(name.split(".")[1]) for name in weights if name.startswith("layers.")
    }
    return max(numbers) + 1


def body_of(weights: Weights, config: Config) -> Body:
    """The body of a drafter whose tensors and config have canonical names."""
    inner = inner_config(config)
    gemma, offset = is_gemma(config), is_qwen3_5(config)
    heads = int(inner["num_attention_heads"])
    kv_heads = int(inner.get("num_key_value_heads") or heads)
    head_dim = int(inner.get("head_dim") or inner["hidden_size"] // heads)
    if gemma:
        head_dim = int(inner.get("global_head_dim") or head_dim)
        if inner.get("attention_k_eq_v"):
            kv_heads = int(inner.get("num_global_key_value_heads") or kv_heads)
    rope = rope_of(
        inner,
        head_dim,
        partial=gemma or offset,
        interleaved=option(config, "rope_is_neox_style", True) is False,
    )
    layers = count_layers(weights)
    return Body(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(inner.get("rms_norm_eps", 1e-6)),
        scale=1.0 if gemma else head_dim**-0.5,
        rope=rope,
        windows=_windows(config, layers),
        gemma=gemma,
        norm_offset=1.0 if offset else 0.0,
        gated_query=bool(option(config, "enable_qwen35_gated_q_proj", False)),
        value_scale=float(option(config, "attention_value_scale", 1.0)),
    )


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Windows by layer: all layers slide with `use_swa`, else as `layer_types` says."""
    if option(config, "use_swa", False):
        return (int(option(config, "swa_window_size")),) * layers
    kinds = option(config, "layer_types") or ["full_attention"] * layers
    window = option(config, "sliding_window")
    return tuple(
        int(window) if kind == "sliding_attention" and window else None
        for kind in kinds[:layers]
    )


def causal_layers(
    config: Config, body: Body, *, non_causal_default: bool
) -> tuple[bool, ...]:
    """Return for each layer whether attention within the block is causal.

    In a file of the library speculators, full layers are never causal, and sliding
    layers are causal unless `sliding_window_non_causal` is true (by default as
    `non_causal_default` says). In other files, `dflash_query_causal` makes all layers
    causal. Otherwise `is_causal` or `dflash_config.causal` decides; without these, only
    sliding layers are causal.
    """
    sliding = tuple(window is not None for window in body.windows)
    if is_speculators(config):
        name = "sliding_window_non_causal"
        free = bool(option(config, name, non_causal_default))
        return tuple(slides and not free for slides in sliding)
    if option(config, "dflash_query_causal", False):
        return (True,) * body.layers
    inside = config.get("dflash_config") or {}
    for causal in (
        config.get("is_causal"),
        inside.get("is_causal"),
        inside.get("causal"),
    ):
        if causal is not None:
            return (bool(causal),) * body.layers
    return sliding
