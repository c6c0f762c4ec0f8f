"""What is asked for of a comparison, on cases whose speeds are made up.

Faults that were made by hand, and found here: the slower plain decoding as plain; the
best length of another drafter; plain decoding left out of the lengths; a wrong text
that counts; finals without the draft model; a bound of the other kind.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Tokens per second of two passes.
SPEEDS = {
    ("ours", 0, "", False): (100, 50),
    ("mlx-lm", 0, "", False): (110, 55),
    ("ours", 2, "model", False): (180, 90),
    ("ours", 4, "model", False): (220, 110),
    ("ours", 8, "model", True): (210, 105),
    ("ours", 2, "lookup", False): (240, 120),
    ("ours", 4, "lookup", False): (260, 130),
    ("ours", 6, "lookup", False): (200, 100),
    ("ours", 16, "lookup", True): (250, 125),
    ("mlx-lm", 4, "", False): (200, 100),
    ("mlx-lm", 8, "", False): (400, 200),  # a wrong text
}
FIRST = {("ours", 0): 0.1, ("mlx-lm", 0): 0.2, ("ours", 16): 0.11}


@pytest.fixture(name="scripts")
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("benchmark_arms", "benchmark_case", "compare_demands", "compare_target")
    return SimpleNamespace(
        **{name.split("_")[1]: importlib.import_module(name) for name in names}
    )


def case_of(scripts: Any, speeds: Any, target: str = "dense") -> Any:
    found = []
    for (engine, length, draft, auto), passes in speeds.items():
        arm = scripts.arms.Arm(engine, length, None, draft, auto)
        series = scripts.case.Series(arm)
        for speed in passes:
            run = scripts.arms.Run(timed=speed, seconds=1.0)
            run.first_seconds = FIRST.get((engine, length), 0.3)
            series.runs.append(run)
        if (engine, length) == ("mlx-lm", 8):
            wrong = SimpleNamespace(index=3, near_tie=False, margin=1.0)
            series.partings[0] = wrong
        found.append(series)
    return scripts.case.Case(target, "code", 0.0, [], found)


def asked(scripts: Any, case: Any) -> dict[str, Any]:
    demands = scripts.demands.demands_of([case], [])
    assert len({(d.what, d.note) for d in demands}) == len(demands)
    return {f"{d.what}: {d.note}": d for d in demands}


def test_each_ratio_is_of_the_right_arms(scripts: Any) -> None:
    demands = asked(scripts, case_of(scripts, SPEEDS))
    ratios = {what: round(d.value, 3) for what, d in demands.items()}
    assert ratios == {
        "over mlx-lm's speculation: ours model k=4 over mlx-lm k=4": 1.1,
        "adaptive over the best length: ours model auto over ours model k=4, "
        "315 tokens": 0.955,
        "adaptive over the best length: ours lookup auto over ours lookup k=4, "
        "375 tokens": 0.962,
        "time to the first token: ours model auto over ours plain": 3.0,
        "time to the first token: ours lookup auto over ours plain": 1.1,
        "code over plain: ours lookup k=4": 2.364,
    }
    assert [d.holds for d in demands.values()] == [False] * 5 + [True]
    assert all(d.low == pytest.approx(d.value) for d in demands.values())


def test_the_best_length_may_be_plain_decoding(scripts: Any) -> None:
    slow = {
        key: (20, 10) if key[1] and not key[3] else speeds
        for key, speeds in SPEEDS.items()
    }
    what = "adaptive over the best length: ours model auto over ours plain, 315 tokens"
    assert asked(scripts, case_of(scripts, slow))[what].value == pytest.approx(2.1)


def test_lengths_by_measurement_alone_are_compared_with_none(scripts: Any) -> None:
    few = {k: v for k, v in SPEEDS.items() if k[2] != "model" or k[3]}
    asked_for = [w for w in asked(scripts, case_of(scripts, few)) if "best length" in w]
    assert asked_for == [
        "adaptive over the best length: ours lookup auto over ours lookup k=4, "
        "375 tokens"
    ]


def test_the_other_targets_are_not_compared_with_mlx_lm(scripts: Any) -> None:
    demands = asked(scripts, case_of(scripts, SPEEDS, "hybrid"))
    assert not [what for what in demands if what.startswith("over mlx-lm")]


def test_finalists_are_the_best_two_drafters_and_the_others_at_their_best(
    scripts: Any,
) -> None:
    more = SPEEDS | {
        ("ours", 2, "mtp", False): (230, 115),
        ("ours", 4, "mtp", False): (225, 112),
        ("ours", 8, "mtp", True): (210, 105),
        ("ours", 2, "compiled", False): (219, 109),
        ("ours", 8, "compiled", True): (210, 105),
    }
    names = [s.arm.name for s in scripts.target.finalists(case_of(scripts, more))]
    assert names == [
        "ours plain",
        "mlx-lm plain",
        "ours lookup k=4",
        "ours lookup k=2",
        "ours lookup auto",
        "ours mtp k=2",
        "ours mtp auto",
        "ours model k=4",
        "mlx-lm k=4",
    ]


def test_the_same_pair_is_no_second_drafter(scripts: Any) -> None:
    more = SPEEDS | {
        ("ours", 4, "compiled", False): (300, 150),
        ("ours", 8, "compiled", True): (290, 145),
    }
    case = case_of(scripts, more)
    names = [s.arm.name for s in scripts.target.finalists(case)]
    assert names == [
        "ours plain",
        "mlx-lm plain",
        "ours compiled k=4",
        "ours compiled auto",
        "ours lookup k=4",
        "ours lookup auto",
        "mlx-lm k=4",
    ]
    what = "over mlx-lm's speculation: ours compiled k=4 over mlx-lm k=4"
    assert asked(scripts, case)[what].value == pytest.approx(1.5)


def test_bounds_hold_at_their_value(scripts: Any) -> None:
    def demand(value: float, **bound: float) -> Any:
        return scripts.demands.Demand("a", "b", value, value, value, **bound)

    assert demand(0.97, least=0.97).holds
    assert not demand(0.9699, least=0.97).holds
    assert demand(1.05, most=1.05).holds
    assert not demand(1.0501, most=1.05).holds
    assert demand(0.9, least=0.97).as_json()["holds"] is False
