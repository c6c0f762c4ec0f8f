"""The noise of some token ids only, with the values that the full draw has.

`mx.random` draws a whole vector. Its numbers come from Threefry-2x32 with 20 rounds, a
keyed function of a counter (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", 2011), and mlx counts so for a vector of n = 2 h or 2 h + 1 numbers:

    number                           counter             word
    i below h                        (i, i + n - h)      first
    h, where n is odd                (h, 0)              first
    n - h + i, with i below h        (i, i + n - h)      second

So each number can be computed alone. That has some 150 small operations. They take
longer than a full draw of 16,384 numbers on a CPU, and longer than any full draw on a
GPU. `mx.random` is slower for few ids: 50 ids in each of 8 rows of 49,152 take 1.0 ms
here on a CPU, and 4.5 ms with a key for each row, which draws whole rows. With a key
for each id they would take 0.2 ms, but whole rows would then take 12 ms.
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
        ids: integer [rows, k], the indexes of the values, from 0 to `width` - 1.
        width: the length of the full draw.
    """
    words = random_words(keys, ids.astype(mx.uint32), width).astype(mx.float32)
    uniform = mx.minimum(words / float(2**32 - 1), LARGEST)
    return -mx.log(-mx.log(uniform))


def random_words(keys: mx.array, ids: mx.array, width: int) -> mx.array:
    """Return the words at some indexes of a full draw of `width` words.

    uint32 [rows, 2] and [rows, k] to [rows, k].
    """
    pairs = width // 2
    firsts = width - pairs  # ids from here on are second words
    is_first = ids < firsts
    left = mx.where(is_first, ids, ids - firsts)
    right = mx.where(left == pairs, 0, left + firsts)  # 0: word h of an odd width
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
