"""Norms, activations and attention, in float64."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Weights = Mapping[str, Array]
Config = Mapping[str, Any]


def rms(x: Array, weight: Array | None, eps: float, offset: float = 0.0) -> Array:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis."""
    size = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)
    scaled: Array = x / size
    return scaled if weight is None else scaled * (weight + offset)


def linear(weights: Weights, name: str, x: Array) -> Array:
    """`x W^T + b` with `name.weight` [out, in] and, if the file has it, `name.bias`."""
    out: Array = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1.0 + np.tanh(inner)))


def softcap(x: Array, cap: float | None) -> Array:
    """`cap tanh(x / cap)`; x as it is when there is no cap."""
    return np.asarray(cap * np.tanh(x / cap)) if cap else x


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    seen: NDArray[np.bool_],
    scale: float,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention with grouped key heads: [rows, nh, width].

    Queries are [rows, nh, hd], keys [columns, nkv, hd], values [columns, nkv, width].
    `seen` [rows, columns] is true where a row may see a column. `sinks` [nh] are one
    more score per head, without a value.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(side, group, axis=1) for side in (keys, values))
    scores = np.einsum("rhd,chd->hrc", queries, keys) * scale
    scores = np.where(seen[None], scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=-1)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = shares / shares.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hrc,chd->rhd", shares[..., : len(keys)], values))
