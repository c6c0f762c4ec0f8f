"""Checks of the numbers of positions that a commit keeps.

commit(3)            every row keeps 3
commit([3, 0, 5])    rows 0, 1 and 2 of a batch keep 3, 0 and 5
commit([3, 3, 3])    for a batch of 3 rows, the same as commit(3), at the same cost
"""

from collections.abc import Sequence

from mlx_speculation.caches.journal import Journal, Keep
from mlx_speculation.errors import InvalidRequestError


def numbers(keep: Keep) -> int | tuple[int, ...]:
    """Return `keep` as a number or as a tuple, for comparisons with `==`."""
    if isinstance(keep, int):
        return keep
    if not isinstance(keep, Sequence):
        raise InvalidRequestError(
            f"commit(keep) was called with a {type(keep).__name__}; keep has to be one "
            "number, or a list of one number per row. For an array, pass keep.tolist()."
        )
    return tuple(keep)


def shown(keep: int | tuple[int, ...]) -> int | list[int]:
    """Return `keep` as the caller wrote it."""
    return keep if isinstance(keep, int) else list(keep)


def per_row(
    keep: int | tuple[int, ...], journals: Sequence[Journal]
) -> int | tuple[int, ...]:
    """Return one number if all rows keep the same number, else one per row."""
    if isinstance(keep, int):
        return keep
    for place, journal in enumerate(journals):
        rows = journal.rows
        if rows is not None and rows != len(keep):
            raise InvalidRequestError(
                f"commit({shown(keep)}) has {len(keep)} numbers, but cache {place} "
                f"takes {rows}, one for each of its rows. Pass one number for each "
                "row, or a single number for all. If the cache should have more rows, "
                "make it by merge() from caches of one row each."
            )
    if not keep:
        raise InvalidRequestError(
            "commit([]) has no number. Pass one number for each row of the batch."
        )
    return keep[0] if len(set(keep)) == 1 else keep


def _check_range(keep: int | tuple[int, ...], written: int | None) -> None:
    """Refuse a number below 0 or above `written` (None: unknown)."""
    each = (keep,) if isinstance(keep, int) else keep
    for row, number in enumerate(each):
        if number < 0 or (written is not None and number > written):
            where = "" if isinstance(keep, int) else f" of row {row}"
            most = f", but {written} were written. Pass a number from 0 to {written}."
            raise InvalidRequestError(
                f"commit({shown(keep)}) would keep {number} positions{where}"
                f"{'. Pass 0 or more.' if written is None else most}"
            )


def check_written(
    keep: int | tuple[int, ...], each: Sequence[int | None], *, whole: bool
) -> int | None:
    """Check `keep`; return how many positions were written, or None if unknown.

    `each` has the number that each layer wrote; None: unknown. With `whole`, a `keep`
    other than all or nothing is refused.
    """
    written = max((count for count in each if count is not None), default=None)
    _check_range(keep, written)
    ragged = not isinstance(keep, int)
    part = ragged or (written is not None and keep not in (0, written))
    if whole and part:
        raise InvalidRequestError(
            f"commit({shown(keep)}) would keep a part of the "
            f"{'' if written is None else f'{written} '}written positions, but the "
            "speculation was opened with whole=True. Keep all or nothing, or open it "
            "without whole=True."
        )
    uneven = {count for count in each if count} - {written}  # an unused layer wrote 0
    if uneven:
        raise InvalidRequestError(
            f"One layer wrote {written} positions and another {min(uneven)}. Pass "
            "speculation.caches to the model, whole and in order."
        )
    return written
