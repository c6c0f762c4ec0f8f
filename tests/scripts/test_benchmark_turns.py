"""Ways to decode by turns: every arm takes the same tokens, and the ratio is of times.

Faults that were made by hand, and found here: the first slice counts; so do tokens of
the round that ends it; the ratio is upside down; plain decoding is the slower one; arms
run as a whole; all slices have one order; a text is not taken to its end.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_turns")


@pytest.fixture(name="arms")
def _arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_arms")


@pytest.fixture(name="cases")
def _cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_case")


def series_of(arms: ModuleType, cases: ModuleType, *, name: str, **own: Any) -> Any:
    """Return a series of runs of 16 timed tokens."""
    seconds, length = own["seconds"], own.get("length", 0)
    series = cases.Series(arms.Arm(name, length, None, own.get("draft", "")))
    for each in seconds:
        run = arms.Run(timed=16, seconds=each)
        series.add(run, 0, counted=True)
    return series


def test_a_ratio_is_to_the_faster_plain_decoding(
    script: ModuleType, arms: ModuleType, cases: ModuleType
) -> None:
    made = partial(series_of, arms, cases)
    series = [
        made(name="ours", seconds=[2.0, 2.0]),
        made(name="mlx-lm", seconds=[1.0, 2.0]),
        made(name="ours", seconds=[1.0, 0.5], draft="lookup", length=2),
    ]
    found = script.ratios(cases.Case("dense", "code", 0.0, [], series))
    assert found["plain"] == "mlx-lm plain"
    speeds = {arm["arm"]: arm["tokens_per_second"] for arm in found["arms"]}
    assert speeds["ours plain"] == pytest.approx(2 * 16 / 4)
    ratios = [arm["x_plain"] for arm in found["arms"]]
    assert ratios == pytest.approx([0.75, 1.0, 2.0])
    assert found["arms"][2]["each"] == pytest.approx([1.0, 4.0])


def test_the_first_slice_is_not_timed_nor_is_the_round_that_ends_it(
    arms: ModuleType,
) -> None:
    rounds = [1, 1, 2, 2, 2, 2, 3, 3, 4]
    run = arms.Run(arrivals=((7, number) for number in rounds))
    run.take(4)
    assert (run.timed, run.seconds) == (0, 0.0)
    assert run.first_seconds > 0
    run.take(4)
    assert run.timed == 2  # two more of round 2 had been computed before
    seconds = run.seconds
    assert seconds > 0
    run.take(1)
    assert run.timed == 3
    assert run.seconds > seconds
    assert run.tokens == [7] * 9


def test_a_run_that_is_a_whole_takes_no_turns(arms: ModuleType) -> None:
    with pytest.raises(ValueError, match="cannot take turns"):
        arms.Run().take(4)


@pytest.mark.parametrize("last", [8, 16])
def test_arms_take_turns_and_their_texts_are_whole(
    arms: ModuleType, cases: ModuleType, last: int
) -> None:
    options = importlib.import_module("benchmark_options")
    models = arms.Models.load(options.folder_of("draft"), options.folder_of("draft"))
    job = arms.Job(models.encode("def f(n):"), 32 + last, 0.0, 3)
    made = [*arms.plain_arms(models), *arms.mlx_lm_arms(models, [2])]
    made.append(arms.Arm("ours", 2, partial(arms.ours, models.speculative, 2), "model"))
    taken: list[str] = []
    followed = [replace(arm, decode=partial(noting, taken, arm)) for arm in made]
    case = cases.Case("draft", "code", 0.0, [], [cases.Series(arm) for arm in followed])
    cases.run_case(case, models, [job], 1, lambda line: None, turns=True)
    assert [len(series.runs[0].tokens) for series in case.series] == [32 + last] * 4
    timed = [series.runs[0].timed for series in case.series]
    assert timed[:2] == [16 + last] * 2
    assert all(0 < each <= 16 + last for each in timed)
    emitted = [series.statistics.emitted for series in case.series]
    assert emitted == [32 + last] * 4
    counted = taken[4 * 32 :]  # behind the warm-up
    sizes = [16] * 8 + [last] * 4
    slices = [counted[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]
    assert all(len(set(each)) == 1 for each in slices)
    orders = [[each[0] for each in slices[n : n + 4]] for n in (0, 4, 8)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert orders[0] not in orders[1:]
    assert orders[1] != orders[2]


def noting(taken: list[str], arm: Any, job: Any) -> Any:
    """Begin an arm that notes its name for each token."""
    run = arm.decode(job)
    arrivals = run.arrivals

    def noted() -> Iterator[tuple[int, int]]:
        for arrival in arrivals:
            taken.append(arm.name)
            yield arrival

    run.arrivals = noted()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_all_arms_take_turns(temperature: str) -> None:
    options = "--target dense --group code --draft lookup --draft model --prompts 1"
    options += " --tokens 48 --draft-length 2 --mlx-lm-length 2"
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "benchmark_turns.py"),
            *options.split(),
            "--temperature",
            temperature,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [arm["arm"] for arm in result["arms"]] == [
        "ours plain",
        "mlx-lm plain",
        "ours lookup auto",
        "ours lookup k=2",
        "ours model auto",
        "ours model k=2",
        "mlx-lm k=2",
    ]
