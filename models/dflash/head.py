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
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.checkpoints.joined_head import JoinedHead, OwnEnds
from mlx_speculation.models.dflash.config import DFlashSettings
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States


class DFlashAttention(qwen3.Attention):
    """Qwen 3's attention, of a block to the context and to itself.

    Args:
        args: of the drafter's layers.
        window: how many positions it sees; None: all.
        causal: whether it sees no position behind its own.
    """

    def __init__(self, args: qwen3.ModelArgs, window: int | None, causal: bool) -> None:
        super().__init__(args)
        self._window, self._causal = window, causal

    def write(self, rows: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Write keys and values of rows, and return all that the cache then holds."""
        keys = self.k_norm(_by_head(self.k_proj(rows), self.n_kv_heads))
        values = _by_head(self.v_proj(rows), self.n_kv_heads)
        keys = self.rope(keys, offset=cache.offset)
        found: tuple[mx.array, mx.array] = cache.update_and_fetch(keys, values)
        return found

    def attend(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Attend from a block [1, block, dim] behind new context [1, rows, dim]."""
        start, size = cache.offset + context.shape[1], x.shape[1]
        queries = self.q_norm(_by_head(self.q_proj(x), self.n_heads))
        queries = self.rope(queries, offset=start)
        keys, values = self.write(mx.concatenate([context, x], axis=1), cache)
        mask = None
        if self._window is not None:
            shown = min(start + size, self._window - 1 + size)
            keys, values = keys[..., -shown:, :], values[..., -shown:, :]
            mask = self._mask(size, shown, self._window)
        found = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        out: mx.array = self.o_proj(found.swapaxes(1, 2).flatten(2))
        return out

    def _mask(self, size: int, shown: int, window: int) -> mx.array:
        """Return which of the last `shown` positions the last `size` see."""
        behind = mx.arange(shown - size, shown)[:, None] - mx.arange(shown)[None]
        mask = behind < window
        return mask & (behind >= 0) if self._causal else mask


def _by_head(x: mx.array, heads: int) -> mx.array:
    """Return [batch, positions, heads * size] as [batch, heads, positions, size]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


class DFlashLayer(qwen3.TransformerBlock):
    """Qwen 3's decoder layer, with the attention above."""

    def __init__(self, settings: DFlashSettings, index: int) -> None:
        super().__init__(settings.layers)
        self.self_attn = DFlashAttention(
            settings.layers, settings.windows[index], settings.causal
        )

    def run(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Run a block behind new context; both are written to the cache."""
        x = x + self.self_attn.attend(self.input_layernorm(x), context, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(JoinedHead):
    """A drafter.

    Args:
        settings: what config.json says.
        width: numbers that it reads of each position of the target.
        ends: those of its own.
    """

    def __init__(self, settings: DFlashSettings, width: int, ends: OwnEnds) -> None:
        dim, eps = settings.layers.hidden_size, settings.layers.rms_norm_eps
        super().__init__(dim, eps, width, ends)
        self.hidden_norm = nn.RMSNorm(dim, eps=eps)
        self.layers = [DFlashLayer(settings, i) for i in range(len(settings.windows))]
        self.settings = settings

    @property
    def depth(self) -> int:
        """The most drafts that it is good for: a block without its first token."""
        return self.settings.block - 1

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each layer."""
        return [KVCache() for _ in self.layers]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the context, [1, positions, dim], of layers' [1, positions, width]."""
        parts = [each.astype(self.dtype) for each in outputs]
        wide = mx.concatenate(parts, axis=-1)
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
        block = mx.concatenate([token, masks], axis=1)
        # As the target's first layer gets them: Gemma's are scaled.
        x = self.head.embedded(block, self._target, scaled=True)
        for layer, cache in zip(self.head.layers, caches, strict=True):
            x = layer.run(x, context, cache)
        return self.head.logits(self.head.norm(x[:, 1 : 1 + count]), self._target)
