"""Norms and rotations in float32, in fewer operations, and the same numbers.

On a CPU mlx computes an RMS norm by seven operations and a rotation by shared tables by
four. Each is handed to another thread, which takes 5 to 10 microseconds and more than
to compute it where rows are few, and together they were half of what a verify of the
dense demo model computes, 223 of 450 operations. Compiled, a norm is three, since mlx
does not fuse what sums, and a rotation two.

What is compiled is compiled for shapes, and these are looked through one by one. So it
serves forwards over a few tokens only, which have few shapes; a prompt that a draft
model reads may have any.
"""

import functools

import mlx.core as mx

from mlx_speculation.models.round_context import forward_of_round

MOST_TOKENS = 64


@functools.cache
def _scalar(value: float) -> mx.array:
    """Return float32 []; numbers in what is compiled would be compiled in."""
    made = mx.array(value)
    mx.eval(made)
    return made


@mx.compile
def _normed(
    x: mx.array, squares: mx.array, part: mx.array, eps: mx.array, weight: mx.array
) -> mx.array:
    return x * mx.rsqrt(squares * part + eps) * weight


def _turned(
    x: mx.array, swapped: mx.array, by_x: mx.array, by_swapped: mx.array
) -> mx.array:
    return x * by_x + swapped * by_swapped


_turned_compiled = mx.compile(_turned)


def serves() -> bool:
    """Whether this is a forward over few tokens."""
    return forward_of_round().tokens <= MOST_TOKENS


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Do what `mx.fast.rms_norm` does, bit for bit on an x86-64 CPU.

    Args:
        x: [..., dim].
        weight: [dim]; mlx's own function serves where it is None, and for other dtypes
            than float32.
        eps: added to the mean square.
    """
    if weight is None or not x.dtype == weight.dtype == mx.float32 or not serves():
        found: mx.array = mx.fast.rms_norm(x, weight, eps)
        return found
    squares = mx.square(x).sum(axis=-1, keepdims=True)
    part = _scalar(1.0 / x.shape[-1])
    normed: mx.array = _normed(x, squares, part, _scalar(eps), weight)
    return normed


def turned(
    x: mx.array, swapped: mx.array, by_x: mx.array, by_swapped: mx.array
) -> mx.array:
    """Return x * by_x + swapped * by_swapped, all float32.

    Args:
        x: [..., rows, width].
        swapped: of the same shape.
        by_x: [1, rows, width].
        by_swapped: [1, rows, width].
    """
    turn = _turned_compiled if serves() else _turned
    found: mx.array = turn(x, swapped, by_x, by_swapped)
    return found


@functools.cache
def compile_here() -> None:
    """Compile both, lest a text wait for it in its first round."""
    rows = mx.zeros((1, 2, 2, 8))
    tables = mx.zeros((1, 2, 8))
    norm = _normed(rows, rows[..., :1], _scalar(1.0), _scalar(1.0), rows[0, 0, 0])
    mx.eval(norm, _turned_compiled(rows, rows, tables, tables))
