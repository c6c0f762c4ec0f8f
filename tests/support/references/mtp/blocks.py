"""Blocks of heads: layers of transformers, or of mlx-lm if transformers has none."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from transformers import AutoConfig

from support.references.blocks.primitives import Array, Weights
from support.references.mtp.base import Family
from support.references.torch_heads import below, fill, to_torch

_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_ROUND = ("enorm", "hnorm", "eh_proj", "shared_head.", "embed_tokens.", "final_layern")


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """A block that transformers has as a decoder layer."""

    prefix: str  # prefix of the names of its classes
    block: str  # prefix of the block's tensors on disk
    index: int  # of a layer of the target that has the kind of the head's layer
    module: str | None = None  # in transformers.models; None: named as in mlx-lm
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration
    renames: dict[str, str] = field(default_factory=dict)  # on disk -> transformers
    rotary: str = "RotaryEmbedding"  # class that makes the angles, without the prefix
    skipped: Sequence[str] = _ROUND  # prefixes of tensors around the block
    norms_less_one: bool = False  # norms of transformers multiply by 1 + weight

    def __call__(self, family: Family, tensors: Weights, layer: int, x: Array) -> Array:
        assert not layer
        below_block = below(tensors, self.block)
        for old, new in self.renames.items():
            below_block = {
                name.replace(old, new): tensor for name, tensor in below_block.items()
            }
        if self.norms_less_one:
            below_block = {
                k: np.asarray(v) - ("norm" in k) for k, v in below_block.items()
            }
        skipped = tuple(self.skipped)
        below_block = {
            k: v for k, v in below_block.items() if not k.startswith(skipped)
        }
        config = AutoConfig.for_model(**{**family.text, **_TOKENS, **self.changes})
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        with torch.no_grad():
            out = self.run(family, config, below_block, to_torch(x)[None])
        return out[0].numpy().astype(np.float64)  # type: ignore[no-any-return]

    def run(self, family: Family, config: Any, tensors: Weights, x: Any) -> Any:
        """Run transformers' layer with the block's tensors on x [1, n, H]."""
        block = getattr(self.classes(family), f"{self.prefix}DecoderLayer")
        block = block(config, self.index)
        fill(block, tensors)
        out = block(x, **self.around(family, config, x))
        return out[0] if isinstance(out, tuple) else out

    def classes(self, family: Family) -> Any:
        name = self.module or family.module
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    def around(self, family: Family, config: Any, x: torch.Tensor) -> dict[str, Any]:
        """Return the mask, positions and angles of a layer."""
        n = x.shape[1]
        positions = torch.arange(n)[None]
        queries, keys = torch.arange(n)[:, None], torch.arange(n)[None]
        seen = keys <= queries
        kinds = getattr(config, "layer_types", None)
        kind = kinds[self.index] if kinds else "full_attention"
        if kind == "sliding_attention":
            # mlx-lm's window. That of transformers is larger by one for MiMo-V2.
            text = {**family.text, **self.changes}
            window = text.get("sliding_window_size") or text["sliding_window"]
            seen = seen & (keys > queries - window)
        lowest = torch.finfo(torch.float32).min
        given: dict[str, Any] = {
            "attention_mask": torch.where(seen, 0.0, lowest)[None, None],
            "position_ids": positions,
        }
        if self.rotary:
            rotary = getattr(self.classes(family), f"{self.prefix}{self.rotary}")
            by_kind = "full_attention" in (
                getattr(config, "rope_parameters", None) or {}
            )
            more = {"layer_type": kind} if by_kind else {}
            given["position_embeddings"] = rotary(config)(x, positions, **more)
        return given


class MimoProLayer(TorchLayer):
    """MiMo-V2's layer, with one projection for queries, keys and values."""

    def __call__(self, family: Family, tensors: Weights, layer: int, x: Array) -> Array:
        name = f"{self.block}self_attn.qkv_proj.weight"
        sizes = [heads * family.config["swa_head_dim"] for heads in (4, 4 + 2)]
        split = {key: value for key, value in tensors.items() if key != name}
        for which, part in zip("qkv", np.split(tensors[name], sizes), strict=True):
            split[name.replace("qkv", which)] = part
        return super().__call__(family, split, layer, x)


class LongcatLayer(TorchLayer):
    """LongCat's attention and MLP; transformers' decoder layer has two of each."""

    def run(self, family: Family, config: Any, tensors: Weights, x: Any) -> Any:
        classes = self.classes(family)
        attention = classes.LongcatFlashMLA(config, 0)
        fill(attention, below(tensors, "self_attn."))
        mlp = classes.LongcatFlashMLP(config)
        fill(mlp, below(tensors, "transformer_layer.mlp."))
        norms = [classes.LongcatFlashRMSNorm(x.shape[-1], eps=1e-6) for _ in range(2)]
        fill(norms[0], below(tensors, "input_layernorm."))
        fill(norms[1], below(tensors, "post_attention_layernorm."))
        x = x + attention(norms[0](x), **self.around(family, config, x))[0]
        return x + mlp(norms[1](x))


class NemotronLayer(TorchLayer):
    """Nemotron's two blocks, of kinds that the target has too."""

    def run(self, family: Family, config: Any, tensors: Weights, x: Any) -> Any:
        for number, index in enumerate((1, 2)):
            block = self.classes(family).NemotronHBlock(config, index)
            layer_tensors = below(tensors, f"{number}.")
            fill(
                block,
                {k: v for k, v in layer_tensors.items() if not k.startswith(_ROUND)},
            )
            x = block(x, **self.around(family, config, x))
        return x


@dataclass(frozen=True, slots=True)
class MlxLayer:
    """A block that mlx-lm has as a layer; its index follows the target's last layer."""

    name: str  # name of the class

    def __call__(self, family: Family, tensors: Weights, layer: int, x: Array) -> Array:
        index = family.config["num_hidden_layers"] + layer
        module = importlib.import_module(f"mlx_lm.models.{family.module}")
        config = {**family.config, "num_hidden_layers": index + 1}
        args = module.ModelArgs.from_dict(config)
        prefix = f"model.layers.{index}."
        raw = {
            name: mx.array(np.asarray(tensor, np.float32))
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        tensors_of_layer = below(module.Model(args).sanitize(raw), prefix)
        block = getattr(module, self.name)(args, index)
        parameters: Any = tree_flatten(block.parameters())
        names = {name for name, _ in parameters}
        block.load_weights([(k, v) for k, v in tensors_of_layer.items() if k in names])
        rows = mx.arange(len(x))
        seen = rows[None] <= rows[:, None]
        if getattr(block, "is_sliding", False):
            seen &= rows[None] > rows[:, None] - family.config["sliding_window"]
        out = block(mx.array(x.astype(np.float32))[None], seen, None)
        return np.array(out[0]).astype(np.float64)
