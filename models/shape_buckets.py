"""Row counts to which forwards of a batch are padded where each new count costs time.

On CUDA, attention of two or more positions needs a cuDNN plan for each number of rows
and each number of positions. Making a plan takes about 40 ms, see
`caches/types/padded_kv.py`. So batches have these sizes only:

    1  2  3  4  6  8  12  16  24  32  48  64 ...

While a batch shrinks from 32 rows to 1, it has ten sizes, and its padding is 13% of its
live rows. With powers of two it would have six sizes, and 29% of padding. A plan is
made once, but a padding row costs time in each round.

The draft length of a batch is also one of these numbers, or is padded to one.
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
