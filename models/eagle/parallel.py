"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one forward (arXiv 2602.01469).

The newest pair of states and token gives the first drafted token (see `head`). A masked
position follows for each further token. A masked position has a mask as its token. In
place of the target's hidden states a trained state passes through the same `fc`:

    positions m .. n-1    pairs committed since the last draft; the last one gives d_1
    positions n, n+1      (fc(mask_hidden), mask) give d_2 and d_3

Attention is causal, so a drafted token does not depend on the number of tokens after
it. No drafted token is an input of another.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.models.checkpoints.draft_head import ChooseNext
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.eagle.config import EagleSettings
from mlx_speculation.models.eagle.head import Eagle, EagleHead


class PEagleHead(EagleHead):
    """The network of a P-EAGLE head; its settings have a mask."""

    def __init__(
        self,
        settings: EagleSettings,
        features: int,
        ends: OwnEnds,
        norms: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(settings, features, ends, norms)
        assert settings.mask is not None
        self.mask_hidden = mx.zeros(features * settings.target_dim)
        self._features, self._mask = features, settings.mask

    @property
    def depth(self) -> int | None:  # type: ignore[override]
        """Largest number of tokens that the head was trained to draft; None: any."""
        return self._mask.depth

    def masked(self, batch: int, count: int) -> tuple[mx.array, mx.array]:
        """Return states [batch, count, dim] and tokens [batch, count] for masks."""
        parts: Any = mx.split(self.mask_hidden[None, None], self._features, axis=-1)
        state = self.joined(parts)
        states = mx.broadcast_to(state, (batch, count, state.shape[-1]))
        return states, mx.full((batch, count), self._mask.token, mx.uint32)


class PEagle(Eagle):
    """A head on its target; see `Eagle` and `ParallelHead`."""

    head: PEagleHead

    def new_caches(self) -> list[Any]:
        """Return new caches, one for each layer."""
        return self.head.new_caches()[0]

    def draft(
        self,
        hidden: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Write pairs to the caches, and draft after them; see `ParallelHead`."""
        if count > 1:
            states, masks = self.head.masked(len(tokens), count - 1)
            hidden = mx.concatenate([hidden, states], axis=1)
            tokens = mx.concatenate([tokens.astype(mx.uint32), masks], axis=1)
        x = self._run(0, hidden, tokens, caches)
        logits = self._output(0, x[:, -count:]).logits
        for index in range(count):
            choose(logits[:, index])
