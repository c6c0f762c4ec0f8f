"""The noise of some token ids only, with the values that the full draw has.

`mx.random` draws a whole vector. Its numbers come from Threefry-2x32 with 20 rounds, a
keyed function of a counter (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", 2011), and mlx counts so for a vector of n = 2 h or 2 h + 1 numbers:

    number                           counter             word
    i below h                        (i, i + n - h)      first
    h, where n is odd                (h, 0)              first
    n - h + i, with i below h        (i, i + n - h)      second

So any of them can be computed alone. That takes some 150 small operations, which is
more than a full draw of 16,384 numbers takes on a CPU, and more than one of any length
on a GPU. `mx.random` has no as cheap a way: 50 ids in each of 8 rows of 49,152 take 1.0
ms of a CPU here and 4.5 with a key for each row; with a key for each id they would take
0.2, and rows in which every id is drawn 12.
"""

import mlx.core as mx
import numpy as np

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA
LARGEST = float(np.nextafter(np.float32(1), np.float32(0)))


def gumbel_at(keys: mx.array, ids: mx.array, width: int) -> mx.array:
    """Return some values of `mx.random.gumbel((width,), key=key)` for each key.

    Args:
        keys: uint32 [rows, 2].
        ids: integer [rows, k], which values, from 0 to `width` - 1.
        width: of the full draw.
    """
    words = random_words(keys, ids.astype(mx.uint32), width).astype(mx.float32)
    uniform = mx.minimum(words / float(2**32 - 1), LARGEST)
    return -mx.log(-mx.log(uniform))


def random_words(keys: mx.array, ids: mx.array, width: int) -> mx.array:
    """Return the words of a full draw of `width` words at some places.

    uint32 [rows, 2] and [rows, k] to [rows, k].
    """
    pairs = width // 2
    firsts = width - pairs  # ids from here on are second words
    is_first = ids < firsts
    left = mx.where(is_first, ids, ids - firsts)
    right = mx.where(left == pairs, 0, left + firsts)  # the last of an odd width
    first, second = threefry(keys, left, right)
    return mx.where(is_first, first, second)


def threefry(
    keys: mx.array, left: mx.array, right: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the two words of Threefry-2x32-20 for counters [rows, k], uint32."""
    one, two = keys[:, :1], keys[:, 1:]
    schedule = one, two, one ^ two ^ PARITY
    left, right = left + one, right + two
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            left = left + right
            right = left ^ ((right << bits) | (right >> (32 - bits)))
        left = left + schedule[(group + 1) % 3]
        right = right + (schedule[(group + 2) % 3] + (group + 1))
    return left, right
