"""Rotary embeddings: plain, partial, proportional, linear, llama3 and YaRN."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.references.blocks.primitives import Array, Config


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation by position."""

    frequencies: Array  # [pairs], radians per position; 2 * pairs channels are rotated
    interleaved: bool = False  # pairs are channels (2i, 2i+1), not (i, i + pairs)
    amplitude: float = 1.0  # factor of the rotated channels (YaRN)

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
    """`rope_theta`, `rope_scaling`, `rope_parameters` as one dict; the last one wins.

    If `rope_parameters` has an entry per layer type, that of full attention is read.
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

    `partial` says whether to read `partial_rotary_factor`. `mrope_section` is ignored,
    since in a text the three positions of a row are equal.
    """
    parameters = rope_parameters(config)
    parameters["rope_theta"] = float(parameters.get("rope_theta", 10000.0))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    share = float(parameters.get("partial_rotary_factor", 1.0)) if partial else 1.0
    dims = head_dim if kind == "proportional" else int(head_dim * share)
    if kind in ("default", "mrope"):
        plain = parameters["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
        return Rope(plain, interleaved)
    if kind != "proportional":
        parameters.pop("partial_rotary_factor", None)
    scaled = LlamaConfig(
        hidden_size=dims,
        num_attention_heads=1,
        head_dim=dims,
        max_position_embeddings=config.get("max_position_embeddings", 4096),
        rope_parameters={**parameters, "rope_type": kind},
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](scaled, None)
    return Rope(frequencies.numpy().astype(np.float64), interleaved, amplitude)
