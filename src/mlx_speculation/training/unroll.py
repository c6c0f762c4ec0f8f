"""A head unrolled as it drafts, on recorded text ("training-time test" of EAGLE-3).

Slot i pairs what the target made of position i with token i + 1. Drafting goes on from
there: at depth d the head is given its own output at slot i, depth d - 1, and token
i + 1 + d, at position i + d. It sees what a draft sees:

    keys of slot i      depth 0: 0 1 .. i
                        depth 1: 0 1 .. i, and i at depth 1
                        depth 2: 0 1 .. i, and i at depths 1 and 2

The head is the one that drafts, called as it is when it drafts; what differs is its
cache, which holds the depths before and says which of their keys a slot sees.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.models import llama

from mlx_speculation.models.checkpoints import HeadOnTarget

Made = TypeVar("Made")
Read = Callable[[int, mx.array], Made]


class KeysValues(NamedTuple):
    """Keys and values that a depth has written, each [rows, heads, slots, size]."""

    keys: mx.array
    values: mx.array


class UnrolledCache:
    """The cache of a layer at one depth, in the place of mlx-lm's `KVCache`.

    Args:
        past: what the layer has written at the depths before.
    """

    def __init__(self, past: Sequence[KeysValues]) -> None:
        self._past = tuple(past)
        self.newest: KeysValues | None = None

    @property
    def offset(self) -> int:
        """The position of slot 0."""
        return len(self._past)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return which keys of `update_and_fetch` slots see, bool [n, keys]."""
        if not self._past and not return_array and window_size is None:
            return "causal"
        slots = mx.arange(n)
        distance = slots[:, None] - slots[None]
        seen = distance >= 0
        if window_size is not None:
            seen = seen & (distance + self.offset < window_size)
        return mx.concatenate([seen, *[distance == 0] * self.offset], axis=1)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Take this depth's, and return those of all depths, one after the other."""
        self.newest = KeysValues(keys, values)
        every = (*self._past, self.newest)
        return (
            mx.concatenate([each.keys for each in every], axis=2),
            mx.concatenate([each.values for each in every], axis=2),
        )

    def attend(self, queries: mx.array, newest: KeysValues, scale: float) -> mx.array:
        """Take this depth's, and return what attention with `make_mask` does.

        Products that are masked are not computed but for those of depth 0: in all a
        third of the work at six depths.

        Args:
            queries: [rows, heads, slots, size].
            newest: of this depth.
            scale: of the products.
        """
        self.newest = newest
        if not self._past:
            return mx.fast.scaled_dot_product_attention(
                queries, *newest, scale=scale, mask="causal"
            )
        first, *later = (*self._past, newest)
        return _split_attention(queries, first, later, scale)


class _SplitAttention(llama.Attention):
    """The attention of Llama's layers, which lets an unrolled cache attend."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, UnrolledCache):
            plain: mx.array = super().__call__(x, mask, cache)
            return plain
        queries, keys, values = (
            made.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
            for made in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries = self.rope(queries, offset=cache.offset)
        newest = KeysValues(self.rope(keys, offset=cache.offset), values)
        result = cache.attend(queries, newest, self.scale).swapaxes(1, 2)
        out: mx.array = self.o_proj(result.reshape(*x.shape[:2], -1))
        return out


def attend_split(attention: llama.Attention) -> None:
    """Let an attention leave out products that are masked when it is unrolled."""
    assert type(attention) is llama.Attention
    attention.__class__ = _SplitAttention


def _split_attention(
    queries: mx.array, first: KeysValues, later: Sequence[KeysValues], scale: float
) -> mx.array:
    """Attend to depth 0 up to each slot, and to that slot at the other depths."""
    rows, heads, n, size = queries.shape
    kv_heads = first.keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, n, size)
    flat = grouped.reshape(rows, kv_heads, -1, size)
    wide = (flat @ first.keys.swapaxes(-1, -2)).reshape(*grouped.shape[:-1], n)
    slots = mx.arange(n)
    wide = mx.where(slots[:, None] >= slots, wide.astype(mx.float32) * scale, -mx.inf)
    scores = [
        (grouped * each.keys[:, :, None]).astype(mx.float32).sum(-1, keepdims=True)
        * scale
        for each in later
    ]
    total = mx.logsumexp(wide, axis=-1, keepdims=True)
    total = mx.logsumexp(mx.concatenate([total, *scores], axis=-1), -1, keepdims=True)
    weights = mx.exp(wide - total).astype(queries.dtype)
    out = weights.reshape(rows, kv_heads, -1, n) @ first.values
    out = out.reshape(*grouped.shape[:-1], -1)
    for score, each in zip(scores, later, strict=True):
        weight = mx.exp(score - total).astype(queries.dtype)
        out = out + weight * each.values[:, :, None]
    return out.reshape(rows, heads, n, -1)


def unroll(
    model: HeadOnTarget,
    hidden: mx.array,
    tokens: mx.array,
    depths: int,
    read: Read[Made],
    *,
    checkpoint: bool = False,
) -> list[Made]:
    """Run a head over recorded text, as it drafts from every slot.

    Args:
        model: the head on its target.
        hidden: what slots begin with, [rows, slots, dim].
        tokens: ids [rows, slots + depths - 1] or more, those one behind the slots':
            slot i at depth d is given column i + d.
        depths: how many tokens are drafted; in a chain at most its layers.
        read: called with each depth, from 0, and its logits [rows, slots, vocab];
            returns what is kept of them, arrays where there are checkpoints.
        checkpoint: whether gradients compute each depth again, and so hold the inner
            arrays of one alone.

    Returns:
        What `read` returned.
    """
    head: Any = model.head
    n, chained = hidden.shape[1], head.chained
    past: list[list[KeysValues]] = [[] for _ in head.new_caches()[0]]
    result = []
    for depth in range(depths):
        if chained:  # each layer has a cache of its own
            past = [[] for _ in head.new_caches()[depth]]

        def one(
            parameters: Any, hidden: mx.array, past: Any, depth: int = depth
        ) -> tuple[mx.array, list[KeysValues], Any]:
            head.update(parameters)
            caches = [
                UnrolledCache([KeysValues(*kv) for kv in layers]) for layers in past
            ]
            given = tokens[:, depth : depth + n]
            out = model.rows(hidden, given, caches, depth if chained else 0)
            written = [cache.newest for cache in caches if cache.newest is not None]
            return out.recycled, written, read(depth, out.logits)

        parameters = head.trainable_parameters()
        run = mx.checkpoint(one) if checkpoint else one
        hidden, written, made = run(parameters, hidden, past)
        head.update(parameters)
        result.append(made)
        for earlier, newest in zip(past, written, strict=True):
            earlier.append(newest)
    return result
