"""An EAGLE-3 head as a module (arXiv 2503.01840), and on its target.

Position i of its cache pairs what layers of the target returned at i with token i + 1:

    g = fc([low | middle | high])              or the head's own x at i - 1
    x = g + attention([norm(E[t]) | norm(g)])  queries, keys and values read both
    x = x + mlp(norm(x))
    logits = lm_head(norm(x))                  of the draft vocabulary; x is recycled

The layers' outputs go through `fc` as soon as they are committed, so a position of the
target's and one of the head's are of one form. It has the interface of `Mtp`, and the
same positions (`mtp.cache`): refresh and next first draft are one batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.checkpoints.draft_head import (
    Ends,
    HeadOnTarget,
    HeadOutput,
)
from mlx_speculation.models.checkpoints.joined_head import JoinedHead, OwnEnds
from mlx_speculation.models.eagle.config import EagleSettings
from mlx_speculation.models.introspect.taps import States


class EagleLayer(llama.TransformerBlock):
    """The head's one decoder layer: Llama's, but for what its attention reads."""

    def __init__(self, settings: EagleSettings) -> None:
        args, dim = settings.layer, settings.layer.hidden_size
        super().__init__(args)
        # Queries, keys and values are made of two states side by side.
        self.self_attn = llama.Attention(replace(args, hidden_size=2 * dim))
        wide = args.num_attention_heads * self.self_attn.head_dim
        self.self_attn.o_proj = nn.Linear(wide, dim, bias=False)
        self.hidden_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self._normed_residual = settings.norm_before_residual

    def run(self, embedded: mx.array, state: mx.array, cache: Any) -> mx.array:
        """Run positions that follow the cache's; both are [batch, positions, dim]."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else state
        mask = create_attention_mask(joined, cache)
        x = residual + self.self_attn(joined, mask, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(JoinedHead):
    """A head."""

    chained, depth = False, None  # its one layer makes all drafts, as many as wanted

    def __init__(
        self,
        settings: EagleSettings,  # what config.json says
        features: int,  # how many layers of the target it reads
        ends: OwnEnds,  # those of its own
        # Which norms there are before `fc`: "each" layer's, the "joined" one
        norms: frozenset[str] = frozenset(),
    ) -> None:
        width, eps = settings.target_dim, settings.layer.rms_norm_eps
        super().__init__(settings.layer.hidden_size, eps, features * width, ends)
        if "each" in norms:
            self.fc_norm = [nn.RMSNorm(width, eps=eps) for _ in range(features)]
        if "joined" in norms:
            self.input_norm = nn.RMSNorm(features * width, eps=eps)
        self.midlayer = EagleLayer(settings)
        self._recycles_normed = settings.norm_output

    def new_caches(self) -> list[list[Any]]:
        """Return a new cache for its layer."""
        return [[KVCache()]]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the state that positions begin with, [batch, positions, dim].

        It is made of the target's layers, in order, [batch, positions, target_dim].
        """
        parts = [each.astype(self.dtype) for each in outputs]
        if "fc_norm" in self:
            parts = [n(each) for n, each in zip(self.fc_norm, parts, strict=True)]
        wide = mx.concatenate(parts, axis=-1)
        if "input_norm" in self:
            wide = self.input_norm(wide)
        out: mx.array = self.fc(wide)
        return out

    def ends(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return what is recycled of states [batch, positions, dim], and their norm."""
        normed = self.norm(x)
        return normed if self._recycles_normed else x, normed


class Eagle(HeadOnTarget):
    """A head on its target.

    The state at i is what `states` made of position i, or the recycled one of i - 1.

    Args:
        head: the head.
        target: what embeds tokens and makes logits; where the head has its own, it is
            not asked.
        layers: of the target, whose outputs it reads.
    """

    def __init__(self, head: EagleHead, target: Ends, layers: Sequence[int]) -> None:
        self.head: EagleHead = head
        self.layers, self._target = tuple(layers), target

    def states(self, states: States) -> mx.array:
        """Return the state that positions begin with, [batch, positions, dim]."""
        return self.head.joined([states.layer(index) for index in self.layers])

    def _run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        embedded = self.head.embedded(tokens, self._target)
        return self.head.midlayer.run(embedded, hidden, caches[layer])

    def _output(self, layer: int, states: mx.array) -> HeadOutput:
        recycled, normed = self.head.ends(states)
        return HeadOutput(recycled, self.head.logits(normed, self._target))
