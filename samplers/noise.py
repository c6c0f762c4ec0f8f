"""Noise that depends on (seed, position, purpose, token id) and on nothing else.

Position i has a Gumbel vector over token ids. It is the same in a verify of many
rows and in a plain step, for logits of any width, and for draft and target. Adding it
to log-probabilities and taking the largest draws from their law (Gumbel-max; Maddison
et al., "A* Sampling", 2014), so two models that share the noise mostly choose alike.

`mx.random` values depend on the whole shape asked for, hence one draw of one fixed
width per position. Keys are made on the device: Threefry is a keyed function, so the
words of the key can be the hashed seed and the position.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

CHOICE = 1  # purposes: later draws for other ends get numbers of their own


def stream_key(seed: int, purpose: int) -> mx.array:
    """Return the key words of (seed, purpose), uint32 [2].

    Args:
        seed: from 0 to 2**64 - 1; both halves count.
        purpose: what the noise is for, such as `CHOICE`.
    """
    low, high = seed & 0xFFFFFFFF, seed >> 32
    words = mx.random.split(mx.array([low, high], dtype=mx.uint32))[0]
    return mx.random.split(words ^ mx.array([purpose, 0], dtype=mx.uint32))[0]


@cache
def _gumbel(width: int) -> Callable[[mx.array], mx.array]:
    return mx.vmap(lambda key: mx.random.gumbel((width,), mx.float32, key=key))


def gumbel(key: mx.array, positions: mx.array, width: int) -> mx.array:
    """Return the noise of each position over all token ids.

    Args:
        key: uint32 [2], from `stream_key`.
        positions: integer [rows], counted from 0 over the whole sequence.
        width: the number of token ids, the same for every draw of a sequence.

    Returns:
        float32 [rows, width].
    """
    first = positions.astype(mx.uint32)
    keys = key + mx.stack([first, mx.zeros_like(first)], axis=-1)
    if len(keys) == 1:  # a plain step: vmap would cost as much as the noise
        return mx.random.gumbel((width,), mx.float32, key=keys[0])[None]
    return _gumbel(width)(keys)
