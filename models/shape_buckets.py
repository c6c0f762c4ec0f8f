"""Row counts to which forwards of a batch are padded where each new count costs time.

On CUDA, attention of two or more positions needs a cuDNN plan for each number of rows
and each number of positions. Making a plan takes about 40 ms, see
`caches/types/padded_kv.py`. A batch of 32 rows that end one by one goes through 31
numbers of rows. With these sizes it goes through ten:

    1  2  3  4  6  8  12  16  24  32  48  64 ...

There are then fewer than half as many padding rows as live rows, and on average 13 % as
many while a batch shrinks from 32 rows to 1. Powers of two would give six sizes, up to
twice as many rows in total as live rows, and 29 % of padding. A plan is made once, but
a padding row costs time in each round.

A batch also drafts these lengths only, and a forward over any other number of positions
is padded: a new number needs a new plan, and new CUDA graphs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The row counts to which forwards of a batch are padded.

    Attributes:
        most: the largest number of live rows, and so the largest size; None: no limit.
        used: whether a batch pads to sizes; None: only if attention makes plans by
            number of rows.
    """

    most: int | None = None
    used: bool | None = None

    def of(self, rows: int) -> int:
        """Return the smallest size that is at least `rows`."""
        size = row_size(rows)
        return size if self.most is None else max(rows, min(size, self.most))


def row_size(rows: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, ... that is at least `rows`."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if power > 2 and rows <= between else power
