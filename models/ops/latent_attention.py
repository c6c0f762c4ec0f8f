"""Attention over latents for a few rows, as mlx-lm has it for one row.

Multi-head latent attention keeps one latent c of each position instead of keys and
values of every head (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). mlx-lm 0.32.2
attends to it in two ways, with the same result up to rounding:

    one row          (W_k^T q) c, then W_v of the sum: the latents are read as they are
    several rows     q (W_k c), and W_v c: keys and values of every head are made of all
                     latents first, in every forward

The second pays for a prompt. A verify of 5 rows over a long text pays for all of it
again. So in a round up to `MOST_ROWS` rows attend in the first way. The method that
does it is the model's own, made again from its code with an attention function of ours;
what it has made of the latents for the other way is not used, and therefore never
computed. A prompt that is read, and a class whose source is not the one that was read,
keep mlx-lm's way.
"""

import functools
import importlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.instance_hooks import Hook, derived, made_again, plain_class
from mlx_speculation.models.round_context import in_round
from mlx_speculation.models.source_digests import is_known

# By multiplications the two are equal at rank (nope + value) / (2 rank - nope - value)
# rows, which is 170 for DeepSeek's 512, 128 and 128.
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
    """Stand-in for an attention's cache that keeps the latents it shows."""

    __slots__ = ("attention", "cache", "shown")

    def __init__(self, attention: nn.Module, cache: KVCache) -> None:
        self.attention: Any = attention
        self.cache = cache
        self.shown: mx.array | None = None

    @property
    def offset(self) -> int:
        """The cache's."""
        return int(self.cache.offset)

    def update_and_fetch(self, latents: mx.array, keys: mx.array) -> Any:
        """Write as the cache does; latents stand in the place of its keys."""
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
    """Attend to the latents themselves; `keys` and `values` are not used then."""
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
    """Return a class that attends to latents as for single rows, in a round."""
    original: FunctionType = kind.__call__
    theirs = original.__globals__
    name = "scaled_dot_product_attention"
    again = made_again(original, {name: _attend})

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        current: Any = kind.__call__
        caches = [v for v in (*args, *kwargs.values()) if isinstance(v, KVCache)]
        ours = current is original and theirs[name] is scaled_dot_product_attention
        if not (in_round() and 1 < x.shape[1] <= MOST_ROWS and caches and ours):
            return current(self, x, *args, **kwargs)
        latents = _Latents(self, caches[0])

        def swap(value: Any) -> Any:
            return latents if value is caches[0] else value

        named = {key: swap(value) for key, value in kwargs.items()}
        return again(self, x, *map(swap, args), **named)

    return derived(kind, {"__call__": call})


def absorbing_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each attention over latents that is known, with its hook."""
    for _, module in model.named_modules():
        kind = plain_class(module)
        if (kind.__module__, kind.__name__) not in ATTENTIONS or not is_known(kind):
            continue
        home = vars(importlib.import_module(kind.__module__))
        if home.get("scaled_dot_product_attention") is scaled_dot_product_attention:
            yield module, Hook(_RANK, _absorbing)
