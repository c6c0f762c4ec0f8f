"""Verdict on a model from rows of drafts that were verified both ways.

    identical       all logits are equal bit for bit
    same choices    logits differ, and every row chooses the same token
    near-ties       rows differ whose two best logits are nearly equal
    different       a row differs by more than that

Rounding alone makes rows differ where two tokens are almost equally good, on most GPUs
and with most BLAS libraries: a margin of the size of the usual difference is such a
tie, a margin many times larger is a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mlx_speculation.engine.equivalence.rows import Place, Row

Verdict = Literal["identical", "same choices", "near-ties", "different"]


@dataclass(frozen=True, slots=True)
class First:
    """The first row that chooses another token."""

    position: int  # tokens of the text before its draft
    row: Row  # both ways

    def __str__(self) -> str:
        row = self.row
        return (
            f"row {row.index} of the draft after token {self.position} chooses "
            f"{row.at_once} at once and {row.one_by_one} one by one; the two best "
            f"differ by {row.margin:.3g} there, the logits by {row.difference:.3g}"
        )


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The rows of all places, judged."""

    verdict: Verdict  # see above
    rows: int  # how many there were
    differing_rows: int  # how many choose another token
    first: First | None  # the first of these, or None
    largest_difference: float  # of any logit
    tolerance: float  # the largest margin that was taken for a tie

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.differing_rows} of {self.rows} rows choose another "
            "token, the largest difference of a logit is "
            f"{self.largest_difference:.3g}"
        )


def usual_tolerance(places: Sequence[Place]) -> float:
    """Return twice the median difference of rows: what rounding can turn over.

    A fault that few rows have does not raise it.
    """
    return 2 * median(row.difference for place in places for row in place.rows)


def judge(places: Sequence[Place], tolerance: float) -> RowVerdict:
    """Judge what was found at some places."""
    differing = [
        First(p.position, row) for p in places for row in p.rows if row.differs
    ]
    largest = max(place.difference for place in places)
    verdict: Verdict = "same choices" if largest else "identical"
    if differing:
        beyond = any(first.row.margin > tolerance for first in differing)
        verdict = "different" if beyond else "near-ties"
    return RowVerdict(
        verdict,
        rows=sum(len(place.rows) for place in places),
        differing_rows=len(differing),
        first=differing[0] if differing else None,
        largest_difference=largest,
        tolerance=tolerance,
    )
