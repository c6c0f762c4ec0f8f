"""Noise of rejection and block verification: by round as well as by position.

A draw is keyed by (seed, position at which the round began, position, purpose). Keyed
by position alone, a draw that a round gave up would come again in the next one. Block
verification's decision looks at the draws it gives up, so its text would be biased.

The key words of (round, position) are those two numbers, each mixed with one word of
the stream's key: no two pairs share a key. Their sum would: (3, 5) and (4, 4).
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from mlx_speculation.samplers.noise.gumbel import gumbel_of

# Purposes, for `noise.stream_key`; noise.CHOICE is 1.
COIN = 2  # acceptance
RESIDUAL = 3  # the correction or bonus
DRAFT = 4  # the draft's own tokens
XTC = 5  # by position alone: it is part of the target's distribution


def round_keys(stream: mx.array, starts: mx.array, positions: mx.array) -> mx.array:
    """Return one key per draw, different for every (start, position).

    Args:
        stream: uint32 [2] or [rows, 2], from `noise.stream_key`: seed and purpose.
        starts: integer [rows] or [], the position of the round's first new token.
        positions: integer [rows] or [], the position of the token that is drawn.

    Returns:
        uint32 [rows, 2].
    """
    starts, positions = mx.broadcast_arrays(starts, positions)
    return stream ^ mx.stack([starts, positions], axis=-1).astype(mx.uint32)


@cache
def _coins() -> Callable[[mx.array], mx.array]:
    return mx.vmap(lambda key: mx.random.uniform(shape=(), dtype=mx.float32, key=key))


def coins(keys: mx.array) -> mx.array:
    """Return one uniform number from [0, 1) per key: uint32 [rows, 2] to [rows]."""
    return _coins()(keys)


def gumbel_rows(keys: mx.array, width: int) -> mx.array:
    """Return Gumbel noise over all token ids per key of `round_keys`, [rows, width]."""
    return gumbel_of(keys, width)
