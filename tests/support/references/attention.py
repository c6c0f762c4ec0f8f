"""Attention layers over a whole history: grouped, latent, and latent with an indexer.

Tensors have the names that stand below "self_attn." on disk, or below what the
family calls it. Positions count from 0; a constant shift changes nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from support.references.numerics import (
    Array,
    Mask,
    Tensors,
    attend,
    causal_mask,
    join_heads,
    linear,
    rms_norm,
    sigmoid,
    split_heads,
    weight,
)
from support.references.rope import rotate


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        eps: of the norms of queries and keys, where the file has them.
        angles: of the rotation; empty: there is none.
        pairs: whether neighbouring features are rotated together.
        window: how many keys a query sees, itself included; None: all before it.
        gate: what the output is gated with: "queries": the second half of each
            head of q_proj; "heads": one number per head, of g_proj.
        value_scale: what values are multiplied by.
        norms: the names of the norms of queries and keys.
        out: the name of the last projection.
    """

    heads: int
    kv_heads: int
    eps: float = 1e-6
    angles: Array = field(default_factory=lambda: np.zeros(0))
    pairs: bool = False
    window: int | None = None
    gate: Literal["none", "queries", "heads"] = "none"
    value_scale: float = 1.0
    norms: tuple[str, str] = ("q_norm", "k_norm")
    out: str = "o_proj"

    def __call__(self, tensors: Tensors, x: Array) -> Array:
        """Attend causally within x [n, H]; returns [n, H]."""
        queries, keys, values, gate = self._project(tensors, x)
        if f"{self.norms[0]}.weight" in tensors:
            scales = [weight(tensors, f"{name}.weight") for name in self.norms]
            queries = rms_norm(queries, scales[0], self.eps)
            keys = rms_norm(keys, scales[1], self.eps)
        positions = np.arange(len(x))
        sinks = "attention_sink_bias"
        mixed = attend(
            rotate(queries, positions, self.angles, pairs=self.pairs),
            rotate(keys, positions, self.angles, pairs=self.pairs),
            values * self.value_scale,
            scale=queries.shape[-1] ** -0.5,
            mask=causal_mask(len(x), self.window),
            sinks=weight(tensors, sinks) if sinks in tensors else None,
        )
        return linear(tensors, self.out, join_heads(mixed * gate))

    def _project(
        self, tensors: Tensors, x: Array
    ) -> tuple[Array, Array, Array, Array | float]:
        """Return queries, keys and values [heads, n, hd], and a gate."""
        if "query_key_value.weight" in tensors:
            joined = linear(tensors, "query_key_value", x)
            heads = split_heads(joined, self.heads + 2 * self.kv_heads)
            keys, values = np.split(heads[self.heads :], 2)
            return heads[: self.heads], keys, values, 1.0
        queries = split_heads(linear(tensors, "q_proj", x), self.heads)
        keys = split_heads(linear(tensors, "k_proj", x), self.kv_heads)
        values = split_heads(linear(tensors, "v_proj", x), self.kv_heads)
        if self.gate == "queries":
            queries, gate = np.split(queries, 2, axis=-1)
            return queries, keys, values, sigmoid(gate)
        if self.gate == "heads":
            numbers = sigmoid(linear(tensors, "g_proj", x))  # [n, heads]
            return queries, keys, values, numbers.T[..., None]
        return queries, keys, values, 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values from a narrow state.

    Attributes:
        heads: their number.
        nope: features of queries and keys without positions.
        rank: the width of the narrow state.
        angles: of the features with positions.
        eps: of the norms of the narrow states.
        pairs: whether neighbouring features are rotated together.
        query_scale: what queries are multiplied by.
        state_scale: what the normed narrow state is multiplied by.
        score_scale: what scores are multiplied by, beside the usual.
        gated: whether each head's output is gated by a number, of g_proj.
        out: the name of the last projection.
        indexer: what chooses the keys; None: all are seen.
    """

    heads: int
    nope: int
    rank: int
    angles: Array
    eps: float = 1e-6
    pairs: bool = True
    query_scale: float = 1.0
    state_scale: float = 1.0
    score_scale: float = 1.0
    gated: bool = False
    out: str = "o_proj"
    indexer: "Indexer | None" = None

    def __call__(self, tensors: Tensors, x: Array) -> Array:
        """Attend causally within x [n, H]; returns [n, H]."""
        narrow, place = x, "q_proj"
        if "q_a_proj.weight" in tensors:
            narrow = linear(tensors, "q_a_proj", x)
            narrow, place = self._normed(tensors, "q_a_layernorm", narrow), "q_b_proj"
        queries = split_heads(linear(tensors, place, narrow), self.heads)
        queries = queries * self.query_scale
        joined = linear(tensors, "kv_a_proj_with_mqa", x)
        state = self._normed(tensors, "kv_a_layernorm", joined[:, : self.rank])
        opened = linear(tensors, "kv_b_proj", state * self.state_scale)
        keys, values = np.split(split_heads(opened, self.heads), [self.nope], axis=-1)
        positions = np.arange(len(x))
        shared = rotate(
            joined[None, :, self.rank :], positions, self.angles, pairs=self.pairs
        )
        turned = rotate(
            queries[..., self.nope :], positions, self.angles, pairs=self.pairs
        )
        mask = causal_mask(len(x))
        if self.indexer is not None:
            mask = self.indexer(tensors, x, narrow, mask)
        mixed = attend(
            np.concatenate([queries[..., : self.nope], turned], axis=-1),
            np.concatenate([keys, np.repeat(shared, self.heads, axis=0)], axis=-1),
            values,
            scale=self.score_scale * queries.shape[-1] ** -0.5,
            mask=mask,
        )
        if self.gated:
            mixed = mixed * sigmoid(linear(tensors, "g_proj", x)).T[..., None]
        return linear(tensors, self.out, join_heads(mixed))

    def _normed(self, tensors: Tensors, name: str, x: Array) -> Array:
        return rms_norm(x, weight(tensors, f"{name}.weight"), self.eps)


@dataclass(frozen=True, slots=True)
class Indexer:
    """What chooses the keys that DeepSeek's sparse attention sees.

    Attributes:
        heads: their number.
        angles: of the first features.
        pairs: whether neighbouring features are rotated together.
        top: how many keys a query sees.
    """

    heads: int
    angles: Array
    pairs: bool
    top: int

    def __call__(self, tensors: Tensors, x: Array, narrow: Array, mask: Mask) -> Mask:
        """Return which keys are seen: [n, n].

        Args:
            tensors: the attention's; the indexer's stand below "indexer.".
            x: [n, H].
            narrow: [n, rank of the queries], normed.
            mask: [n, n], what may be seen.
        """
        positions = np.arange(len(x))
        queries = split_heads(linear(tensors, "indexer.wq_b", narrow), self.heads)
        keys = linear(tensors, "indexer.wk", x)
        mean = keys.mean(axis=-1, keepdims=True)
        keys = (keys - mean) / np.sqrt(keys.var(axis=-1, keepdims=True) + 1e-5)
        keys = keys * weight(tensors, "indexer.k_norm.weight")
        keys = keys + weight(tensors, "indexer.k_norm.bias")
        queries = rotate(queries, positions, self.angles, pairs=self.pairs)
        keys = rotate(keys[None], positions, self.angles, pairs=self.pairs)
        shares = linear(tensors, "indexer.weights_proj", x).T[..., None]
        found = np.maximum(queries @ keys.transpose(0, 2, 1), 0)
        scores = np.where(mask, (shares * found).sum(axis=0), -np.inf)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, : self.top]
        chosen = np.zeros_like(mask)
        np.put_along_axis(chosen, order, True, axis=-1)
        return chosen & mask
