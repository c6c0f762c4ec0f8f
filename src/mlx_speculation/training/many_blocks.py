"""Training forward of a block drafter: many blocks of a recorded text at once.

The block of slot i equals the block of a round whose newest token is token i + 1:

    context    positions 0 .. i of the row; all blocks of a row share these keys
    block      token i + 1 (the anchor) and mask tokens, at positions i + 1, i + 2, ..

A block attends to its context and to itself, not to other blocks. Training calls the
drafter as a round does, but with a `BlocksCache`. Attention then computes all blocks at
once.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.models.dflash import DFlashAttention, DFlashHead, DFlashLayer
from mlx_speculation.models.dflash.attention import by_head
from mlx_speculation.training.unroll import recomputed


class BlocksCache:
    """Argument of a layer in place of a `KVCache`, to run many blocks of a row.

    `slots` has the slot of each block, int32 [rows, blocks]. With `checkpoint` the
    backward pass recomputes each layer.
    """

    def __init__(self, slots: mx.array, *, checkpoint: bool = False) -> None:
        self.slots, self.checkpoint = slots, checkpoint


class _BlocksAttention(DFlashAttention):
    """DFlash's attention, which also takes a `BlocksCache`."""

    def attend(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Attend from blocks [rows * blocks, block, dim] to context [rows, n, dim]."""
        if not isinstance(cache, BlocksCache):
            return super().attend(x, context, cache)
        starts = cache.slots.flatten() + 1
        queries = self.q_norm(by_head(self.q_proj(x), self.n_heads))
        result = attend_blocks(
            self.rope(queries, offset=starts),
            self.keys_values(context, 0),
            self.keys_values(x, starts),
            cache.slots,
            self.scale,
        )
        out: mx.array = self.o_proj(result.swapaxes(1, 2).flatten(2))
        return out


class _BlocksLayer(DFlashLayer):
    """DFlash's layer, which the backward pass recomputes if the cache says so."""

    def run(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        layer = super().run
        if not (isinstance(cache, BlocksCache) and cache.checkpoint):
            return layer(x, context, cache)
        again = recomputed(self, lambda x, context: layer(x, context, cache))
        out: mx.array = again(x, context)
        return out


def run_many_blocks(head: DFlashHead) -> None:
    """Change the layers of a drafter so that they accept a `BlocksCache`."""
    settings = head.settings
    assert not settings.gated
    assert set(settings.windows) == {None}
    assert not any(settings.causal)
    for layer in head.layers:
        assert type(layer) is DFlashLayer
        layer.__class__ = _BlocksLayer
        layer.self_attn.__class__ = _BlocksAttention


def attend_blocks(
    queries: mx.array,
    context: tuple[mx.array, mx.array],
    block_kv: tuple[mx.array, mx.array],
    slots: mx.array,
    scale: float,
) -> mx.array:
    """Attend from each block to the context up to its slot, and to the whole block.

    There are rows * heads * blocks * block * n attention weights over the context.

        queries, result   [rows * blocks, heads, block, size]
        context           keys and values, each [rows, kv_heads, n, size]
        block_kv          likewise of the blocks, [rows * blocks, kv_heads, block, size]
        slots             int32 [rows, blocks]
    """
    rows, blocks = slots.shape
    # On non-contiguous arrays the product would run one kernel for each row.
    keys, values, own_keys, own_values = map(mx.contiguous, (*context, *block_kv))
    kv_heads, n, size = keys.shape[1:]
    block = queries.shape[2]
    # All queries of a KV head are rows of one product.
    grouped = (queries * scale).reshape(rows, blocks, kv_heads, -1, size)
    each = grouped.shape[3]
    wide = grouped.swapaxes(1, 2).flatten(2, 3) @ keys.swapaxes(-1, -2)
    seen = mx.arange(n) <= slots[..., None]  # [rows, blocks, n]
    wide = mx.where(
        seen[:, None, :, None],
        wide.reshape(rows, kv_heads, blocks, each, n),
        mx.array(-mx.inf, wide.dtype),
    )
    near = grouped.flatten(0, 1) @ own_keys.swapaxes(-1, -2)
    near = near.reshape(rows, blocks, kv_heads, each, block).swapaxes(1, 2)
    weights = mx.softmax(mx.concatenate([wide, near], axis=-1), axis=-1, precise=True)
    far, near = weights[..., :n], weights[..., n:].swapaxes(1, 2)
    out = (far.flatten(2, 3) @ values).reshape(rows, kv_heads, blocks, each, size)
    beside = (near.flatten(0, 1) @ own_values).reshape(
        rows, blocks, kv_heads, each, size
    )
    return (out.swapaxes(1, 2) + beside).reshape(queries.shape)
