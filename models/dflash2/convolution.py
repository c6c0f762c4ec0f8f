"""A causal convolution over the rows of one block, whose kernel differs for each row.

    conv(y)[i, c] = sum over t <= i of
                    (base[t, c] + delta[i, t, c // group]) * y[i - t, c]

Rows before the block count as 0. One convolution comes before a part of a layer
(attention or the MLP) and one after it; the same rows make `delta` of both.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

Side = Callable[[mx.array], mx.array]


class BlockConvolution(nn.Module):
    """The two convolutions around a part of a layer.

    Args:
        dim: the number of channels.
        taps: rows that a convolution reads, its own included.
        group: neighbouring channels that share a delta.
    """

    def __init__(self, dim: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, dim))
        self.kernel_projection = nn.Linear(dim, 2 * taps * (dim // group), bias=False)
        self._taps, self._group = taps, group

    def sides(self, rows: mx.array) -> tuple[Side, Side]:
        """Return both convolutions for rows [batch, block, dim], which make `delta`."""
        shape = (*rows.shape[:2], 2, self._taps, -1)
        delta = self.kernel_projection(rows).reshape(shape)
        delta = mx.repeat(delta, self._group, axis=-1)
        kernel = self.base_kernel + delta  # [batch, block, 2, taps, dim]

        def side(index: int) -> Side:
            return lambda y: self._convolved(kernel[:, :, index], y)

        return side(0), side(1)

    def _convolved(self, kernel: mx.array, y: mx.array) -> mx.array:
        result = kernel[:, :, 0] * y
        for tap in range(1, min(self._taps, y.shape[1])):
            part = kernel[:, tap:, tap] * y[:, :-tap]
            result = result + mx.pad(part, [(0, 0), (tap, 0), (0, 0)])
        return result
