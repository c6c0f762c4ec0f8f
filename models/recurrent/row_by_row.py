"""A scan that is run one row at a time, and the state after each row.

A row is one position of a block. In exact mode its result must not depend on the number
of rows fed with it. But a scan over a block can use another formula than a scan over a
single row. So the scan is called for each row, with the state that the previous call
returned. Rows of padding are not run, and their results are zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.models.recurrent.replay import Scan, ScanCall


@dataclass(frozen=True, slots=True)
class RowByRow:
    """A block of rows that was run row by row; a `Block` of `models.device_ops`."""

    y: mx.array  # the scan's result for each row, zeros for padding
    states: Sequence[mx.array]  # the state after each row that is no padding

    def after(self, keep: int) -> mx.array:
        """Return the state after the first `keep` rows; padding does not change it."""
        return self.states[min(keep, len(self.states)) - 1]


def run_by_row(
    scan: Scan,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int,  # the number of rows that are no padding, at least 1
) -> RowByRow:
    """Run a scan one row at a time."""
    given = ScanCall(function, args, kwargs).arguments()
    axis = scan.axis
    state, result, states = given.get(scan.state), [], []
    for row in range(rows):
        one = {n: _row(given[n], row, along) for n, along in scan.rows.items()}
        y, state = function(**{**given, **one, scan.state: state})
        result.append(y)
        states.append(state)
    padding = given[next(iter(scan.rows))].shape[axis] - rows
    if padding:
        shape = list(result[0].shape)
        shape[axis] = padding
        result.append(mx.zeros(shape, result[0].dtype))
    return RowByRow(mx.concatenate(result, axis=axis), states)


def _row(array: mx.array, row: int, axis: int) -> mx.array:
    return mx.contiguous(array[(slice(None),) * axis + (slice(row, row + 1),)])
