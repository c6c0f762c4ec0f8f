"""`each` runs every combination of values in one test, and names one that fails."""

import inspect

import pytest

from support.each import each

PLAYED: list[tuple[int, str, str]] = []


@pytest.fixture(name="mark")
def _mark() -> str:
    return "!"


@each(number=range(3), letter="ab")
def test_fixtures_and_values_come_together(number: int, letter: str, mark: str) -> None:
    PLAYED.append((number, letter, mark))


def test_every_combination_was_played() -> None:
    PLAYED.clear()
    test_fixtures_and_values_come_together(mark="?")
    assert [(n, letter, "?") for n in range(3) for letter in "ab"] == PLAYED


def test_pytest_is_asked_for_fixtures_alone() -> None:
    assert [*inspect.signature(test_fixtures_and_values_come_together).parameters] == [
        "mark"
    ]


def test_the_combination_that_fails_is_named() -> None:
    @each(number=[1, 2, 3])
    def halves(number: int) -> None:
        assert number != 2

    with pytest.raises(AssertionError) as caught:
        halves()
    assert caught.value.__notes__ == ["with {'number': 2}"]


@pytest.mark.parametrize("values", [{"number": []}, {"number": [1], "other": [2]}])
def test_values_of_nothing_and_of_no_parameter_are_refused(
    values: dict[str, list[int]],
) -> None:
    with pytest.raises(AssertionError):

        @each(**values)
        def alone(number: int) -> None:
            """Nothing to do."""
