"""RMS norms and rotary embeddings in float32, with fewer operations and equal results.

On a CPU mlx computes rotary embeddings by some 17 small operations for the queries and
for the keys of every layer. Most of these make the table of the positions, which is the
same for all layers. Here all layers share one table, made by mlx's own function.

An RMS norm then has seven operations, and a rotation by a shared table four. Handing an
operation to mlx's thread takes 5 to 10 microseconds, longer than computing it for a few
rows. Norms and rotations were half of the operations in a verify of the dense demo
model, 223 of 450. Compiled, a norm has three operations, since mlx does not fuse sums,
and a rotation two.

Functions are compiled for each shape, and mlx searches the shapes one by one. So only
forwards over few tokens use the compiled functions, since these have few shapes; a
prompt of a draft model may have any length.
"""

import functools
from threading import local
from typing import Any

import mlx.core as mx

from mlx_speculation.models.round_context import forward_of_round

MOST_TOKENS = 64


@functools.cache
def _scalar(value: float) -> mx.array:
    """Return float32 []; a Python number would be a constant of the compiled code."""
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
    """Return whether the current forward has few tokens."""
    return forward_of_round().tokens <= MOST_TOKENS


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Compute `mx.fast.rms_norm`, with the same bits on an x86-64 CPU.

    Args:
        x: [..., dim].
        weight: [dim]. mlx's own function is called if it is None, and for dtypes other
            than float32.
        eps: added to the mean square.
    """
    if weight is None or not x.dtype == weight.dtype == mx.float32 or not serves():
        result: mx.array = mx.fast.rms_norm(x, weight, eps)
        return result
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
    result: mx.array = turn(x, swapped, by_x, by_swapped)
    return result


@functools.cache
def _unit(rows: int, dims: int) -> mx.array:
    """Return [1, rows, dims], ones and then zeros: rotated, cosines and then sines."""
    half = (1, rows, dims // 2)
    made = mx.concatenate([mx.ones(half), mx.zeros(half)], axis=-1)
    mx.eval(made)
    return made


class _Tables(local):
    """The sines and cosines of the last positions used in this thread.

    There is one table for each set of frequencies.
    """

    place: tuple[int, int] | None = None
    tables: dict[Any, tuple[Any, mx.array, mx.array]] | None = None

    def of(
        self, rows: int, width: int, dims: int, freqs: Any, offset: int, **how: Any
    ) -> tuple[mx.array, mx.array]:
        """Return the factors of x and of x with its halves swapped, [1, rows, width].

        The factors leave values past `dims` unchanged.
        """
        if self.place != (rows, offset) or self.tables is None:
            self.place, self.tables = (rows, offset), {}
        key = (width, dims, id(freqs), *how.values())
        if key not in self.tables:
            turned = mx.fast.rope(
                _unit(rows, dims), dims, **how, offset=offset, freqs=freqs
            )
            cosines, sines = mx.split(turned, 2, axis=-1)
            rest = (1, rows, width - dims)
            by_x = mx.concatenate([cosines, cosines, mx.ones(rest)], axis=-1)
            by_swapped = mx.concatenate([-sines, sines, mx.zeros(rest)], axis=-1)
            # The frequencies are stored too, so that no other array gets their id.
            self.tables[key] = freqs, by_x, by_swapped
        return self.tables[key][1:]


_tables = _Tables()


def rope(
    x: mx.array,  # [..., rows, width]
    dims: int,  # how many values of a row are rotated
    *,
    traditional: bool,  # rotate neighbours, not halves; mlx's own function does that
    base: float | None,  # of the frequencies, if `freqs` is None
    scale: float,  # of the positions
    offset: Any,  # the position of the first row; arrays go to mlx's own function
    freqs: mx.array | None = None,  # the reciprocals of the frequencies, [dims / 2]
) -> mx.array:
    """Compute `mx.fast.rope`."""
    rows, width = x.shape[-2:]
    ours = rows > 1 and x.dtype == mx.float32 and isinstance(offset, int)
    how: dict[str, Any] = {"traditional": traditional, "base": base, "scale": scale}
    if traditional or not ours or dims % 2 or dims > width:
        result: mx.array = mx.fast.rope(x, dims, **how, offset=offset, freqs=freqs)
        return result
    half = dims // 2
    by_x, by_swapped = _tables.of(rows, width, dims, freqs, offset, **how)
    parts = [x[..., half:dims], x[..., :half]]
    if width > dims:
        parts.append(x[..., dims:])
    return turned(x, mx.concatenate(parts, axis=-1), by_x, by_swapped)


@functools.cache
def compile_here() -> None:
    """Compile norm and rotation, so that a request's first round need not wait."""
    rows = mx.zeros((1, 2, 2, 8))
    tables = mx.zeros((1, 2, 8))
    norm = _normed(rows, rows[..., :1], _scalar(1.0), _scalar(1.0), rows[0, 0, 0])
    mx.eval(norm, _turned_compiled(rows, rows, tables, tables))
