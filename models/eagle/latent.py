"""Latent attention (DeepSeek's MLA) of EAGLE-3 heads, for input states of any width.

    q = B_q norm(A_q x), or Q x;  [c | k_r] = A_kv x;  [k | v] = B_kv norm(c)

The last numbers of queries and keys are rotated; those of the keys, k_r, are the same
for all heads. The cache holds whole keys and values, not latents, since a head has few
layers.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import apply_yarn_mscale, initialize_rope

from mlx_speculation.models.eagle.config import Latents


class LatentAttention(nn.Module):
    """Latent attention whose input states have `width` numbers."""

    def __init__(self, args: llama.ModelArgs, latents: Latents, width: int) -> None:
        super().__init__()
        heads, eps, dims = args.num_attention_heads, args.rms_norm_eps, latents
        queries = heads * (dims.plain + dims.rotated)
        if dims.query_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, dims.query_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(dims.query_rank, eps=eps)
            self.q_b_proj = nn.Linear(dims.query_rank, queries, bias=False)
        joined, made = dims.rank + dims.rotated, heads * (dims.plain + dims.values)
        self.kv_a_proj_with_mqa = nn.Linear(width, joined, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(dims.rank, eps=eps)
        self.kv_b_proj = nn.Linear(dims.rank, made, bias=False)
        self.o_proj = nn.Linear(heads * dims.values, args.hidden_size, bias=False)
        self.rope = initialize_rope(
            dims.rotated,
            args.rope_theta,
            dims.pairs,
            args.rope_scaling,
            args.max_position_embeddings,
        )
        self._scale = apply_yarn_mscale(
            (dims.plain + dims.rotated) ** -0.5, args.rope_scaling
        )
        self._heads, self._latents = heads, dims

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Attend from positions that follow the cache's, [batch, positions, width]."""
        dims = self._latents
        if dims.query_rank is None:
            result = self.q_proj(x)
        else:
            result = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        queries, turned = mx.split(self._by_head(result), [dims.plain], axis=-1)
        queries = mx.concatenate(
            [queries, self.rope(turned, offset=cache.offset)], axis=-1
        )
        latent, shared = mx.split(self.kv_a_proj_with_mqa(x), [dims.rank], axis=-1)
        both = self._by_head(self.kv_b_proj(self.kv_a_layernorm(latent)))
        keys, values = mx.split(both, [dims.plain], axis=-1)
        shared = self.rope(shared[:, None], offset=cache.offset)
        shared = mx.broadcast_to(shared, (*keys.shape[:-1], dims.rotated))
        keys = mx.concatenate([keys, shared], axis=-1)
        keys, values = cache.update_and_fetch(keys, values)
        mixed = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._scale, mask=mask
        )
        out: mx.array = self.o_proj(mixed.swapaxes(1, 2).flatten(2))
        return out

    def _by_head(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)
