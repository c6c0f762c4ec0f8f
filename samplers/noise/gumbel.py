"""Noise that depends on (seed, position, purpose, token id) and on nothing else.

Position i has a Gumbel vector over token ids. The token with the largest sum of
log-probability and noise is a sample of the distribution (Gumbel-max; Maddison et al.,
"A* Sampling", 2014). So two models with the same noise mostly choose alike.

A value of `mx.random` depends on the shape of its draw, so each position has one draw
of a fixed width. Keys are made on the device: Threefry is a keyed function, so a key
can be a hash of the seed and the purpose, with the position added to its first word.
"""

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

# The most values and rows of a block of noise; a block has at least one row
BLOCK_VALUES = 2**20
MOST_ROWS = 64

CHOICE = 1  # a purpose; `round_keys` has more of them


def stream_key(seed: int, purpose: int) -> mx.array:
    """Return the key words of (seed, purpose), uint32 [2]; seed is below 2**64."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    words = mx.random.split(mx.array([low, high], dtype=mx.uint32))[0]
    return mx.random.split(words ^ mx.array([purpose, 0], dtype=mx.uint32))[0]


@cache
def _gumbel(width: int) -> Callable[[mx.array], mx.array]:
    return mx.vmap(lambda key: mx.random.gumbel((width,), mx.float32, key=key))


def gumbel_of(keys: mx.array, width: int) -> mx.array:
    """Return noise over all token ids by key: uint32 [rows, 2] to [rows, width]."""
    return _gumbel(width)(keys)


def gumbel(key: mx.array, positions: mx.array, width: int) -> mx.array:
    """Return the noise of each position over all token ids, float32 [rows, width].

    `key` is uint32 [2], from `stream_key`. Positions are integer [rows], counted from 0
    over the whole sequence. `width` is the same for every draw of a sequence.
    """
    return gumbel_of(position_keys(key, positions), width)


def position_keys(key: mx.array, positions: mx.array) -> mx.array:
    """Return one key for each position: uint32 [2] and integer [rows] to [rows, 2]."""
    first = positions.astype(mx.uint32)
    return key + mx.stack([first, mx.zeros_like(first)], axis=-1)


class GumbelNoise:
    """The noise of one purpose and seed, drawn for a block of positions at once.

    Arguments and values are those of `gumbel`, whose dozen small operations slow down a
    small model. With blocks most steps only take a slice. At most two blocks are held:
    8 MiB.
    """

    def __init__(self, key: mx.array, width: int) -> None:
        self._key = key
        self._width = width
        self._block = max(1, min(MOST_ROWS, BLOCK_VALUES // width))
        self._drawn: dict[int, mx.array] = {}

    def rows(self, positions: Sequence[int]) -> mx.array:
        """Return the noise of these positions, float32 [rows, width]."""
        first, count = positions[0], len(positions)
        if count > self._block or positions[-1] - first != count - 1:
            return gumbel(self._key, mx.array(list(positions)), self._width)
        skip = first % self._block
        near = self._drawn_from(first - skip)[skip : skip + count]
        if len(near) == count:
            return near
        far = self._drawn_from(first - skip + self._block)[: count - len(near)]
        return mx.concatenate([near, far])

    def _drawn_from(self, start: int) -> mx.array:
        """Return the block that begins at `start`; forget blocks not next to it."""
        if start not in self._drawn:
            near = range(start - self._block, start + self._block + 1)
            self._drawn = {s: rows for s, rows in self._drawn.items() if s in near}
            positions = mx.arange(start, start + self._block)
            self._drawn[start] = gumbel(self._key, positions, self._width)
        return self._drawn[start]
