"""Attention over latents for a few rows, with mlx-lm's method for one row.

Multi-head latent attention keeps one latent c per position instead of keys and values
of every head (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). mlx-lm 0.32.2 has two
methods, with the same result up to rounding:

    one row          (W_k^T q) c, then W_v of the sum: reads the latents only
    several rows     q (W_k c), and W_v c: first computes keys and values of every head
                     from all latents, in every forward

The second method is faster for a prompt, but slower for the few rows of a round after a
long text. So in a round, forwards over at most `MOST_ROWS` rows use the first method.
The hook runs a copy of the layer's own `__call__` with another attention function. The
keys and values in that copy are not used, and so never computed. Classes whose source
has changed get no hook.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.instance_hooks import Hook, derived, made_again, plain_class
from mlx_speculation.models.round_context import in_round
from mlx_speculation.models.source_digests import is_known

# Fewer than the rows at which both methods have equally many multiplications:
# rank (nope + value) / (2 rank - nope - value), 170 for DeepSeek's 512, 128, 128.
MOST_ROWS = 64
_RANK = 0

ATTENTIONS = frozenset(
    {
        ("mlx_lm.models.bailing_hybrid", "MultiLatentAttention"),
        ("mlx_lm.models.deepseek_v3", "DeepseekV3Attention"),
        ("mlx_lm.models.glm4_moe_lite", "Glm4MoeLiteAttention"),
        ("mlx_lm.models.kimi_k3", "KimiK3MLAAttention"),
        ("mlx_lm.models.kimi_linear", "KimiMLAAttention"),
        ("mlx_lm.models.longcat_flash", "LongcatFlashMLA"),
    }
)


class _Latents:
    """Substitute for a cache; keeps the latents that the cache returned."""

    __slots__ = ("attention", "cache", "shown")

    def __init__(self, attention: nn.Module, cache: KVCache) -> None:
        self.attention: Any = attention
        self.cache = cache
        self.shown: mx.array | None = None

    @property
    def offset(self) -> int:
        return int(self.cache.offset)

    def update_and_fetch(self, latents: mx.array, keys: mx.array) -> Any:
        """Write to the cache, which has latents in the place of keys."""
        shown, keys = self.cache.update_and_fetch(latents, keys)
        self.shown = shown
        return shown, keys


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """Attend to latents if `cache` is `_Latents`; else to `keys` and `values`."""
    if not isinstance(cache, _Latents):
        made: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask
        )
        return made
    attention, latents = cache.attention, cache.shown
    result: mx.array = scaled_dot_product_attention(
        attention.embed_q(queries),
        latents,
        latents,
        cache=cache.cache,
        scale=scale,
        mask=mask,
    )
    out: mx.array = attention.unembed_out(result)
    return out


@functools.cache
def _absorbing(kind: Any) -> type[nn.Module]:
    """Return a class that, in a round, uses mlx-lm's method for one row."""
    again = made_again(kind.__call__, {"scaled_dot_product_attention": _attend})

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        caches = [v for v in (*args, *kwargs.values()) if isinstance(v, KVCache)]
        if not (in_round() and 1 < x.shape[1] <= MOST_ROWS and caches):
            return kind.__call__(self, x, *args, **kwargs)
        latents = _Latents(self, caches[0])

        def swap(value: Any) -> Any:
            return latents if value is caches[0] else value

        named = {key: swap(value) for key, value in kwargs.items()}
        return again(self, x, *map(swap, args), **named)

    return derived(kind, {"__call__": call})


def absorbing_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each known attention over latents, with its hook."""
    for _, module in model.named_modules():
        kind = plain_class(module)
        if (kind.__module__, kind.__name__) not in ATTENTIONS or not is_known(kind):
            continue
        home = vars(importlib.import_module(kind.__module__))
        if home.get("scaled_dot_product_attention") is scaled_dot_product_attention:
            yield module, Hook(_RANK, _absorbing)
