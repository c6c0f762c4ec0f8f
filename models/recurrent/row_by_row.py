"""A scan that is run one row at a time, with the state after each row.

In exact mode a row's result must not depend on how many rows are fed with it, and
neither must the state after it. A scan over a block may take another formula than one
over a single row, and a replay would be a scan over fewer rows. So every row is a call
of the scan with one row, whose state goes into the next: the state after n rows is what
the n-th call has returned. Rows of padding are not run, and return zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.models.recurrent.replay import Scan, ScanCall


@dataclass(frozen=True, slots=True)
class RowByRow:
    """A block of rows that was run row by row; a `Block` of `models.device_ops`."""

    y: mx.array  # what the scan returns for each row, zeros for padding
    states: Sequence[mx.array]  # after each row that is no padding

    def after(self, keep: int) -> mx.array:
        """Return the state after the first `keep` rows; padding changes none."""
        return self.states[min(keep, len(self.states)) - 1]


def run_by_row(
    scan: Scan,  # where its rows and its state stand
    function: Callable[..., Any],  # the scan
    args: tuple[Any, ...],  # what it was given
    kwargs: dict[str, Any],  # what it was given by name
    rows: int,  # how many of the rows are no padding, from 1
) -> RowByRow:
    """Run a scan one row at a time."""
    given = ScanCall(function, args, kwargs).arguments()
    lined = {
        name: axis for name, axis in scan.rows.items() if given.get(name) is not None
    }
    axis = scan.axis
    state, result, states = given.get(scan.state), [], []
    for row in range(rows):
        one = {name: _row(given[name], row, along) for name, along in lined.items()}
        y, state = function(**{**given, **one, scan.state: state})
        result.append(y)
        states.append(state)
    first = next(iter(lined))
    padding = given[first].shape[lined[first]] - rows
    if padding:
        shape = list(result[0].shape)
        shape[axis] = padding
        result.append(mx.zeros(shape, result[0].dtype))
    return RowByRow(mx.concatenate(result, axis=axis), states)


def _row(array: mx.array, row: int, axis: int) -> mx.array:
    return mx.contiguous(array[(slice(None),) * axis + (slice(row, row + 1),)])
