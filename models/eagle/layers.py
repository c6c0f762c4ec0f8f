"""The decoder layers of EAGLE-3 heads: the first reads two states side by side.

    x = g + attention([norm(E[t]) | norm(g)])
    x = x + mlp(norm(x))

Later layers are plain. Layers of Qwen 3 have norms of the queries and keys of each
head, and some layers have one norm over all heads together. Layers of Gemma 4 also have
norms after attention and after the MLP, and a scale.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text, llama
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from mlx_speculation.models.eagle.config import EagleSettings, QueryNorms
from mlx_speculation.models.eagle.latent import LatentAttention


class NormedAttention(llama.Attention):
    """Llama's attention with norms of queries and keys before the rotation.

    Args:
        args: the arguments of the layer.
        norms: "each": a norm of each head; "together": one norm over all heads.
    """

    def __init__(self, args: llama.ModelArgs, norms: QueryNorms) -> None:
        super().__init__(args)
        size: Any = self.head_dim
        self._together = norms == "together"
        queries, keys = (self.n_heads, self._kv_heads) if self._together else (1, 1)
        self.q_norm = nn.RMSNorm(queries * size, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(keys * size, eps=args.rms_norm_eps)

    @property
    def _kv_heads(self) -> int:
        result: Any = self.n_kv_heads
        return int(result)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Attend from positions that follow the cache's, [batch, positions, dim]."""
        queries = self._by_head(self.q_proj(x), self.n_heads, self.q_norm)
        keys = self._by_head(self.k_proj(x), self._kv_heads, self.k_norm)
        values = self._by_head(self.v_proj(x), self._kv_heads, None)
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        result = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        out: mx.array = self.o_proj(result.swapaxes(1, 2).flatten(2))
        return out

    def _by_head(self, x: mx.array, heads: int, norm: Any) -> mx.array:
        if norm is not None and self._together:
            x = norm(x)
        x = x.reshape(*x.shape[:2], heads, -1)
        if norm is not None and not self._together:
            x = norm(x)
        return x.swapaxes(1, 2)


def _attention(settings: EagleSettings, index: int, width: int) -> Any:
    """Return the attention of a layer that reads states of some width."""
    args, norms = settings.args_of(index), settings.query_norms
    if settings.latents is not None:
        return LatentAttention(args, settings.latents, width)
    wide = replace(args, hidden_size=width)
    made = llama.Attention(wide) if norms is None else NormedAttention(wide, norms)
    if width != args.hidden_size:
        inner = args.num_attention_heads * made.head_dim
        made.o_proj = nn.Linear(inner, args.hidden_size, bias=False)
    return made


class EagleLayer(llama.TransformerBlock):
    """A head's first decoder layer: Llama's, with attention over two states."""

    def __init__(self, settings: EagleSettings) -> None:
        args, dim = settings.layer, settings.layer.hidden_size
        super().__init__(args)
        self.self_attn = _attention(settings, 0, 2 * dim)
        self.hidden_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self._normed_residual = settings.norm_before_residual
        self._window = settings.windows[0]

    def run(self, embedded: mx.array, state: mx.array, cache: Any) -> mx.array:
        """Run positions that follow the cache's; both are [batch, positions, dim]."""
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
        """Run positions that follow the cache's, [batch, positions, dim]."""
        mask = create_attention_mask(x, cache, window_size=self._window)
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
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
        """Run positions that follow the cache's; both are [batch, positions, dim]."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else state
        mask = create_attention_mask(joined, cache)
        result, *_ = self.self_attn(joined, mask, cache)
        x = residual + self.post_attention_layernorm(result)
        result = self.mlp(self.pre_feedforward_layernorm(x))
        out: mx.array = x + self.post_feedforward_layernorm(result)
        return out * self.layer_scalar
