"""Kinds of cache that few models have; `cache_twins` has the usual ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, QuantizedKVCache
from mlx_lm.models.deepseek_v41 import LayerCache

from support.caches.cache_twins import Kind, ListKind, Rows, detached, tagged

_EMBEDDINGS = mx.random.normal((97, 16), key=mx.random.key(6))


def _after(cache: Any, width: int) -> Rows:
    return Rows(cache.offset, tuple(range(10**6, 10**6 + width)))


def _attend(cache: Any, arrays: tuple[mx.array, mx.array]) -> list[Any]:
    before = cache.offset
    mask = cache.make_mask(arrays[0].shape[2], return_array=False, window_size=None)
    shown = cache.update_and_fetch(*arrays)
    return [before, detached(mask), detached(shown), cache.offset]


def _wide(rows: Rows) -> tuple[mx.array, mx.array]:
    """Return keys [1, 1, n, 32] and values [1, 1, n, 64] for quantization.

    A quantized group repeats one pair (position, serial). The pair sets the group's
    scale and bias, so different pairs stay different.
    """
    pairs, _ = tagged(rows)
    return mx.tile(pairs, (1, 1, 1, 16)), -mx.tile(pairs, (1, 1, 1, 32))


@dataclass(frozen=True, slots=True)
class QuantizedKind:
    """A `QuantizedKVCache`; a small `step` makes its buffers grow often."""

    step: int
    bits: int
    any_width: bool = True

    def make(self) -> Any:
        cache = QuantizedKVCache(group_size=32, bits=self.bits)
        cache.step = self.step
        return cache

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        return [cache.bits, *_attend(cache, _wide(rows))]

    def content(self, cache: Any, probe: int) -> list[Any]:
        kept = [cache.empty(), cache.offset, cache.bits, cache.group_size]
        if not cache.empty():
            kept.append(detached(cache.keys_and_values()))
        return [*kept, _attend(detached(cache), _wide(_after(cache, probe)))]


@dataclass(frozen=True, slots=True)
class ConcatenateKind:
    """A `ConcatenateKVCache`; its arrays are its content."""

    any_width: bool = True

    def make(self) -> Any:
        return ConcatenateKVCache()

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        return _attend(cache, tagged(rows))

    def content(self, cache: Any, probe: int) -> list[Any]:
        kept = [cache.empty(), cache.offset, cache.keys, cache.values]
        return [*kept, _attend(detached(cache), tagged(_after(cache, probe)))]


@dataclass(frozen=True, slots=True)
class ChunkedKind:
    """A `ChunkedKVCache`; its content is read after a trim of its front."""

    chunk: int
    step: int
    any_width: bool = True

    def make(self) -> Any:
        cache = ChunkedKVCache(self.chunk)
        cache.step = self.step
        return cache

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        cache.maybe_trim_front()
        before = [cache.start_position, cache.offset]
        shown = cache.update_and_fetch(*tagged(rows))
        return [*before, detached(shown), cache.start_position, cache.offset]

    def content(self, cache: Any, probe: int) -> list[Any]:
        copy = detached(cache)
        kept = [cache.empty(), cache.offset, cache.chunk_size]
        view = self.forward(copy, _after(cache, probe))
        return [*kept, view, detached(copy.keys_and_values())]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A `LayerCache` that the compressor of a real attention writes to."""

    attention: Any
    window: int
    any_width: bool = True

    def make(self) -> Any:
        return LayerCache(self.window)

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        """Write as `Attention` does, without the operations that only read."""
        x = _EMBEDDINGS[mx.array([serial % 97 for serial in rows.serials])][None]
        start, shared = cache.offset, dict[str, Any]()
        positions = mx.arange(start, start + rows.width)[None, :, None]
        window = cache.update_window(self.attention.kv_proj(x) + positions)
        if self.attention.is_kv_source:
            self.attention._compress(x, start_pos=start, cache=cache, shared=shared)
        return [start, window, list(shared.values()), self.content(cache, 1)]

    def content(self, cache: Any, probe: int) -> list[Any]:
        return [cache.empty(), cache.offset, cache.window_size, *cache.state[:5]]


def attentions() -> list[Any]:
    """Return attentions with the compression ratios 4, 1, 0 (no compression) and 2.

    The head size is 24: with a multiple of 16, mlx-lm would round compressed keys and
    values to 4 bits, which is slow.
    """
    args = deepseek_v41.ModelArgs(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=24,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        o_groups=1,
        o_lora_rank=8,
        compress_ratios=(4, 1, 0, 2),
        kv_source_layer_ids=(0, 1, 3),
        index_source_layer_ids=(0, 1),
        index_n_heads=2,
        index_head_dim=24,
        index_topk=3,
    )
    mx.random.seed(7)  # The constructors draw from the global generator.
    return [deepseek_v41.Attention(args, layer) for layer in range(4)]


quantized_kinds = st.builds(
    QuantizedKind, st.sampled_from([4, 8, 256]), st.sampled_from([2, 4, 8])
)
chunked_kinds = st.builds(
    ChunkedKind, st.integers(1, 12), st.sampled_from([1, 4, 8, 256])
)


def compositions(kinds: Sequence[st.SearchStrategy[Kind]]) -> st.SearchStrategy[Kind]:
    """Draw the caches of models: layers of any kinds, and nested lists of them."""
    leaves = st.one_of(kinds)
    layers = st.recursive(
        leaves,
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(
            lambda members: ListKind(tuple(members))
        ),
        max_leaves=4,
    )
    return st.lists(layers, min_size=1, max_size=3).map(
        lambda members: ListKind(tuple(members), layers=True)
    )
