"""Gemma 4's decoder layer for block drafters."""

from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma4_text

from mlx_speculation.models.dflash import DFlashSettings, attend_block, by_head


class GemmaBlockAttention(gemma4_text.Attention):
    """Gemma 4's attention, from a block to the context and to itself."""

    def __init__(
        self, args: gemma4_text.ModelArgs, settings: DFlashSettings, index: int
    ) -> None:
        super().__init__(args, index)
        self.window, self.causal = settings.windows[index], settings.causal[index]

    def write(self, rows: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Write keys and values of rows, and return all that the cache holds.

        If values are keys (`use_k_eq_v`), they are the keys before norm and rotation.
        """
        keys = values = by_head(self.k_proj(rows), self.n_kv_heads)
        if not self.use_k_eq_v:
            values = by_head(self.v_proj(rows), self.n_kv_heads)
        keys = self.rope(self.k_norm(keys), offset=cache.offset)
        written: tuple[mx.array, mx.array] = cache.update_and_fetch(
            keys, self.v_norm(values)
        )
        return written

    def attend(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Write context and a block, and attend from the block; see `attend_block`."""
        return attend_block(self, x, context, cache)


class GemmaBlockLayer(gemma4_text.DecoderLayer):
    """Gemma 4's decoder layer, with `GemmaBlockAttention`."""

    def __init__(
        self, args: gemma4_text.ModelArgs, settings: DFlashSettings, index: int
    ) -> None:
        super().__init__(args, index)
        self.self_attn = GemmaBlockAttention(args, settings, index)

    def run(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Run a block after new context; both are written to the cache."""
        result = self.self_attn.attend(self.input_layernorm(x), context, cache)
        x = x + self.post_attention_layernorm(result)
        result = self.mlp(self.pre_feedforward_layernorm(x))
        out: mx.array = x + self.post_feedforward_layernorm(result)
        return out * self.layer_scalar
