"""The edge of top-p: the smallest probability that it keeps.

Each probability is rounded to a whole multiple of 2**-31, and the multipliers are added
up as integers. Unlike a float32 sum, such a sum does not depend on the order of its
addends, and so not on the number of rows, the device or the search for the edge. A sum
of n tokens is off by less than n * 2**-32, a float32 sum by up to n * 2**-24.

A partition splits the tokens into a more and a less probable half. The sum of the more
probable half says which half holds the edge, and that half is split again:

    4096 tokens      the upper 2048 have 0.97 of the probability, 0.9 is asked for
    2048 upper ones  the upper 1024 have 0.88, so the edge is in the lower 1024
    1024 lower ones  are sorted and added up one by one

All shapes are known beforehand, so the host reads nothing. On a CPU, 151,936 tokens
take a third of the time of a sort. On a GPU, mlx partitions by sorting, so there all
tokens are sorted once; the edge is the same.
"""

import math

import mlx.core as mx

UNITS = 2.0**31  # in a probability of 1; the sum of a row fits into 32 bits
SORTED_AT_ONCE = 1024  # tokens; halving so few costs more than it saves


def nucleus_edge(probs: mx.array, share: float, at_once: int | None = None) -> mx.array:
    """Return the smallest probability that top-p keeps, float32 [..., 1].

    In descending order, a token is kept if the tokens before it have less than the
    share of the row's sum. `probs` are float32 [..., vocab], each row with a sum of 1
    up to rounding. The share is above 0 and below 1. Up to `at_once` tokens are sorted
    without halving; None: the number depends on the device. The result does not depend
    on the number.
    """
    if at_once is None:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        at_once = probs.shape[-1] if on_gpu else SORTED_AT_ONCE
    limit = _share_of(_units(probs).sum(axis=-1, keepdims=True), share)
    before = mx.zeros_like(limit)  # units of all tokens above those left in `probs`
    probs = _padded(probs, at_once)
    while probs.shape[-1] > at_once:
        half = probs.shape[-1] // 2
        parts = mx.partition(probs, half, axis=-1)
        lower, upper = parts[..., :half], parts[..., half:]
        with_upper = before + _units(upper).sum(axis=-1, keepdims=True)
        is_lower = with_upper < limit
        before = mx.where(is_lower, with_upper, before)
        probs = mx.where(is_lower, lower, upper)
    ordered = mx.sort(probs, axis=-1)
    above = mx.cumsum(_units(ordered), axis=-1, reverse=True, inclusive=False)
    dropped = (before + above >= limit).sum(axis=-1, keepdims=True)  # never all
    return mx.take_along_axis(ordered, dropped, axis=-1)


def _units(probs: mx.array) -> mx.array:
    return mx.round(probs * UNITS).astype(mx.uint32)


def _share_of(total: mx.array, share: float) -> mx.array:
    """Return share * total rounded up, in whole numbers: uint32, at least 1."""
    wide = total.astype(mx.uint64) * math.ceil(share * 2**32) + (2**32 - 1)
    # The total of a row of NaN is 0. With a limit of 0, all tokens would be dropped,
    # and the edge would be read out of bounds.
    return mx.maximum(wide >> 32, 1).astype(mx.uint32)


def _padded(probs: mx.array, at_once: int) -> mx.array:
    """Return the rows with zeros after them, so that they can be halved evenly."""
    width, halvings = probs.shape[-1], 0
    while math.ceil(width / 2**halvings) > at_once:
        halvings += 1
    more = math.ceil(width / 2**halvings) * 2**halvings - width
    if not more:
        return probs
    return mx.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, more)])
