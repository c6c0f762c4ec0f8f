"""The decoder layers of EAGLE-3 heads: the first reads an embedding beside a state.

    x = g + attention([norm(E[t]) | norm(g)])
    x = x + mlp(norm(x))

Later layers are plain. Layers like Qwen 3's have norms of the queries and keys of each
attention head. Layers like OLMo 2's have one norm over all attention heads together.
Latent attention (DeepSeek's MLA) is that of mlx-lm's youtu_llm, whose cache holds whole
keys and values.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text, llama, olmo2, qwen3, youtu_llm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.rope_utils import apply_yarn_mscale

from mlx_speculation.models.eagle.config import EagleSettings

# By `query_norms`: Llama's attention, then two with norms of queries and keys before
# the rotation.
_ATTENTION = {
    None: llama.Attention,
    "each": qwen3.Attention,
    "together": olmo2.Attention,
}


def _attention(settings: EagleSettings, index: int, width: int) -> Any:
    """Return the attention of a layer that reads states of this width."""
    args, latents = settings.args_of(index), settings.latents
    wide = replace(args, hidden_size=width)
    size: Any = args.head_dim
    if latents is None:
        made: Any = _ATTENTION[settings.query_norms](wide)
    else:
        fields = {**vars(wide), **latents}
        made = youtu_llm.YoutuLLMAttention(youtu_llm.ModelArgs.from_dict(fields))
        made.scale = apply_yarn_mscale(made.scale, args.rope_scaling)
        size = latents["v_head_dim"]
    if width != args.hidden_size:
        inner = args.num_attention_heads * size
        made.o_proj = nn.Linear(inner, args.hidden_size, bias=False)
    return made


class EagleLayer(llama.TransformerBlock):
    """A head's first decoder layer: Llama's, over an embedding joined with a state."""

    def __init__(self, settings: EagleSettings) -> None:
        args, dim = settings.layer, settings.layer.hidden_size
        super().__init__(args)
        self.self_attn = _attention(settings, 0, 2 * dim)
        self.hidden_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self._normed_residual = settings.norm_before_residual
        self._window = settings.windows[0]

    def run(self, embedded: mx.array, state: mx.array, cache: Any) -> mx.array:
        """Run the positions after the cached ones; inputs [batch, positions, dim]."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else state
        mask = create_attention_mask(joined, cache, window_size=self._window)
        x = residual + self.self_attn(joined, mask, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LaterLayer(llama.TransformerBlock):
    """A later decoder layer: Llama's."""

    def __init__(self, settings: EagleSettings, index: int) -> None:
        super().__init__(settings.layer)
        self.self_attn = _attention(settings, index, settings.layer.hidden_size)
        self._window = settings.windows[index]

    def run(self, x: mx.array, cache: Any) -> mx.array:
        """Run the positions after the cached ones, [batch, positions, dim]."""
        mask = create_attention_mask(x, cache, window_size=self._window)
        out: mx.array = self(x, mask, cache)
        return out


class GemmaEagleLayer(gemma4_text.DecoderLayer):
    """A head's only decoder layer, of Gemma 4's kind."""

    def __init__(self, settings: EagleSettings, args: gemma4_text.ModelArgs) -> None:
        super().__init__(args, 0)
        dim = args.hidden_size
        self.self_attn = gemma4_text.Attention(replace(args, hidden_size=2 * dim), 0)
        inner = args.num_attention_heads * self.self_attn.head_dim
        self.self_attn.o_proj = nn.Linear(inner, dim, bias=False)
        self.hidden_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self._normed_residual = settings.norm_before_residual

    def run(self, embedded: mx.array, state: mx.array, cache: Any) -> mx.array:
        """Run the positions after the cached ones; inputs [batch, positions, dim]."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else state
        mask = create_attention_mask(joined, cache)
        result, *_ = self.self_attn(joined, mask, cache)
        x = residual + self.post_attention_layernorm(result)
        result = self.mlp(self.pre_feedforward_layernorm(x))
        out: mx.array = x + self.post_feedforward_layernorm(result)
        return out * self.layer_scalar
