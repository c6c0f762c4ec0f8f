"""Norms and products in float64."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Tensors = Mapping[str, NDArray[np.generic]]


def weight(tensors: Tensors, name: str) -> Array:
    """Return a tensor as float64."""
    return np.asarray(tensors[name], dtype=np.float64)


def below(tensors: Tensors, prefix: str) -> dict[str, NDArray[np.generic]]:
    """Return the tensors under a prefix, by their names without the prefix."""
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
