"""Rotary positions in float32, with sines and cosines that the layers share.

On a CPU mlx computes them by the operations that they are made of, some 17, of 10
microseconds each for the few rows of a round, for the queries and the keys of every
layer. Most of it is the table of the positions, which is the same for all of them. The
numbers are the same too: the table comes from mlx's own function.
"""

import functools
from threading import local
from typing import Any

import mlx.core as mx

from mlx_speculation.models.cpu import norm_rope


@functools.cache
def _unit(rows: int, dims: int) -> mx.array:
    """Return [1, rows, dims] of ones and then zeros: turned, cosines and then sines."""
    half = (1, rows, dims // 2)
    made = mx.concatenate([mx.ones(half), mx.zeros(half)], axis=-1)
    mx.eval(made)
    return made


class _Tables(local):
    """The sines and cosines of the positions that were last asked for in this thread.

    Layers with other frequencies have tables of their own.
    """

    place: tuple[int, int] | None = None
    held: dict[Any, tuple[Any, mx.array, mx.array]] | None = None

    def of(
        self, rows: int, width: int, dims: int, freqs: Any, offset: int, **how: Any
    ) -> tuple[mx.array, mx.array]:
        """Return the factors of x and of x with its halves swapped, [1, rows, width].

        Values past `dims` stay as they are.
        """
        if self.place != (rows, offset) or self.held is None:
            self.place, self.held = (rows, offset), {}
        key = (width, dims, id(freqs), *how.values())
        if key not in self.held:
            turned = mx.fast.rope(
                _unit(rows, dims), dims, **how, offset=offset, freqs=freqs
            )
            cosines, sines = mx.split(turned, 2, axis=-1)
            rest = (1, rows, width - dims)
            by_x = mx.concatenate([cosines, cosines, mx.ones(rest)], axis=-1)
            by_swapped = mx.concatenate([-sines, sines, mx.zeros(rest)], axis=-1)
            # The frequencies are held too, or their id could become another's.
            self.held[key] = freqs, by_x, by_swapped
        return self.held[key][1:]


_tables = _Tables()


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    freqs: mx.array | None = None,
) -> mx.array:
    """Do what `mx.fast.rope` does.

    Args:
        x: [..., rows, width].
        dims: how many of a row are turned.
        traditional: turn neighbours and not halves; mlx does so then.
        base: of the frequencies, if `freqs` is None.
        scale: of the positions.
        offset: of the first row; mlx's own function takes arrays.
        freqs: the reciprocals of the frequencies, [dims / 2].
    """
    rows, width = x.shape[-2:]
    ours = rows > 1 and x.dtype == mx.float32 and isinstance(offset, int)
    how: dict[str, Any] = {"traditional": traditional, "base": base, "scale": scale}
    if traditional or not ours or dims % 2 or dims > width:
        found: mx.array = mx.fast.rope(x, dims, **how, offset=offset, freqs=freqs)
        return found
    half = dims // 2
    by_x, by_swapped = _tables.of(rows, width, dims, freqs, offset, **how)
    parts = [x[..., half:dims], x[..., :half]]
    if width > dims:
        parts.append(x[..., dims:])
    return norm_rope.turned(x, mx.concatenate(parts, axis=-1), by_x, by_swapped)
