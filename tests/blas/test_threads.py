import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.blas import threads
from mlx_speculation.blas.threads import (
    OtherPrograms,
    TextThreads,
    ThreadPlan,
    plan_threads,
)

NUM, TIMEOUT = "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"


@pytest.mark.parametrize(
    ("cores", "idle", "count"),
    [
        (1, None, 1),
        (1, 0, 1),
        (2, None, 1),
        (2, 2, 2),
        (2, 1.7, 2),
        (2, 1.5, 1),
        (2, 0, 1),
        (3, 3, 3),
        (3, 2, 1),
        (4, None, 2),
        (4, 4, 4),
        (4, 2, 2),
        (4, 1.5, 1),
        (16, 15.8, 16),
        (16, 8, 8),
        (16, 7, 1),
        (4, 60, 4),  # on a machine with more cores than the 4 of this process
    ],
)
def test_a_text_gets_all_idle_cores_else_half_else_one_thread(
    cores: int, idle: float | None, count: int
) -> None:
    plan = plan_threads(cores, {})
    assert plan.threads(idle) == count
    assert plan.environment()[NUM] == str(cores)


@pytest.mark.parametrize("cores", [1, 2, 4, 64])
def test_two_busy_processes_never_have_more_threads_than_cores(cores: int) -> None:
    """With more threads than cores, two processes run ten times slower."""
    plan = plan_threads(cores, {})
    for used in range(1, cores + 1):
        assert plan.threads(cores - used) + used <= max(cores, used + 1)
    assert plan.count is not None
    assert 2 * plan.count <= max(cores, 2)


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
    plan = plan_threads(cores, {variable: value})
    assert (plan.count, plan.most, plan.numbers) == (None, None, None)
    assert NUM not in plan.environment()
    assert str(plan).startswith(f"{variable} is {value}")
    counts: list[int] = []
    texts = TextThreads(plan, counts.append, lambda: 8.0)
    with texts.text(exact=False), texts.text(exact=True):
        assert counts == []


@pytest.mark.parametrize("value", ["", "0", "many", "-1"])
def test_a_number_that_openblas_would_not_take_is_none(value: str) -> None:
    assert plan_threads(8, {NUM: value}).count == 4


@pytest.mark.parametrize(
    ("cores", "environment", "given"),
    [
        (2, {}, {NUM: "2", TIMEOUT: "10"}),
        (2, {TIMEOUT: "26"}, {NUM: "2"}),
        (2, {NUM: "2"}, {TIMEOUT: "10"}),
        (2, {NUM: "2", TIMEOUT: "26"}, {}),
        (2, {NUM: "1"}, {}),
        (4, {}, {NUM: "4"}),
        (4, {NUM: "4"}, {}),
        (1, {}, {NUM: "1"}),
    ],
)
def test_idle_threads_sleep_at_once_where_there_may_be_two_on_two_cores(
    cores: int, environment: dict[str, str], given: dict[str, str]
) -> None:
    plan = plan_threads(cores, environment)
    assert plan.environment() == given
    assert ("; idle ones sleep at once" in str(plan)) == (TIMEOUT in given)


def test_the_plan_gives_its_reason() -> None:
    assert str(plan_threads(1, {})) == "1 thread: this process may use 1 core"
    assert plan_threads(8, {}).why == (
        "4 or 8 threads: this process may use 8 cores, and all of them for a text that "
        "starts while other programs leave them idle"
    )
    assert plan_threads(8, {}).numbers == "4 to 8 threads"
    assert ThreadPlan(None, None, "as it comes").environment() == {}


EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "exact", "end"]), st.floats(0, 8)), max_size=30
)


@given(EVENTS, st.randoms(use_true_random=False))
def test_texts_keep_their_number_and_exact_ones_have_always_the_same(
    events: list[tuple[str, float]], random: Random
) -> None:
    plan, idle, now, running = plan_threads(8, {}), 8.0, 0, Counter[bool]()

    def set_count(count: int) -> None:
        nonlocal now
        now = count

    texts = TextThreads(plan, set_count, lambda: idle)
    assert now == 4
    opened: list[tuple[bool, ExitStack]] = []
    for event, idle in events:
        before = now
        if event == "end":
            if opened:
                exact, stack = opened.pop(random.randrange(len(opened)))
                stack.close()
                running[exact] -= 1
            assert now == before
            continue
        exact = event == "exact"
        stack = ExitStack()
        stack.enter_context(texts.text(exact=exact))
        opened.append((exact, stack))
        if exact:
            assert now == 4
        elif running.total():
            assert now == before
        else:
            assert now == plan.threads(idle)
        running[exact] += 1


class Clock:
    """A machine of 4 cores, whose clock advances only in `run` and `sleep`."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy = self.process_seconds = 100.0
        self.file, self.slept = path / "stat", 0.0
        monkeypatch.setattr(threads, "_STAT", self.file)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.process_seconds)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        self.run(0.0)

    def run(
        self, seconds: float, others: float = 0.0, this_process: float = 0.0
    ) -> None:
        """Let time pass; `others` and `this_process` are numbers of cores in use."""
        self.now += seconds
        self.busy += seconds * (others + this_process)
        self.process_seconds += seconds * this_process
        ticks = round(self.busy * os.sysconf("SC_CLK_TCK"))
        self.file.write_text(f"cpu  {ticks} 0 0 7 9 0 0 0 0 0\ncpu0 1 2 3\n")

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.run(seconds, others=3.0)


def test_the_load_of_other_programs_is_that_since_the_last_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path, monkeypatch)
    load = OtherPrograms()
    clock.run(1.0, others=1.0, this_process=2.0)
    assert load.idle_cores() == pytest.approx(3.0)
    clock.run(1.0, this_process=4.0)
    assert load.idle_cores() == pytest.approx(4.0)
    assert clock.slept == 0


@pytest.mark.parametrize("seconds", [0.01, 60.0])
def test_the_load_is_taken_anew_where_the_last_text_is_just_now_or_long_ago(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path, monkeypatch)
    load = OtherPrograms()
    clock.run(seconds)
    assert clock.slept == 0
    assert load.idle_cores() == pytest.approx(1.0)
    assert clock.slept == pytest.approx(0.05)


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e f g"])
def test_idle_cores_are_unknown_where_linux_does_not_say(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stat"
    file.write_text(text)
    monkeypatch.setattr(threads, "_STAT", file)
    assert OtherPrograms().idle_cores() is None
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    assert OtherPrograms().idle_cores() is None
