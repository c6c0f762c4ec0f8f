"""Rotary positions: which angles, and how they turn features."""

from typing import Any

import numpy as np

from support.references.numerics import Array, Ids


def inverse_frequencies(dims: int, base: float) -> Array:
    """Return base^(-2i/dims) for each of the dims / 2 pairs."""
    return np.asarray(base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims))


def llama3_frequencies(dims: int, base: float, scaling: dict[str, Any]) -> Array:
    """Return Llama 3's angles: slow ones divided by a factor, a ramp between."""
    angles = inverse_frequencies(dims, base)
    waves = 2 * np.pi / angles
    old = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((old / waves - low) / (high - low), 0, 1)
    return np.asarray(angles * ((1 - smooth) / scaling["factor"] + smooth))


def yarn_frequencies(dims: int, base: float, scaling: dict[str, Any]) -> Array:
    """Return YaRN's angles (arXiv 2309.00071): slow pairs slower by a factor.

    Between the pairs that turn beta_fast and beta_slow times within the old context,
    by their number, a ramp. Only where mscale and mscale_all_dim are equal: features
    are then not scaled, and `yarn_scale` has the scale of scores.
    """
    assert scaling["mscale"] == scaling["mscale_all_dim"]

    def pair(turns: float) -> float:
        ratio = scaling["original_max_position_embeddings"] / (turns * 2 * np.pi)
        return float(dims * np.log(ratio) / (2 * np.log(base)))

    low = max(np.floor(pair(scaling["beta_fast"])), 0)
    high = min(np.ceil(pair(scaling["beta_slow"])), dims - 1)
    slow = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    angles = inverse_frequencies(dims, base)
    return np.asarray(angles * (1 - slow) + angles / scaling["factor"] * slow)


def yarn_scale(scaling: dict[str, Any]) -> float:
    """Return what scores are multiplied by."""
    return float((0.1 * scaling["mscale_all_dim"] * np.log(scaling["factor"]) + 1) ** 2)


def rotate(x: Array, positions: Ids, frequencies: Array, *, pairs: bool) -> Array:
    """Turn the first features of each head by position times frequency.

    Args:
        x: [heads, n, hd]. Features past 2 * len(frequencies) stay as they are.
        positions: [n].
        frequencies: per pair of features, in radians per position.
        pairs: True: features 2i and 2i + 1 are a pair; False: i and i + half.
    """
    half = len(frequencies)
    angle = positions[:, None] * frequencies  # [n, half]
    cos, sin = np.cos(angle), np.sin(angle)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairs:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    left, right = first * cos - second * sin, first * sin + second * cos
    if pairs:
        both = np.stack([left, right], axis=-1).reshape(turned.shape)
    else:
        both = np.concatenate([left, right], axis=-1)
    return np.concatenate([both, rest], axis=-1)
