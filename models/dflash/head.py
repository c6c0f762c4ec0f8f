"""The network of a block drafter (DFlash), alone and with its target.

    context = hidden_norm(fc([outputs of target layers]))     of committed positions
    x = embedding([t_n, mask, mask, ...])                     at positions n, n + 1, ...
    x = x + attention(norm(x), over context and norm(x))      each layer
    x = x + mlp(norm(x))
    logits = head(norm(x)); row j is for the token at its own position n + j

Each layer keeps its own keys and values of the context in a cache. Keys and values of a
block are dropped after the round. Rows of a full layer see the whole context and the
whole block. Rows of a layer with a window see as many positions as the window has and,
unless config.json says otherwise, no later rows of the block.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text, qwen3
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.checkpoints.draft_head import ChooseNext
from mlx_speculation.models.checkpoints.joined_head import JoinedHead, OwnEnds
from mlx_speculation.models.dflash.attention import DFlashAttention
from mlx_speculation.models.dflash.config import DFlashSettings
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States


class DFlashLayer(qwen3.TransformerBlock):
    """Qwen 3's decoder layer, with the attention of blocks."""

    def __init__(self, settings: DFlashSettings, index: int) -> None:
        super().__init__(settings.layers)
        self.self_attn = DFlashAttention(settings, index)

    def run(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Run a block after new context; both are written to the cache."""
        x = x + self.self_attn.attend(self.input_layernorm(x), context, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(JoinedHead):
    """The network of a block drafter.

    `width` is the input size of `fc`. `layers` have `run` and `self_attn.write`; None:
    DFlash's layers.
    """

    def __init__(
        self,
        settings: DFlashSettings,
        width: int,
        ends: OwnEnds,
        layers: Sequence[nn.Module] | None = None,
        gemma: gemma4_text.ModelArgs | None = None,
    ) -> None:
        dim, eps = settings.layers.hidden_size, settings.layers.rms_norm_eps
        super().__init__(dim, eps, width, ends, gemma)
        self.hidden_norm = nn.RMSNorm(dim, eps=eps)
        self.settings = settings
        count = len(settings.windows)
        self.layers: Any = list(
            layers or (DFlashLayer(settings, index) for index in range(count))
        )

    @property
    def depth(self) -> int:
        """The largest number of drafted tokens in a round."""
        return self.settings.depth

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each layer."""
        return [KVCache() for _ in self.layers]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the context [1, positions, dim].

        `outputs` are those of the target's layers, each [1, positions, target's dim].
        """
        parts = [each.astype(self.dtype) for each in outputs]
        wide = mx.concatenate(parts, axis=-1)
        out: mx.array = self.hidden_norm(self.fc(wide))
        return out


class DFlash:
    """A drafter that reads `layers` of its target, counted from 0; -1: embeddings."""

    def __init__(
        self, head: DFlashHead, target: HiddenStates, layers: Sequence[int]
    ) -> None:
        self.head, self.layers = head, tuple(layers)
        self._target = target
        self._last = len(target.parts.layers) - 1

    def outputs(self, states: States) -> list[mx.array]:
        """Return the outputs of `layers`, each [1, positions, target's dim]."""
        return [
            states.after_norm if index == self._last else states.layer(index)
            for index in self.layers
        ]

    def states(self, states: States) -> mx.array:
        """Return the context [1, positions, dim] for the target's states."""
        return self.head.joined(self.outputs(states))

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each layer."""
        return self.head.new_caches()

    def history(
        self, context: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> None:
        """Write keys and values of context [1, positions, dim]; `tokens` is unused."""
        for layer, cache in zip(self.head.layers, caches, strict=True):
            layer.self_attn.write(context, cache)

    def rows(
        self, context: mx.array, token: mx.array, caches: Sequence[Any], count: int
    ) -> mx.array:
        """Return the normed states that predict the drafts, [batch, count, dim].

        `context`, [batch, positions, dim], is that of the positions before `token` that
        are not in the caches yet, at least one. `token`, [batch, 1], is the newest
        token. The context and then the whole block are written to the caches. `count`
        is at most the head's depth.
        """
        settings = self.head.settings
        masks = mx.full(
            (len(token), settings.block - 1), settings.mask_token, token.dtype
        )
        x = self._embedded(mx.concatenate([token, masks], axis=1))
        for layer, cache in zip(self.head.layers, caches, strict=True):
            x = layer.run(x, context, cache)
        first = settings.block - settings.depth
        out: mx.array = self.head.norm(x[:, first : first + count])
        return out

    def block(
        self, context: mx.array, token: mx.array, caches: Sequence[Any], count: int
    ) -> mx.array:
        """Return logits of drafts, [batch, count, vocab]; arguments as in `rows`."""
        return self._logits(self.rows(context, token, caches, count))

    def first_logits(self, context: mx.array, token: mx.array) -> mx.array:
        """Return the logits of the drafted token after `token`, [batch, 1, vocab]."""
        return self.block(context, token, self.new_caches(), 1)

    def draft(
        self,
        context: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Draft after the last one of tokens [1, n]; see `ParallelHead`."""
        logits = self.block(context, tokens[:, -1:], caches, count)
        for index in range(count):
            choose(logits[:, index])

    def _embedded(self, block: mx.array) -> mx.array:
        # Scaled as for the target's first layer; the scale matters for Gemma.
        return self.head.embedded(block, self._target, scaled=True)

    def _logits(self, normed: mx.array) -> mx.array:
        return self.head.logits(normed, self._target)
