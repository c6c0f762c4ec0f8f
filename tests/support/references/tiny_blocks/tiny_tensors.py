"""Random tensors of tiny drafters, under the names of their layers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from support.references.blocks.packagings import E2M1, E4M3
from support.references.blocks.primitives import Array

HIDDEN, INNER, VOCABULARY = 64, 128, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LAYERS, TARGET_LAYERS, MASK = 2, 8, VOCABULARY - 1

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "hidden_act": "silu",
}


@dataclass(frozen=True, slots=True)
class TinyDrafter:
    """A checkpoint: what config.json holds, and float32 tensors by published names."""

    config: dict[str, Any]
    weights: dict[str, Array]


@dataclass(frozen=True, slots=True)
class TinyInputs:
    """What a target gives: states of the taps, its tables, and committed ids."""

    hidden: list[Array]
    embeddings: Array
    lm_head: Array
    tokens: list[int]


class Tensors:
    """Collects tensors drawn from one seeded generator."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.found: dict[str, Array] = {}

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> None:
        drawn = self.rng.normal(size=shape) * scale
        self.found[name] = drawn.astype(np.float32)

    def linear(self, name: str, out: int, inputs: int, *, bias: bool = False) -> None:
        self.normal(f"{name}.weight", out, inputs, scale=inputs**-0.5)
        if bias:
            self.normal(f"{name}.bias", out, scale=0.3)

    def norm(self, name: str, width: int, *, centre: float = 1.0) -> None:
        drawn = centre + 0.2 * self.rng.normal(size=width)
        self.found[f"{name}.weight"] = drawn.astype(np.float32)

    def layer(
        self,
        prefix: str,
        *,
        reads: int = HIDDEN,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        head_dim: int = HEAD_DIM,
        head_norms: bool = True,
        bias: bool = False,
        values: bool = True,
        gated: bool = False,
        centre: float = 1.0,
    ) -> None:
        """A decoder layer; `reads` is the width of the rows in front of q, k and v."""
        attention = f"{prefix}.self_attn"
        width = heads * head_dim
        self.norm(f"{prefix}.input_layernorm", HIDDEN, centre=centre)
        self.norm(f"{prefix}.post_attention_layernorm", HIDDEN, centre=centre)
        self.linear(f"{attention}.q_proj", width * (1 + gated), reads, bias=bias)
        self.linear(f"{attention}.k_proj", kv_heads * head_dim, reads, bias=bias)
        if values:
            self.linear(f"{attention}.v_proj", kv_heads * head_dim, reads, bias=bias)
        self.linear(f"{attention}.o_proj", HIDDEN, width, bias=bias)
        if head_norms:
            self.norm(f"{attention}.q_norm", head_dim, centre=centre)
            self.norm(f"{attention}.k_norm", head_dim, centre=centre)
        self.mlp(prefix)

    def mlp(self, prefix: str) -> None:
        self.linear(f"{prefix}.mlp.gate_proj", INNER, HIDDEN)
        self.linear(f"{prefix}.mlp.up_proj", INNER, HIDDEN)
        self.linear(f"{prefix}.mlp.down_proj", HIDDEN, INNER)

    def sandwich(self, prefix: str) -> None:
        """The further norms of Gemma 4, and `layer_scalar`."""
        self.norm(f"{prefix}.pre_feedforward_layernorm", HIDDEN)
        self.norm(f"{prefix}.post_feedforward_layernorm", HIDDEN)
        self.found[f"{prefix}.layer_scalar"] = np.array([0.8], dtype=np.float32)

    def reduced(self, size: int) -> None:
        """`d2t` [size] int64, ids ascending and not all neighbours, and `t2d` [V]."""
        chosen = np.sort(self.rng.choice(VOCABULARY, size, replace=False))
        self.found["d2t"] = (chosen - np.arange(size)).astype(np.int64)
        kept = np.zeros(VOCABULARY, dtype=bool)
        kept[chosen] = True
        self.found["t2d"] = kept

    def pack_nvfp4(self, names: list[str]) -> None:
        """Replace linear weights by NVFP4: nearest E2M1 values under e4m3 scales."""
        for name in names:
            weight = self.found[f"{name}.weight"].astype(np.float64)
            groups = weight.reshape(len(weight), -1, 16)
            over = np.abs(weight).max() / (6.0 * 448.0)
            wanted = np.abs(groups).max(axis=-1) / 6.0 / over
            scale = np.abs(E4M3[:127] - wanted[..., None]).argmin(axis=-1)
            units = groups / np.maximum(E4M3[scale], 1e-9)[..., None] / over
            nibbles = np.abs(E2M1 - units[..., None]).argmin(axis=-1)
            nibbles = nibbles.reshape(weight.shape).astype(np.uint8)
            self.found[f"{name}.weight"] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            self.found[f"{name}.weight_scale"] = scale.astype(np.uint8)
            self.found[f"{name}.weight_scale_2"] = np.array(over, dtype=np.float32)


def tiny_inputs(taps: int, known: int = 7, seed: int = 1) -> TinyInputs:
    """Random states [known, H] of `taps` layers, tables [V, H], and known + 1 ids."""
    rng = np.random.default_rng(seed)
    hidden = [rng.normal(size=(known, HIDDEN)) for _ in range(taps)]
    embeddings = rng.normal(size=(VOCABULARY, HIDDEN))
    lm_head = rng.normal(size=(VOCABULARY, HIDDEN)) * HIDDEN**-0.5
    tokens = [int(token) for token in rng.integers(0, MASK, known + 1)]
    return TinyInputs(hidden, embeddings, lm_head, tokens)
