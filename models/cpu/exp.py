"""Exponentials in float32, made of operations that mlx vectorizes.

mlx's wheel for Linux on x86-64 computes `exp`, softmax, sigmoid and tanh of one element
at a time, in 25 to 35 ns. It computes products, sums and conversions of four elements
at a time. This module uses only these three operations, for x <= 0 and y = x / ln 2:

    n = trunc(y - 1/2)    f = y - n, in [-1/2, 1/2]    e^x = 2^f 2^n

2^f is a polynomial of degree 5 with a relative error of 1e-7, and exactly 1 at f = 0.
2^n is made from its bits, with n + 127 as the exponent. Results below 2^-126 are 0, as
is the result for -inf; NaN stays NaN. An element takes 4 ns.
"""

import functools
import math

import mlx.core as mx

_PER_LN_2 = 1.0 / math.log(2.0)
_BIAS, _EXPONENT = 127, 1 << 23
# Coefficients of (2^f - 1) / f, the highest power first. They minimize the weighted
# squares of the relative error, with weights that make all peaks of the error equal.
_COEFFICIENTS = (
    0.0013264674926176667,
    0.009671496227383614,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
)


def _powers(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return 2^f, and the bits of 2^n as int32, for x <= 0.

    Constants are right operands: in a function compiled with `shapeless=True`,
    operations with a constant on the left take three times as long.
    """
    # At the bound the bits are 0, so that 2^n is 0.0.
    y = mx.maximum(x * _PER_LN_2, -float(_BIAS))
    n = (y - 0.5).astype(mx.int32)
    f = y - n.astype(mx.float32)
    power = f * _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:]:
        power = (power + coefficient) * f
    return power + 1.0, (n + _BIAS) * _EXPONENT


# `shapeless` is used only where all arrays have the same shape: mlx 0.32.4 crashed if
# shapes differed and one of them had an axis of 1.
_powers_compiled = mx.compile(_powers, shapeless=True)


@functools.cache
def compile_here() -> None:
    """Compile `exponentials`: this takes seconds on the first use on a machine."""
    mx.eval(exponentials(mx.zeros((2, 8))))


def exponentials(scores: mx.array) -> mx.array:
    """Return e^(score - largest score of the row) for scores float32 [..., n].

    Dividing the results by their sum over the last axis gives the softmax.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    power, bits = _powers_compiled(below)
    return power * bits.view(mx.float32)
