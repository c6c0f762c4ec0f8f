"""The verdict on a model, from drafts verified at once and one token at a time.

    identical       all logits are equal bit for bit
    same choices    logits differ, but every row chooses the same token both times
    near-ties       choices differ, but only in rows with two nearly equal best logits
    different       choices differ in a row without such a tie

On most GPUs and with most BLAS libraries, rounding alone changes the choice between two
almost equally good tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mlx_speculation.engine.equivalence.rows import Place, Row

Verdict = Literal["identical", "same choices", "near-ties", "different"]


@dataclass(frozen=True, slots=True)
class First:
    """The first row whose choice differs."""

    position: int  # the number of generated tokens before its draft
    row: Row

    def __str__(self) -> str:
        row = self.row
        return (
            f"row {row.index} of the draft after token {self.position} chooses token "
            f"{row.at_once} at once and {row.one_by_one} one by one; its two best "
            f"logits are {row.margin:.3g} apart, and the logits of the two ways differ "
            f"by up to {row.difference:.3g}"
        )


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The verdict on the rows of all drafts."""

    verdict: Verdict  # see the module
    rows: int
    differing_rows: int  # rows whose choice differs
    first: First | None  # the first of these rows
    largest_difference: float  # of any logit
    tolerance: float  # the largest margin that counts as a tie

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.differing_rows} of {self.rows} rows choose another "
            "token, the largest difference of a logit is "
            f"{self.largest_difference:.3g}"
        )


def usual_tolerance(places: Sequence[Place]) -> float:
    """Return the margin that rounding can reverse: twice the median row difference."""
    # A fault in a few rows does not change the median.
    return 2 * median(row.difference for place in places for row in place.rows)


def judge(places: Sequence[Place], tolerance: float) -> RowVerdict:
    """Return the verdict on the rows of the drafts at some places of a text."""
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
