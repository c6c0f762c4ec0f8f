"""Noise of rejection and block verification, keyed by round and by position.

The key of a draw is (seed, start of the round, position, purpose). Without the start of
the round, a round would repeat the draws that an earlier round discarded at the same
positions. In block verification, these draws have helped to decide how many tokens the
earlier round accepted. So repeating them would bias the generated text.

A key has two words: the start of the round, XORed with the first word of the stream's
key, and the position, XORed with the second. A sum in one word would not do: (3, 5) and
(4, 4) have the same sum.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

# Purposes, for `gumbel.stream_key`; `gumbel.CHOICE` is 1.
COIN = 2  # accepts or rejects a drafted token
RESIDUAL = 3  # draws the correction or the bonus
DRAFT = 4  # draws the drafted tokens
XTC = 5  # keyed by position alone: it is part of the target's distribution


def round_keys(stream: mx.array, starts: mx.array, positions: mx.array) -> mx.array:
    """Return one key per draw, uint32 [rows, 2]; each (start, position) has its own.

    `stream` is uint32 [2] or [rows, 2], from `stream_key`. `starts` are the positions
    of the rounds' first new tokens, and `positions` those of the drawn tokens: integer
    [rows] or [].
    """
    starts, positions = mx.broadcast_arrays(starts, positions)
    return stream ^ mx.stack([starts, positions], axis=-1).astype(mx.uint32)


@cache
def _coins() -> Callable[[mx.array], mx.array]:
    return mx.vmap(lambda key: mx.random.uniform(shape=(), dtype=mx.float32, key=key))


def coins(keys: mx.array) -> mx.array:
    """Return a uniform number from [0, 1) for each key: uint32 [rows, 2] to [rows]."""
    return _coins()(keys)
