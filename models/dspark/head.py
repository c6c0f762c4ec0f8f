"""A DSpark drafter as a module, and on its target (arXiv 2607.05147).

A block is run as in DFlash, but its anchor usually predicts a token too. The block's
states g make base logits, and each token d adds a bias to the logits of the next one
(see `heads`):

    logits of d_k = head(g_k) + bias(d_(k-1), g_k)            d_0 is the anchor
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.draft_head import ChooseNext
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.dflash import DFlash, DFlashHead
from mlx_speculation.models.dspark.config import DSparkSettings
from mlx_speculation.models.dspark.gemma import GemmaBlockLayer
from mlx_speculation.models.dspark.heads import (
    LogSnrEmbedding,
    MarkovHead,
    level_features,
)


class DSparkHead(DFlashHead):
    """The network of a DSpark drafter.

    The Markov head knows `rows` token ids and makes `columns` logits.
    """

    def __init__(
        self,
        settings: DSparkSettings,
        width: int,
        ends: OwnEnds,
        rows: int,
        columns: int,
    ) -> None:
        blocks, layers = settings.blocks, None
        if settings.gemma is not None:
            count = range(len(blocks.windows))
            layers = [GemmaBlockLayer(settings.gemma, blocks, i) for i in count]
        super().__init__(blocks, width, ends, layers, settings.gemma)
        self.dspark = settings
        dim, rank = blocks.layers.hidden_size, settings.rank
        if rank:
            self.markov_head = MarkovHead(settings.markov, dim, rank, rows, columns)
        if settings.log_snr is not None:
            self.log_snr = LogSnrEmbedding(dim)


class DSpark(DFlash):
    """A drafter on its target; see `DFlash`."""

    head: DSparkHead

    def draft(
        self,
        context: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Draft with the bias of each token on the next one; see `DFlash`."""
        head, token = self.head, tokens[:, -1:]
        normed = self.rows(context, token, caches, count)
        logits = self._logits(normed)
        markov: MarkovHead | None = head.get("markov_head")
        last, memory = token[:, 0], None
        for index in range(count):
            row = logits[:, index]
            if markov is not None:
                bias, memory = markov.bias(normed[:, index], last, memory)
                row = row + bias
            last = choose(row)

    def first_logits(self, context: mx.array, token: mx.array) -> mx.array:
        """Return the logits of the drafted token after `token`; see `DFlash`."""
        normed = self.rows(context, token, self.head.new_caches(), 1)
        logits = self._logits(normed)
        markov: MarkovHead | None = self.head.get("markov_head")
        if markov is None:
            return logits
        bias, _ = markov.bias(normed[:, 0], token[:, 0], None)
        return logits + bias[:, None]

    def _embedded(self, block: mx.array) -> mx.array:
        result, snr = super()._embedded(block), self.head.dspark.log_snr
        if snr is None:
            return result
        masks = block.shape[1] - 1
        levels = [snr.most] + [snr.least] * masks
        features = level_features(levels, snr.least, snr.most).astype(result.dtype)
        added = self.head.log_snr
        out: mx.array = result + added.log_snr_fc2(nn.silu(added.log_snr_fc1(features)))
        return out
