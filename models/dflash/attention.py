"""Attention of a drafted block to its context and to itself, for layers of any kind."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from mlx_speculation.models.dflash.config import DFlashSettings

# The tensor of attention sinks in some files: for each head, one more logit of the
# softmax, which has no value vector.
SINKS = "attention_sink_bias"


class DFlashAttention(qwen3.Attention):
    """Qwen 3's attention, from a block to the context and to itself."""

    def __init__(self, settings: DFlashSettings, index: int) -> None:
        rotation = settings.rotations[index]
        args: Any = replace(
            settings.layers, rope_theta=rotation.theta, rope_scaling=rotation.scaling
        )
        super().__init__(args)
        self.window, self.causal = settings.windows[index], settings.causal[index]
        self._value_scale, self._gated = settings.value_scale, settings.gated
        if settings.gated:
            wide = 2 * self.n_heads * args.head_dim
            self.q_proj = nn.Linear(args.hidden_size, wide, bias=False)
        share = rotation.factor if settings.partial else None
        if share is not None or settings.pairs:
            self.rope = initialize_rope(
                int(args.head_dim * (share or 1)),
                args.rope_theta,
                settings.pairs,
                args.rope_scaling,
                args.max_position_embeddings,
            )

    def keys_values(self, rows: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """Return keys and values of rows [batch, positions, dim].

        `offset` is the first row's position, or an array with one position for each
        text.
        """
        keys = self.k_norm(by_head(self.k_proj(rows), self.n_kv_heads))
        values = by_head(self.v_proj(rows), self.n_kv_heads)
        if self._value_scale != 1:
            values = values * self._value_scale
        return self.rope(keys, offset=offset), values

    def write(self, rows: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Write keys and values of rows, and return all that the cache holds."""
        keys, values = self.keys_values(rows, cache.offset)
        result: tuple[mx.array, mx.array] = cache.update_and_fetch(keys, values)
        return result

    def attend(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Write context and a block, and attend from the block; see `attend_block`."""
        return attend_block(self, x, context, cache, gated=self._gated)


def by_head(x: mx.array, heads: int) -> mx.array:
    """Return [batch, positions, heads * size] as [batch, heads, positions, size]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attend_block(
    layer: Any, x: mx.array, context: mx.array, cache: Any, *, gated: bool = False
) -> mx.array:
    """Write context and the block after it to a cache, and attend from the block.

    `context` is [batch, n, dim]; `x`, the block, is [batch, block, dim]. `layer` is an
    `Attention` of mlx-lm that also has `window`, `causal` and `write`.
    """
    start = cache.offset + context.shape[1]
    queries, gates = by_head(layer.q_proj(x), layer.n_heads), None
    if gated:
        queries, gates = mx.split(queries, 2, axis=-1)
    queries = layer.rope(layer.q_norm(queries), offset=start)
    keys, values = layer.write(mx.concatenate([context, x], axis=1), cache)
    size, rows = queries.shape[2], keys.shape[2]
    if layer.window is not None and isinstance(start, int):
        rows = min(rows, layer.window - 1 + size)
        keys, values = keys[..., -rows:, :], values[..., -rows:, :]
    result: mx.array = scaled_dot_product_attention(
        queries,
        keys,
        values,
        cache=None,
        scale=layer.scale,
        mask=_mask(size, rows, layer.window, layer.causal, start),
        sinks=layer.get(SINKS),
    )
    if gates is not None:
        result = result * mx.sigmoid(gates)
    out: mx.array = layer.o_proj(result.swapaxes(1, 2).flatten(2))
    return out


def _mask(
    size: int,
    rows: int,
    window: int | None,
    causal: bool,
    start: Any,  # the block's first position; an array if texts differ in length
) -> mx.array | None:
    """Return the mask of a block: `size` queries, `rows` keys; None: no mask."""
    first: Any = rows - size
    if isinstance(start, mx.array):
        first = start[:, None, None, None]
    elif window is None and not causal:
        return None
    positions, columns = first + mx.arange(size)[:, None], mx.arange(rows)
    mask: mx.array = columns <= positions if causal else columns < first + size
    if window is not None:
        mask = mask & (columns > positions - window)
    return mask
