"""An EAGLE-3 head as a module (arXiv 2503.01840), and on its target.

Position i of its cache pairs the outputs of target layers at i with token i + 1:

    g = fc([low | middle | high])              or the head's own x at i - 1
    x = g + attention([norm(E[t]) | norm(g)])  queries, keys and values read both
    x = x + mlp(norm(x))
    logits = lm_head(norm(x))                  of the draft vocabulary; x is recycled

The next step reads the recycled x as its g. The target's outputs go through `fc` as
soon as their positions are committed, so they have the shape of recycled states. One
forward writes committed positions and makes the first drafted token.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_speculation.models.checkpoints.draft_head import (
    Ends,
    HeadOnTarget,
    HeadOutput,
)
from mlx_speculation.models.checkpoints.joined_head import JoinedHead, OwnEnds
from mlx_speculation.models.eagle.config import AFTER_NORM, EagleSettings
from mlx_speculation.models.eagle.layers import (
    EagleLayer,
    GemmaEagleLayer,
    LaterLayer,
)
from mlx_speculation.models.introspect.taps import States


class EagleHead(JoinedHead):
    """The network of an EAGLE-3 head."""

    chained, depth = False, None  # each token takes all layers; no limit of tokens

    def __init__(
        self,
        settings: EagleSettings,
        features: int,  # how many layers of the target the head reads
        ends: OwnEnds,
        # Norms before `fc`: "each": one for each target layer; "joined": one over all
        norms: frozenset[str] = frozenset(),
    ) -> None:
        width, eps = settings.target_dim, settings.layer.rms_norm_eps
        dim = settings.layer.hidden_size
        super().__init__(dim, eps, features * width, ends, settings.gemma)
        if "each" in norms:
            self.fc_norm = [nn.RMSNorm(width, eps=eps) for _ in range(features)]
        if "joined" in norms:
            self.input_norm = nn.RMSNorm(features * width, eps=eps)
        if not settings.projected:
            del self["fc"]
        self.midlayer: Any = (
            EagleLayer(settings)
            if settings.gemma is None
            else GemmaEagleLayer(settings, settings.gemma)
        )
        layers = range(1, len(settings.windows))
        self.later = [LaterLayer(settings, i) for i in layers]
        self._settings = settings

    def new_caches(self) -> list[list[Any]]:
        """Return new caches, one for each decoder layer."""
        windows = self._settings.windows
        return [[KVCache() if w is None else RotatingKVCache(w) for w in windows]]

    @property
    def windowed(self) -> bool:
        """Return whether one of its layers has a window."""
        return any(window is not None for window in self._settings.windows)

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the head's input states [batch, positions, dim].

        `outputs` are those of the target's layers to read, each [batch, positions,
        target_dim].
        """
        parts = [each.astype(self.dtype) for each in outputs]
        if "fc_norm" in self:
            parts = [n(each) for n, each in zip(self.fc_norm, parts, strict=True)]
        wide = mx.concatenate(parts, axis=-1)
        if "input_norm" in self:
            wide = self.input_norm(wide)
        if "fc" not in self:
            return wide
        out: mx.array = self.fc(wide)
        return out

    def run(
        self, embedded: mx.array, state: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        """Run the positions after the cached ones; inputs [batch, positions, dim]."""
        x: mx.array = self.midlayer.run(embedded, state, caches[0])
        for layer, cache in zip(self.later, caches[1:], strict=True):
            x = layer.run(x, cache)
        return x

    def logits(self, normed: mx.array, target: Ends) -> mx.array:
        """Return logits of normed states, by the output layer of head or target."""
        result, scale = super().logits(normed, target), self._settings.logit_scale
        return result if scale == 1 else result * scale

    def ends(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the recycled and the normed states for x [batch, positions, dim]."""
        normed = self.norm(x)
        return normed if self._settings.norm_output else x, normed


class Eagle(HeadOnTarget):
    """A head on its target; the head reads the outputs of the target's `layers`.

    The input state at i is row i of `states`, or the recycled state of position i - 1.
    """

    def __init__(self, head: EagleHead, target: Ends, layers: Sequence[int]) -> None:
        self.head: EagleHead = head
        self.layers, self._target = tuple(layers), target

    def states(self, states: States) -> mx.array:
        """Return the head's input states [batch, positions, dim] from the target's."""
        return self.head.joined(
            [
                states.after_norm if index == AFTER_NORM else states.layer(index)
                for index in self.layers
            ]
        )

    def _run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        embedded = self.head.embedded(tokens, self._target)
        return self.head.run(embedded, hidden, caches)

    def _output(self, layer: int, states: mx.array) -> HeadOutput:
        recycled, normed = self.head.ends(states)
        return HeadOutput(recycled, self.head.logits(normed, self._target))
