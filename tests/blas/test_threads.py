import os
from collections.abc import Callable

import pytest

from mlx_speculation.blas import threads
from mlx_speculation.blas.threads import ThreadPlan, plan_threads

NUM, TIMEOUT = "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"


@pytest.mark.parametrize(
    ("cores", "idle", "count"),
    [
        (1, None, 1),
        (2, None, 1),
        (2, 2, 1),
        (3, 3, 1),
        (4, None, 2),
        (4, 4, 2),
        (4, 2, 2),
        (4, 1, 1),
        (4, 0, 1),
        (5, 5, 2),
        (16, 16, 8),
        (16, 8, 8),
        (16, 7, 1),
        (4, 60, 2),  # of a large machine, which this process may use 4 cores of
    ],
)
def test_openblas_gets_half_the_cores_and_one_thread_where_they_are_busy(
    cores: int, idle: int | None, count: int
) -> None:
    plan = plan_threads(cores, idle, {})
    assert plan.count == count
    assert plan.environment() == {NUM: str(count)}
    assert plan.why.startswith(f"{count} thread{'s' if count > 1 else ''}: ")


@pytest.mark.parametrize("cores", [1, 2, 4, 64])
@pytest.mark.parametrize("idle", [None, 0, 64])
def test_two_processes_never_have_more_threads_than_cores_to_themselves(
    cores: int, idle: int | None
) -> None:
    """Beyond that they wait for each other's threads, at a tenth of their speed."""
    count = plan_threads(cores, idle, {}).count
    assert count is not None
    assert 2 * count <= max(cores, 2)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (NUM, "3"),
        ("OPENBLAS_DEFAULT_NUM_THREADS", "1"),
        ("GOTO_NUM_THREADS", "8"),
        ("OMP_NUM_THREADS", "4,2"),
    ],
)
@pytest.mark.parametrize("cores", [2, 8])
def test_a_number_that_the_user_names_is_left(
    variable: str, value: str, cores: int
) -> None:
    plan = plan_threads(cores, 0, {variable: value})
    assert plan.count is None
    assert NUM not in plan.environment()
    assert str(plan).startswith(f"{variable} is {value}")


@pytest.mark.parametrize("value", ["", "0", "many", "-1"])
def test_a_number_that_openblas_would_not_take_is_none(value: str) -> None:
    assert plan_threads(8, 8, {NUM: value}).count == 4


@pytest.mark.parametrize(
    ("cores", "environment", "told"),
    [
        (2, {NUM: "2"}, {TIMEOUT: "10"}),
        (2, {NUM: "2", TIMEOUT: "26"}, {}),
        (4, {NUM: "4"}, {}),
        (1, {NUM: "1"}, {}),
        (2, {NUM: "1"}, {}),
    ],
)
def test_idle_threads_sleep_at_once_where_the_user_wants_two_on_two_cores(
    cores: int, environment: dict[str, str], told: dict[str, str]
) -> None:
    plan = plan_threads(cores, None, environment)
    assert plan.environment() == told
    assert ("sleep after 2^10 ticks" in str(plan)) == bool(told)


def test_the_plan_says_why() -> None:
    assert str(plan_threads(2, None, {})) == "1 thread: this process may use 2 cores"
    assert plan_threads(8, 3, {}).why == (
        "1 thread: this process may use 8 cores, and other programs left 3 idle"
    )


def test_nobody_waits_to_see_how_busy_few_cores_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in threads.NAMES:
        monkeypatch.delenv(name, raising=False)
    looks: list[None] = []
    monkeypatch.setattr(threads, "idle_cores", lambda: looks.append(None))
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    assert threads.threads_here().count == 1
    assert looks == []
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    assert threads.threads_here().count == 2
    assert looks == [None]


@pytest.mark.parametrize(
    ("running", "idle"),
    [([1] * 5, 8), ([1, 9, 3, 9, 3], 6), ([40] * 5, 0)],
)
def test_idle_cores_are_those_without_a_running_thread_in_most_looks(
    running: list[int], idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(f"0.50 0.18 0.08 {count}/512 4711\n" for count in running)
    monkeypatch.setattr(threads, "_LOAD", _Says(lambda: next(looks)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_APART", 0)
    assert threads.idle_cores() == idle


@pytest.mark.parametrize("text", ["", "0.5 0.2 0.1 x/5 7"])
def test_idle_cores_are_unknown_where_linux_does_not_say(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_LOAD", _Says(lambda: text))
    assert threads.idle_cores() is None


class _Says:
    """A file of which each reading is another text."""

    def __init__(self, text: Callable[[], str]) -> None:
        self.read_text = text


def test_a_plan_has_no_default_of_its_own() -> None:
    assert ThreadPlan(None, "as it comes").environment() == {}
