"""The verdict on made-up rows that were verified at once and one by one."""

import pytest

from mlx_speculation.engine.equivalence.rows import Place, Row
from mlx_speculation.engine.equivalence.verdict import judge, usual_tolerance


def place(*rows: tuple[bool, float, float]) -> Place:
    """Make a place from (differs, margin, difference) of each row."""
    made = tuple(
        Row(index, 5, 6 if differs else 5, margin, difference)
        for index, (differs, margin, difference) in enumerate(rows)
    )
    return Place(7, (1,) * (len(rows) - 1), 0, made)


SAME = (False, 3.0, 0.0)
ROUNDED = (False, 3.0, 1e-5)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([SAME, SAME], "identical"),
        ([SAME, ROUNDED], "same choices"),
        ([ROUNDED, (True, 2e-5, 1e-5), ROUNDED], "near-ties"),
        ([ROUNDED, (True, 2.1e-5, 1e-5), ROUNDED], "different"),
        # Another token without any difference of logits is a fault.
        ([SAME, (True, 1e-9, 0.0), SAME], "different"),
        # A large fault in few rows does not raise the tolerance for itself.
        ([ROUNDED, ROUNDED, ROUNDED, (True, 0.3, 5.0)], "different"),
    ],
)
def test_the_verdict_follows_from_margins(
    rows: list[tuple[bool, float, float]], verdict: str
) -> None:
    places = [place(*rows), place(*[(False, *row[1:]) for row in rows])]
    judged = judge(places, usual_tolerance(places))
    assert judged.verdict == verdict
    assert judged.rows == 2 * len(rows)
    assert judged.differing_rows == sum(differs for differs, _, _ in rows)
    assert judged.largest_difference == max(difference for _, _, difference in rows)
    assert (judged.first is None) == (judged.differing_rows == 0)
    assert str(judged).startswith(f"{verdict}: {judged.differing_rows} of")


def test_the_first_row_that_differs_is_named() -> None:
    judged = judge([place(SAME), place(ROUNDED, (True, 0.5, 0.25))], 0.0)
    assert judged.first is not None
    assert (judged.first.position, judged.first.row.index) == (7, 1)
    assert str(judged.first) == (
        "row 1 of the draft after token 7 chooses token 5 at once and 6 one by one; "
        "its two best logits are 0.5 apart, and the logits of the two ways differ by "
        "up to 0.25"
    )


def test_a_tolerance_is_the_largest_margin_of_a_tie() -> None:
    places = [place((True, 0.5, 0.1))]
    assert judge(places, 0.5).verdict == "near-ties"
    assert judge(places, 0.49).verdict == "different"
