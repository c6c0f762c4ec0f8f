"""A DFlash drafter as a module, and on its target: a block of drafts in one forward.

    context = hidden_norm(fc([outputs of target layers]))     of committed positions
    x = embedding([t_n, mask, mask, ...])                     at positions n, n + 1, ...
    x = x + attention(norm(x), over context and norm(x))      each layer
    x = x + mlp(norm(x))
    logits = head(norm(x)); row j is for the token at its own position n + j

Each layer makes keys and values of the context itself, and keeps them in a cache; those
of a block never stay. A full layer sees the whole context and the whole block. One with
a window sees so many positions, and, unless config.json says otherwise, none behind its
own.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.checkpoints.draft_checkpoint import (
    GatedMlp,
    Sizes,
    by_head,
    side_by_side,
)
from mlx_speculation.models.dflash.config import DFlashSettings
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States


class DFlashAttention(nn.Module):
    """Attention of a block to the context and to itself.

    Args:
        sizes: the drafter's.
        window: how many positions it sees; None: all.
        causal: whether it sees no position behind its own.
        biases: which of its projections have one.
    """

    def __init__(
        self, sizes: Sizes, window: int | None, causal: bool, biases: frozenset[str]
    ) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in biases)

        wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = linear("q_proj", sizes.dim, wide)
        self.k_proj = linear("k_proj", sizes.dim, narrow)
        self.v_proj = linear("v_proj", sizes.dim, narrow)
        self.o_proj = linear("o_proj", wide, sizes.dim)
        self.q_norm = nn.RMSNorm(sizes.head_dim, eps=sizes.eps)
        self.k_norm = nn.RMSNorm(sizes.head_dim, eps=sizes.eps)
        self.rope = sizes.rope()
        self._sizes, self._window, self._causal = sizes, window, causal

    def write(self, rows: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Write keys and values of rows, and return all that the cache then holds."""
        kv_heads = self._sizes.kv_heads
        keys = self.k_norm(by_head(self.k_proj(rows), kv_heads))
        keys = self.rope(keys, offset=cache.offset)
        found: tuple[mx.array, mx.array] = cache.update_and_fetch(
            keys, by_head(self.v_proj(rows), kv_heads)
        )
        return found

    def __call__(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Attend from a block [1, block, dim] behind new context [1, rows, dim]."""
        start, size = cache.offset + context.shape[1], x.shape[1]
        queries = self.q_norm(by_head(self.q_proj(x), self._sizes.heads))
        queries = self.rope(queries, offset=start)
        keys, values = self.write(mx.concatenate([context, x], axis=1), cache)
        mask = None
        if self._window is not None:
            shown = min(start + size, self._window - 1 + size)
            keys, values = keys[..., -shown:, :], values[..., -shown:, :]
            mask = self._mask(size, shown, self._window)
        found = scaled_dot_product_attention(
            queries,
            keys,
            values,
            cache=cache,
            scale=self._sizes.head_dim**-0.5,
            mask=mask,
        )
        out: mx.array = self.o_proj(side_by_side(found))
        return out

    def _mask(self, size: int, shown: int, window: int) -> mx.array:
        """Return which of the last `shown` positions the last `size` see."""
        behind = mx.arange(shown - size, shown)[:, None] - mx.arange(shown)[None]
        mask = behind < window
        return mask & (behind >= 0) if self._causal else mask


class DFlashLayer(nn.Module):
    """A decoder layer.

    Args:
        settings: the drafter's.
        index: which layer.
        biases: which projections of the attention have one.
    """

    def __init__(
        self, settings: DFlashSettings, index: int, biases: frozenset[str]
    ) -> None:
        super().__init__()
        sizes = settings.sizes
        self.input_layernorm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.self_attn = DFlashAttention(
            sizes, settings.windows[index], settings.causal, biases
        )
        self.mlp = GatedMlp(sizes)

    def __call__(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Run a block behind new context; both are written to the cache."""
        x = x + self.self_attn(self.input_layernorm(x), context, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(nn.Module):
    """A drafter.

    Args:
        settings: what config.json says.
        features: how many layers of the target it reads.
        target_dim: the hidden size of the target.
        ids: the target's ids of its logits, uint32 [n]; None: they are the target's.
        output: columns of an output layer of its own, if it has one.
        embedding: rows of an embedding of its own, if it has one.
        biases: which projections have one.
    """

    def __init__(
        self,
        settings: DFlashSettings,
        features: int,
        target_dim: int,
        *,
        ids: mx.array | None = None,
        output: int | None = None,
        embedding: int | None = None,
        biases: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        sizes = settings.sizes
        self.fc = nn.Linear(features * target_dim, sizes.dim, bias="fc" in biases)
        self.hidden_norm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.layers = [DFlashLayer(settings, i, biases) for i in range(sizes.layers)]
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        if output is not None:
            self.lm_head = nn.Linear(sizes.dim, output, bias=False)
        if embedding is not None:
            self.embed_tokens = nn.Embedding(embedding, sizes.dim)
        self._settings, self._ids = settings, ids

    @property
    def settings(self) -> DFlashSettings:
        """What config.json says."""
        return self._settings

    @property
    def ids(self) -> mx.array | None:
        """The target's ids of its logits, uint32 [n]; None: all, in their order."""
        return self._ids

    @property
    def depth(self) -> int:
        """The most drafts that it is good for: a block without its first token."""
        return self._settings.block - 1

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each layer."""
        return [KVCache() for _ in self.layers]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the context that layers read, [1, positions, dim].

        Args:
            outputs: of the target's layers, in order, [1, positions, target_dim] each.
        """
        dtype = self.norm.weight.dtype  # the target's may be another
        wide = mx.concatenate([each.astype(dtype) for each in outputs], axis=-1)
        out: mx.array = self.hidden_norm(self.fc(wide))
        return out


class DFlash:
    """A drafter on its target.

    Args:
        head: the drafter.
        target: shows the layers, embeds tokens, and makes logits where the drafter has
            no output layer of its own.
        layers: of the target, whose outputs it reads, from 0.
    """

    def __init__(
        self, head: DFlashHead, target: HiddenStates, layers: Sequence[int]
    ) -> None:
        self.head, self.layers = head, tuple(layers)
        self._target = target
        self._last = len(target.parts.layers) - 1

    def states(self, states: States) -> mx.array:
        """Return the context of positions, [1, positions, dim]."""
        return self.head.joined(
            [
                states.after_norm if index == self._last else states.layer(index)
                for index in self.layers
            ]
        )

    def history(self, context: mx.array, caches: Sequence[Any]) -> None:
        """Write the keys and values of context [1, positions, dim]."""
        for layer, cache in zip(self.head.layers, caches, strict=True):
            layer.self_attn.write(context, cache)

    def block(
        self, context: mx.array, token: mx.array, caches: Sequence[Any], count: int
    ) -> mx.array:
        """Return the logits of the drafts behind a token, [1, count, vocab].

        Args:
            context: of the positions before the token that the caches lack,
                [1, positions, dim]; at least one.
            token: the newest token, [1, 1].
            caches: the context and the whole block are written to them, in this order.
            count: how many drafts, at most the head's depth.
        """
        settings = self.head.settings
        masks = mx.full((1, self.head.depth), settings.mask_token, token.dtype)
        x = self._embedded(mx.concatenate([token, masks], axis=1))
        for layer, cache in zip(self.head.layers, caches, strict=True):
            x = layer(x, context, cache)
        normed = self.head.norm(x[:, 1 : 1 + count])
        if "lm_head" not in self.head:
            return self._target.head(normed)
        logits: mx.array = self.head.lm_head(normed)
        return logits

    def _embedded(self, tokens: mx.array) -> mx.array:
        """Return embeddings as the target's first layer gets them, Gemma's scaled."""
        if "embed_tokens" in self.head:
            own: mx.array = self.head.embed_tokens(tokens)
            return own
        embedded = self._target.embed(tokens, scaled=True)
        return embedded.astype(self.head.norm.weight.dtype)
