"""Rotary embeddings: plain, partial, proportional, linear, llama3 and YaRN."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.references.blocks.primitives import Array, Config


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation by position.

    Attributes:
        frequencies: [pairs], radians per position; 2 * pairs channels are rotated.
        interleaved: Pairs are channels (2i, 2i+1), not (i, i + pairs).
        amplitude: Factor of the rotated channels (YaRN).
    """

    frequencies: Array
    interleaved: bool = False
    amplitude: float = 1.0

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate x [rows, heads, hd], row i by positions[i]."""
        angles = positions[:, None, None] * self.frequencies
        cos, sin = np.cos(angles) * self.amplitude, np.sin(angles) * self.amplitude
        pairs = len(self.frequencies)
        turned, kept = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.interleaved:
            one, two = turned[..., ::2], turned[..., 1::2]
        else:
            one, two = turned[..., :pairs], turned[..., pairs:]
        first, second = one * cos - two * sin, two * cos + one * sin
        if self.interleaved:
            turned = np.stack([first, second], axis=-1).reshape(turned.shape)
        else:
            turned = np.concatenate([first, second], axis=-1)
        return np.concatenate([turned, kept], axis=-1)


def rope_parameters(config: Config) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rope_parameters` as one flat dict.

    `rope_parameters` takes precedence; if it has an entry per layer type, that of full
    attention is read.
    """
    newer: dict[str, Any] = config.get("rope_parameters") or {}
    newer = newer.get("full_attention", newer)
    older: dict[str, Any] = config.get("rope_scaling") or {}
    result = {**older, **newer}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in result and config.get(key) is not None:
            result[key] = config[key]
    return result


def rope_of(config: Config, head_dim: int, *, partial: bool, interleaved: bool) -> Rope:
    """The rotation that a config describes.

    Args:
        config: Names theta and scaling; `mrope_section` is ignored, since the rows of
            a text have three equal positions.
        head_dim: Channels of a head.
        partial: Whether `partial_rotary_factor` is meant for the drafter.
        interleaved: See `Rope`.
    """
    parameters = rope_parameters(config)
    theta = float(parameters.get("rope_theta", 10000.0))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    share = float(parameters.get("partial_rotary_factor", 1.0)) if partial else 1.0
    if kind == "proportional":
        # Pairs are (i, i + hd/2) over the whole head; pairs past the share stay.
        pairs = int(share * head_dim // 2)
        turning = theta ** (-2.0 * np.arange(pairs) / head_dim)
        turning = turning / float(parameters.get("factor", 1.0))
        still = np.zeros(head_dim // 2 - pairs)
        return Rope(np.concatenate([turning, still]), interleaved)
    dims = int(head_dim * share)
    plain = theta ** (-np.arange(0, dims, 2) / dims)
    if kind in ("default", "mrope"):
        return Rope(plain, interleaved)
    if kind == "linear":
        return Rope(plain / float(parameters["factor"]), interleaved)
    if kind == "llama3":
        return Rope(_llama3(plain, parameters), interleaved)
    if kind == "yarn":
        limit = config.get("max_position_embeddings", 4096)
        frequencies = _yarn(plain, theta, {"limit": limit, **parameters})
        return Rope(frequencies, interleaved, _yarn_amplitude(parameters))
    raise ValueError(f"unknown rope_type {kind!r}")


def _llama3(plain: Array, parameters: Config) -> Array:
    """Slow frequencies are divided by `factor`, with a ramp between two wavelengths."""
    original = float(parameters["original_max_position_embeddings"])
    low, high = (
        float(parameters["low_freq_factor"]),
        float(parameters["high_freq_factor"]),
    )
    turns = original * plain / (2.0 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - share) * plain / float(parameters["factor"]) + share * plain


def _yarn(plain: Array, theta: float, parameters: Config) -> Array:
    """YaRN (arXiv 2309.00071): a ramp over the channels between two turn counts."""
    original = float(
        parameters.get("original_max_position_embeddings") or parameters["limit"]
    )
    dims = 2 * len(plain)

    def channel(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(float(parameters.get("beta_fast") or 32.0))
    high = channel(float(parameters.get("beta_slow") or 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain / float(parameters["factor"]) * ramp + plain * (1.0 - ramp))


def mscale(factor: float, share: float) -> float:
    """`0.1 share ln(factor) + 1`; 1 if the factor is at most 1."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_amplitude(parameters: Config) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters["factor"])
    numerator, over = (
        parameters.get("mscale") or 1.0,
        parameters.get("mscale_all_dim") or 0.0,
    )
    return mscale(factor, float(numerator)) / mscale(factor, float(over))
