"""mlx's affine quantization on disk, in numpy.

A group of weights w along the last axis is stored as w = scale * q + bias with
unsigned q; the q of a row form one little-endian stream of bits in 32-bit words.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]


def round_half(values: Floats) -> Floats:
    """The nearest float16 of each value, still as float32."""
    return values.astype(np.float16).astype(np.float32)


def quantize(weight: Floats, bits: int, group: int) -> tuple[Words, Floats, Floats]:
    """Words, scales and biases of a matrix; scales and biases are float16 values.

    A few ranges narrower than the group's own are tried, and the one with the least
    squared error kept.
    """
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    top = 2**bits - 1
    best: tuple[Floats, Floats, Floats, Floats] | None = None
    for shrink in (1.0, 0.97, 0.94, 0.9, 0.86):
        low = round_half(grouped.min(-1) * shrink)[..., None]
        high = grouped.max(-1)[..., None] * shrink
        scale = round_half(np.maximum((high - low) / top, 1e-6))
        levels = np.clip(np.rint((grouped - low) / scale), 0, top)
        error = np.square(levels * scale + low - grouped).sum(-1, keepdims=True)
        if best is None:
            best = (error, levels, scale, low)
            continue
        better = error < best[0]
        new = (error, levels, scale, low)
        pairs = zip(new, best, strict=True)
        a, b, c, d = (np.where(better, one, two) for one, two in pairs)
        best = (a, b, c, d)
    assert best is not None
    _, levels, scale, low = best
    words = pack(levels.reshape(rows, columns).astype(np.uint8), bits)
    return words, scale[..., 0], low[..., 0]


def pack(levels: NDArray[np.uint8], bits: int) -> Words:
    """Joins the low `bits` of each level into words."""
    flags = (levels[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = np.packbits(flags.reshape(len(levels), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view(np.uint32)


def dequantize(
    words: Words, scales: Floats, biases: Floats, bits: int, group: int
) -> Floats:
    """The float32 matrix that mlx computes from the stored parts."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    flags = np.unpackbits(stream, axis=-1, bitorder="little")
    flags = flags.reshape(len(words), -1, bits)
    levels = (flags * (1 << np.arange(bits))).sum(-1).astype(np.float32)
    grouped = levels.reshape(*scales.shape, group)
    full = grouped * scales[..., None] + biases[..., None]
    weight: Floats = full.reshape(len(words), -1).astype(np.float32)
    return weight
