"""A DFlash2 drafter: DFlash with convolutions in its layers, and a selector.

    a = norm(x)
    x = x + out(attention(in(a)))     the kernels of `in` and `out` come from a
    b = norm(x)
    x = x + out(mlp(in(b)))           those of this `in` and `out` from b

    u = logits of norm(x), [drafted tokens, vocab];  C = the best few ids of each row
    score(p, c) = u[c] + sum(A[p] * (P norm(x)) * B[c])   for c in C after the token p

`in` and `out` are the two convolutions of a `BlockConvolution`. The context passes
through none of them. A, B and P are matrices of the selector. For the first drafted
token, p is the newest token. Of the tokens before c, a score depends only on p, so no
path through the candidates needs another forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.draft_head import ChooseNext
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.dflash import DFlash, DFlashHead, DFlashLayer
from mlx_speculation.models.dflash2.config import DFlash2Settings

Side = Callable[[mx.array], mx.array]


class BlockConvolution(nn.Module):
    """Two causal convolutions over the rows of one block, around a part of a layer.

        conv(y)[i, c] = sum over t <= i of
                        (base[t, c] + delta[i, t, c // group]) * y[i - t, c]

    Row i reads `taps` rows, itself included. `group` neighbouring channels share a
    delta. `delta` of both convolutions is a linear function of the rows that `sides`
    takes.
    """

    def __init__(self, dim: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, dim))
        self.kernel_projection = nn.Linear(dim, 2 * taps * (dim // group), bias=False)
        self._taps, self._group = taps, group

    def sides(self, rows: mx.array) -> tuple[Side, Side]:
        """Return both convolutions, with `delta` made of rows [batch, block, dim]."""
        shape = (*rows.shape[:2], 2, self._taps, -1)
        delta = self.kernel_projection(rows).reshape(shape)
        delta = mx.repeat(delta, self._group, axis=-1)
        kernel = self.base_kernel + delta  # [batch, block, 2, taps, dim]

        def side(index: int) -> Side:
            return lambda y: self._convolved(kernel[:, :, index], y)

        return side(0), side(1)

    def _convolved(self, kernel: mx.array, y: mx.array) -> mx.array:
        result = kernel[:, :, 0] * y
        for tap in range(1, min(self._taps, y.shape[1])):
            part = kernel[:, tap:, tap] * y[:, :-tap]
            result = result + mx.pad(part, [(0, 0), (tap, 0), (0, 0)])
        return result


class DFlash2Layer(DFlashLayer):
    """DFlash's layer, with convolutions around attention and around the MLP."""

    def __init__(self, settings: DFlash2Settings, index: int) -> None:
        super().__init__(settings.blocks, index)
        sizes = (settings.blocks.layers.hidden_size, settings.taps, settings.group)
        self.attention_conv = BlockConvolution(*sizes)
        self.mlp_conv = BlockConvolution(*sizes)

    def run(self, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        """Run a block after new context; both are written to the cache."""
        rows = self.input_layernorm(x)
        before, after = self.attention_conv.sides(rows)
        x = x + after(self.self_attn.attend(before(rows), context, cache))
        rows = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.sides(rows)
        return x + after(self.mlp(before(rows)))


class CandidateSelector(nn.Module):
    """Scores of candidates, from the row's state and the previous token."""

    def __init__(self, vocab: int, rank: int, dim: int) -> None:
        super().__init__()
        self.predecessor_codebook = mx.zeros((vocab, rank))
        self.successor_codebook = mx.zeros((vocab, rank))
        self.hidden_projection = nn.Linear(dim, rank, bias=False)

    def edges(self, state: mx.array, token: mx.array, ids: mx.array) -> mx.array:
        """Return the terms to add to candidates' logits, float32 [texts, candidates].

        `state` is the normed state of the draft's row, [texts, dim], `token` the
        previous token, [texts]. `ids` are the candidates, uint32 [texts, candidates].
        """
        mixed = self.predecessor_codebook[token] * self.hidden_projection(state)
        after = self.successor_codebook[ids].swapaxes(1, 2)
        return (mixed[:, None] @ after)[:, 0].astype(mx.float32)


class DFlash2Head(DFlashHead):
    """The network of a DFlash2 drafter; its selector knows `vocab` token ids."""

    def __init__(
        self, settings: DFlash2Settings, width: int, ends: OwnEnds, vocab: int
    ) -> None:
        blocks = settings.blocks
        layers = [DFlash2Layer(settings, i) for i in range(len(blocks.windows))]
        super().__init__(blocks, width, ends, layers)
        self.selection = settings
        dim = blocks.layers.hidden_size
        self.candidate_selector = CandidateSelector(vocab, settings.rank, dim)


class DFlash2(DFlash):
    """A drafter on its target; see `DFlash`."""

    head: DFlash2Head

    def candidates(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """Return the best ids for each drafted token, and their logits, float32.

        Both are [texts, drafted tokens, candidates], in no particular order; the ids
        are uint32. `normed` has normed states, [texts, drafted tokens, dim].
        """
        settings = self.head.selection
        logits = self._logits(normed).astype(mx.float32)
        if settings.vocab is not None:
            logits = logits[..., : settings.vocab]
        top = min(settings.top, logits.shape[-1])
        ids = mx.argpartition(logits, -top, axis=-1)[..., -top:]
        return ids, mx.take_along_axis(logits, ids, axis=-1)

    def draft(
        self,
        context: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Draft after the last token, choosing among candidates; see `DFlash`."""
        token = tokens[:, -1:]
        normed = self.rows(context, token, caches, count)
        ids, logits = self.candidates(normed)
        selector, before = self.head.candidate_selector, token[:, 0]
        for index in range(count):
            some = ids[:, index]
            edges = selector.edges(normed[:, index], before, some)
            before = choose(
                logits[:, index] + edges, some if len(some) > 1 else some[0]
            )

    def _embedded(self, block: mx.array) -> mx.array:
        result, scale = super()._embedded(block), self.head.selection.embedding_scale
        return result if scale == 1 else result * scale

    def _logits(self, normed: mx.array) -> mx.array:
        settings = self.head.selection
        logits = super()._logits(normed)
        if settings.logit_scale != 1:
            logits = logits * settings.logit_scale
        if settings.softcap is None:
            return logits
        return mx.tanh(logits.astype(mx.float32) / settings.softcap) * settings.softcap
