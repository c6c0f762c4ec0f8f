"""The decoder blocks of MTP heads, made of mlx-lm's layer classes.

Each function makes the blocks of one layer of a head from the target's `ModelArgs`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder block, with its kind of cache and of mask."""

    module: nn.Module
    new_cache: Callable[[], Any] | None = KVCache  # None: it has no cache
    window: int | None = None  # the size of its sliding window
    mask_array: bool = False  # whether its mask has to be an array

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Run the block over rows [batch, positions, dim] after those in the cache."""
        module: Callable[..., mx.array] = self.module
        if self.new_cache is None:
            return module(x)
        first = cache[0] if self.new_cache is _pair else cache
        mask = create_attention_mask(
            x, first, window_size=self.window, return_array=self.mask_array
        )
        return module(x, mask=mask, cache=cache)


# Takes the target's arguments, config.json's text part and the index of a head's layer
Build = Callable[[Any, Config, int], list[Block]]


def _pair() -> CacheList:
    return CacheList(KVCache(), KVCache())


def _models(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _module_of(args: Any) -> Any:
    return importlib.import_module(type(args).__module__)


def one(layer: str, *, mask_array: bool = False, **changes: Any) -> Build:
    """Return a `Build` of one block, of the class `layer` in the target's module.

    `changes` are new values of the target's arguments.
    """

    def build(args: Any, config: Config, k: int) -> list[Block]:
        kind, index = getattr(_module_of(args), layer), args.num_hidden_layers + k
        return [Block(kind(replace(args, **changes), index), mask_array=mask_array)]

    return build


def qwen(args: Any, config: Config, k: int) -> list[Block]:
    """Qwen: full attention; experts if config.json or the target has some."""
    args = replace(
        args,
        full_attention_interval=1,
        num_experts=config.get("mtp_num_experts", args.num_experts),
        num_experts_per_tok=config.get(
            "mtp_num_experts_per_tok", args.num_experts_per_tok
        ),
        decoder_sparse_step=1,
    )
    module = _module_of(args)
    if hasattr(module, "Qwen3NextDecoderLayer"):
        args = replace(args, mlp_only_layers=[])
        return [Block(module.Qwen3NextDecoderLayer(args, layer_idx=0))]
    return [Block(module.DecoderLayer(args, layer_idx=0))]


def deepseek_v32(args: Any, config: Config, k: int) -> list[Block]:
    """DeepSeek V3.2 and GLM-5: latent attention with an indexer, which has a cache too.

    The indexer chooses positions anew for each drafted token, even if config.json sets
    index_share_for_mtp_iteration. Engines that use the first drafted token's positions
    for all save a little time; in texts longer than index_topk their drafts can differ.
    """
    layer = _models("deepseek_v32").DeepseekV32DecoderLayer
    args = replace(args, first_k_dense_replace=0, moe_layer_freq=1)
    return [Block(layer(args, k), _pair, mask_array=True)]


def mimo(args: Any, config: Config, k: int) -> list[Block]:
    """MiMo-7B: a layer like the target's."""
    return [Block(_models("mimo").TransformerBlock(args))]


def mimo_v2_flash(args: Any, config: Config, k: int) -> list[Block]:
    """MiMo-V2: a dense layer with a sliding window."""
    layer = _models("mimo_v2_flash").DecoderLayer
    module = layer(args, is_moe=False, is_sliding_window=True)
    return [_sliding(module, args.sliding_window_size)]


def _sliding(module: nn.Module, window: int) -> Block:
    return Block(module, lambda: RotatingKVCache(max_size=window), window)


class LongcatMtpBlock(nn.Module):
    """The block of LongCat's MTP heads: half of a target's layer, with a dense MLP."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        longcat = _models("longcat_flash")
        self.self_attn = longcat.LongcatFlashMLA(args)
        self.mlp = longcat.LongcatFlashMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(
            args.hidden_size, eps=args.rms_norm_eps
        )

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Run the block over x [batch, positions, dim]."""
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


def longcat_flash(args: Any, config: Config, k: int) -> list[Block]:
    """LongCat-Flash: latent attention and a dense MLP."""
    return [Block(LongcatMtpBlock(args), mask_array=True)]


_NEMOTRON_KINDS = {
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}


def nemotron_h(args: Any, config: Config, k: int) -> list[Block]:
    """Nemotron-H: the blocks that config.json lists; by default attention and MoE."""
    kinds = config.get("mtp_hybrid_override_pattern")
    if kinds is None:
        names = config.get("mtp_layers_block_type", ["full_attention", "moe"])
        kinds = [_NEMOTRON_KINDS.get(name, name) for name in names]
    unknown = sorted(set(kinds) - set(_NEMOTRON_KINDS.values()))
    if unknown:
        raise ValueError(f"it has blocks of unknown kind: {', '.join(unknown)}")
    experts = config.get("mtp_n_routed_experts", args.n_routed_experts)
    args = replace(args, n_routed_experts=experts)
    layer = _models("nemotron_h").NemotronHBlock
    return [
        Block(layer(args, kind), KVCache if kind == "*" else None) for kind in kinds
    ]


def step3p5(args: Any, config: Config, k: int) -> list[Block]:
    """Step-3.5: a dense layer; its index decides the kind of attention."""
    index = args.num_hidden_layers + k
    args = replace(args, moe_layers_enum="-1")
    module = _models("step3p5").Step3p5DecoderLayer(args, index)
    if module.is_sliding:
        return [_sliding(module, args.sliding_window)]
    return [Block(module)]


def bailing(args: Any, config: Config, k: int) -> list[Block]:
    """Ling 2 and 2.5: a layer with experts; in 2.5 it has latent attention."""
    module, index = _module_of(args), args.num_hidden_layers + k
    args = replace(args, first_k_dense_replace=0)
    if hasattr(module, "BailingMoeDecoderLayer"):
        return [Block(module.BailingMoeDecoderLayer(args, index))]
    return [Block(module.DecoderLayer(args, index), mask_array=True)]


def exaone_moe(args: Any, config: Config, k: int) -> list[Block]:
    """EXAONE MoE: a dense layer with the attention of the target's first layer."""
    args = replace(args, is_moe_layer=[False, *args.is_moe_layer[1:]])
    module = _models("exaone_moe").DecoderLayer(args, 0)
    if module.is_sliding_window:
        return [_sliding(module, args.sliding_window)]
    return [Block(module)]
