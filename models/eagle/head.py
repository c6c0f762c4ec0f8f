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
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_speculation.models.checkpoints.draft_checkpoint import (
    GatedMlp,
    Sizes,
    by_head,
    side_by_side,
)
from mlx_speculation.models.checkpoints.draft_head import Ends, HeadOutput
from mlx_speculation.models.eagle.config import EagleSettings
from mlx_speculation.models.introspect.taps import States


class EagleAttention(nn.Module):
    """Attention over positions; what it reads is twice as wide as what it returns.

    Args:
        sizes: the head's.
        biases: which of its projections have one.
    """

    def __init__(self, sizes: Sizes, biases: frozenset[str]) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in biases)

        wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = linear("q_proj", 2 * sizes.dim, wide)
        self.k_proj = linear("k_proj", 2 * sizes.dim, narrow)
        self.v_proj = linear("v_proj", 2 * sizes.dim, narrow)
        self.o_proj = linear("o_proj", wide, sizes.dim)
        self.rope = sizes.rope()
        self._sizes = sizes

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Attend from [batch, positions, 2 * dim] to the cache and to themselves."""
        sizes = self._sizes
        queries = self.rope(by_head(self.q_proj(x), sizes.heads), offset=cache.offset)
        keys = self.rope(by_head(self.k_proj(x), sizes.kv_heads), offset=cache.offset)
        values = by_head(self.v_proj(x), sizes.kv_heads)
        mask = create_attention_mask(x, cache)
        keys, values = cache.update_and_fetch(keys, values)
        found = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=sizes.head_dim**-0.5, mask=mask
        )
        out: mx.array = self.o_proj(side_by_side(found))
        return out


class EagleLayer(nn.Module):
    """The head's one decoder layer.

    Args:
        settings: the head's.
        biases: which projections of the attention have one.
    """

    def __init__(self, settings: EagleSettings, biases: frozenset[str]) -> None:
        super().__init__()
        sizes = settings.sizes
        self.input_layernorm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.hidden_norm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.self_attn = EagleAttention(sizes, biases)
        self.mlp = GatedMlp(sizes)
        self._normed_residual = settings.norm_before_residual

    def __call__(self, embedded: mx.array, state: mx.array, cache: Any) -> mx.array:
        """Run positions that follow the cache's; both are [batch, positions, dim]."""
        normed = self.hidden_norm(state)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._normed_residual else state
        x = residual + self.self_attn(joined, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """A head.

    Args:
        settings: what config.json says.
        features: how many layers of the target it reads.
        ids: the target's ids of its logits, uint32 [n]; None: they are the target's.
        output: whether it has an `lm_head` of its own.
        embedding: rows of an embedding of its own, if it has one.
        norms: which norms there are before `fc`: "each" layer's, the "joined" one.
        biases: which linear layers have one, of "fc" and the attention's.
    """

    def __init__(
        self,
        settings: EagleSettings,
        features: int,
        *,
        ids: mx.array | None = None,
        output: int | None = None,
        embedding: int | None = None,
        norms: frozenset[str] = frozenset(),
        biases: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        sizes, wide = settings.sizes, features * settings.target_dim
        self.fc = nn.Linear(wide, sizes.dim, bias="fc" in biases)
        if "each" in norms:
            width = settings.target_dim
            self.fc_norm = [nn.RMSNorm(width, eps=sizes.eps) for _ in range(features)]
        if "joined" in norms:
            self.input_norm = nn.RMSNorm(wide, eps=sizes.eps)
        self.midlayer = EagleLayer(settings, biases)
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        if output is not None:
            self.lm_head = nn.Linear(sizes.dim, output, bias=False)
        if embedding is not None:
            self.embed_tokens = nn.Embedding(embedding, sizes.dim)
        self._ids = ids
        self._recycles_normed = settings.norm_output

    @property
    def ids(self) -> mx.array | None:
        """The target's ids of its logits, uint32 [n]; None: all, in their order."""
        return self._ids

    @property
    def chained(self) -> bool:
        """Whether each layer makes one draft: it has one layer, which makes all."""
        return False

    @property
    def depth(self) -> int | None:
        """The most drafts that it is good for: any number."""
        return None

    def new_caches(self) -> list[list[Any]]:
        """Return a new cache for its layer."""
        return [[KVCache()]]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Return the state that positions begin with, [batch, positions, dim].

        Args:
            outputs: of the target's layers, in order, [batch, positions, target_dim].
        """
        dtype = self.norm.weight.dtype  # the target's may be another
        parts = [each.astype(dtype) for each in outputs]
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


class Eagle:
    """A head on its target, in the place of an `Mtp`.

    Args:
        head: the head.
        target: what embeds tokens and makes logits; where the head has its own, it is
            not asked.
        layers: of the target, whose outputs it reads.
    """

    def __init__(self, head: EagleHead, target: Ends, layers: Sequence[int]) -> None:
        self.head, self.layers = head, tuple(layers)
        self._target = target

    def states(self, states: States) -> mx.array:
        """Return the state that positions begin with, [batch, positions, dim]."""
        return self.head.joined([states.layer(index) for index in self.layers])

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run all positions to the end.

        Args:
            hidden: [batch, positions, dim]; at i what `states` made of position i, or
                the recycled state of position i - 1.
            tokens: ids [batch, positions]; position i has the token at i + 1.
            caches: the head's; the positions are written to them.
            layer: 0.
        """
        x = self.head.midlayer(self._embedded(tokens), hidden, caches[layer])
        return self._output(x)

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Run the last position to the end, those before it for keys and values only.

        Takes what `rows` takes, and returns one position.
        """
        if tokens.shape[1] > 1:
            self.history(hidden[:, :-1], tokens[:, :-1], caches, layer)
        return self.rows(hidden[:, -1:], tokens[:, -1:], caches, layer)

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        """Write the keys and values of positions; takes what `rows` takes.

        What else is built is never evaluated.
        """
        self.head.midlayer(self._embedded(tokens), hidden, caches[layer])

    def _embedded(self, tokens: mx.array) -> mx.array:
        if "embed_tokens" in self.head:
            own: mx.array = self.head.embed_tokens(tokens)
            return own
        return self._target.embed(tokens).astype(self.head.norm.weight.dtype)

    def _output(self, x: mx.array) -> HeadOutput:
        recycled, normed = self.head.ends(x)
        own = "lm_head" in self.head
        logits = self.head.lm_head(normed) if own else self._target.head(normed)
        return HeadOutput(recycled, logits)
