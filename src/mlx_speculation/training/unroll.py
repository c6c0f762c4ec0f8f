"""Unrolling of a head on recorded text as in drafting (EAGLE-3's training-time test).

At depth 0 slot i reads the target's state of position i, and token i + 1. At depth d
slot i reads the head's output of slot i at depth d - 1, and token i + 1 + d; its
position is i + d. The slot attends to the keys that it would see in drafting:

    keys of slot i      depth 0: 0 1 .. i
                        depth 1: 0 1 .. i, and i at depth 1
                        depth 2: 0 1 .. i, and i at depths 1 and 2

The head is called as in drafting, but with an `UnrolledCache` for each layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from mlx_speculation.models.checkpoints import HeadOnTarget

Made = TypeVar("Made")
Read = Callable[[int, mx.array], Made]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Recorded text to draft from."""

    inputs: list[mx.array]  # from `Trainee.read`; positions after the last slot are cut
    tokens: mx.array  # ids [rows, slots + depths + `Trainee.first` - 1]
    depths: int  # tokens drafted from each slot
    # Slots to draft from, int32 [rows, n]; None: all. Only block drafters select slots.
    slots: mx.array | None = None
    checkpoint: bool = False  # whether the backward pass recomputes each depth


class KeysValues(NamedTuple):
    """Keys and values of one depth, each [rows, heads, slots, size]."""

    keys: mx.array
    values: mx.array


class UnrolledCache:
    """The cache of a layer at one depth, in place of mlx-lm's `KVCache`.

    It has the layer's keys and values of earlier depths, `past`, and those of this
    depth, `newest` (None: not written yet). Its mask selects the keys that a slot sees.
    """

    def __init__(self, past: Sequence[KeysValues]) -> None:
        self.past = tuple(past)
        self.newest: KeysValues | None = None

    @property
    def offset(self) -> int:
        """The position of slot 0 at this depth."""
        return len(self.past)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return the mask for `update_and_fetch`, bool [n, keys], or "causal"."""
        if not self.past and not return_array and window_size is None:
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
        """Store this depth's keys and values; return those of all depths, joined."""
        self.newest = KeysValues(keys, values)
        every = (*self.past, self.newest)
        return (
            mx.concatenate([each.keys for each in every], axis=2),
            mx.concatenate([each.values for each in every], axis=2),
        )


class _SplitAttention(llama.Attention):
    """Llama's attention, which skips products that an `UnrolledCache` masks.

    With six depths it does a third of the work of attention with the full mask.
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        queries, keys, values = (
            made.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
            for made in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries = self.rope(queries, offset=cache.offset)
        cache.newest = KeysValues(self.rope(keys, offset=cache.offset), values)
        every = [*cache.past, cache.newest]
        result = _split_attention(queries, every[0], every[1:], self.scale)
        out: mx.array = self.o_proj(result.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        return out


def attend_split(attention: llama.Attention) -> None:
    """Make an attention layer skip masked products; it then needs `UnrolledCache`s."""
    assert type(attention) is llama.Attention
    attention.__class__ = _SplitAttention


def _split_attention(
    queries: mx.array, first: KeysValues, later: Sequence[KeysValues], scale: float
) -> mx.array:
    """Let slot i attend to slots 0 to i of depth 0, and to slot i of later depths."""
    if not later:
        return mx.fast.scaled_dot_product_attention(
            queries, *first, scale=scale, mask="causal"
        )
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


def recomputed(module: nn.Module, act: Callable[..., Any]) -> Callable[..., Any]:
    """Return `act` as a function whose inner arrays the backward pass computes again.

    `act` takes and returns arrays, and uses the weights of `module`.
    """

    @mx.checkpoint
    def one(parameters: Any, *arrays: Any) -> Any:
        module.update(parameters)
        return act(*arrays)

    def run(*arrays: Any) -> Any:
        parameters = module.trainable_parameters()
        result = one(parameters, *arrays)
        module.update(parameters)
        return result

    return run


def unroll(
    model: HeadOnTarget, hidden: mx.array, text: Recorded, read: Read[Made]
) -> list[Made]:
    """Run a head over recorded text, as if it drafted from every slot.

    `hidden`: the states that slots read at depth 0, [rows, slots, dim]. A chained head,
    whose layer k drafts token k, needs `text.depths` layers. `read` is called with each
    depth and its logits [rows, slots, vocab]; with `text.checkpoint` it must return
    arrays.

    Returns:
        The results of `read`, by depth.
    """
    head: Any = model.head
    n, chained = hidden.shape[1], head.chained
    past: list[list[KeysValues]] = [[] for _ in head.new_caches()[0]]
    result = []
    for depth in range(text.depths):
        if chained:  # each layer has a cache of its own
            past = [[] for _ in head.new_caches()[depth]]

        def one(
            hidden: mx.array, past: Any, depth: int = depth
        ) -> tuple[mx.array, list[KeysValues], Any]:
            caches = [
                UnrolledCache([KeysValues(*kv) for kv in layers]) for layers in past
            ]
            given = text.tokens[:, 1 + depth : 1 + depth + n]
            out = model.rows(hidden, given, caches, depth if chained else 0)
            written = [cache.newest for cache in caches if cache.newest is not None]
            return out.recycled, written, read(depth, out.logits)

        run = recomputed(head, one) if text.checkpoint else one
        hidden, written, made = run(hidden, past)
        result.append(made)
        for earlier, newest in zip(past, written, strict=True):
            earlier.append(newest)
    return result
