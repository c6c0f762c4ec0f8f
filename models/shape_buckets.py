"""Numbers of rows that a batch shows to a model: few, where each new one is dear.

On CUDA, cuDNN plans attention of two and more positions anew, in some 40 ms, for each
number of rows (`caches/types/padded_kv.py`). A batch of 32 rows that end one by one
meets 31 numbers, and a plan for each width of them. Shown in sizes it meets ten:

    1  2  3  4  6  8  12  16  24  32  48  64 ...

so that less than half as many rows are shown beside the live ones as there are of
these, and 13 % over a batch that shrinks from 32 to 1 row by row. Powers of two alone
would have six sizes there, up to twice the rows, and 29 %. A plan is made once, and a
row is paid for in each round.

Drafts of a batch have these lengths too, and a forward over another one is filled up: a
new number of positions is a new plan too, and new CUDA graphs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Number of rows that a batch shows in place of its own.

    Attributes:
        most: never more rows than this are live, so no size is larger; None: no end.
        used: whether sizes are; None: where attention makes plans by number of rows.
    """

    most: int | None = None
    used: bool | None = None

    def of(self, rows: int) -> int:
        """Return the smallest size that is not below a number of rows."""
        size = row_size(rows)
        return size if self.most is None else max(rows, min(size, self.most))


def row_size(rows: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, ... that is not below `rows`."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if power > 2 and rows <= between else power
