"""Norms, activations, masks and attention in float64.

Axes: n positions, d features, heads, hd head size. No batch axis anywhere.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Tensors = Mapping[str, NDArray[np.generic]]


def weight(tensors: Tensors, name: str) -> Array:
    """Return a tensor as float64."""
    return np.asarray(tensors[name], dtype=np.float64)


def below(tensors: Tensors, prefix: str) -> dict[str, NDArray[np.generic]]:
    """Return what stands under a prefix, without the prefix."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def linear(tensors: Tensors, name: str, x: Array) -> Array:
    """Return x W^T, plus the bias if the file has one."""
    product = x @ weight(tensors, f"{name}.weight").T
    if f"{name}.bias" in tensors:
        product = product + weight(tensors, f"{name}.bias")
    return product


def rms_norm(x: Array, scale: Array | None, eps: float) -> Array:
    """Return x / sqrt(mean x^2 + eps), times a scale over the last axis."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(normed if scale is None else normed * scale)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e^-x)."""
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    """Return x sigmoid(x)."""
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    """Return the tanh approximation of GELU."""
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def softmax(x: Array) -> Array:
    """Return e^x / sum e^x over the last axis; -inf gives 0."""
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return np.asarray(powers / np.sum(powers, axis=-1, keepdims=True))


def causal_mask(n: int, window: int | None = None) -> Mask:
    """Return what a query [n, 1] may see of the keys [1, n].

    Args:
        n: the number of positions.
        window: a query at p sees (p - window, p]; None: [0, p].
    """
    queries, keys = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def split_heads(x: Array, heads: int) -> Array:
    """Turn [n, heads * hd] into [heads, n, hd]."""
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def join_heads(x: Array) -> Array:
    """Turn [heads, n, hd] into [n, heads * hd]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    mask: Mask | None,
    sinks: Array | None = None,
) -> Array:
    """Return softmax(scale q k^T) v per head: [heads, n, value size].

    Args:
        queries: [heads, n, hd].
        keys: [kv heads, m, hd]; each serves heads / kv heads neighbouring queries.
        values: [kv heads, m, value size].
        scale: what the scores are multiplied by.
        mask: [n, m], True where a query sees a key; None: it sees all.
        sinks: [heads], the score of a key without a value; None: there is none.
    """
    group = queries.shape[0] // keys.shape[0]
    keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)
    scores = scale * (queries @ keys.transpose(0, 2, 1))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if sinks is None:
        return softmax(scores) @ values
    sink = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    return softmax(np.concatenate([scores, sink], axis=-1))[..., :-1] @ values


def gated_mlp(tensors: Tensors, prefix: str, x: Array) -> Array:
    """Return down(silu(gate x) * up x)."""
    gate = silu(linear(tensors, f"{prefix}gate_proj", x))
    return linear(
        tensors, f"{prefix}down_proj", gate * linear(tensors, f"{prefix}up_proj", x)
    )
