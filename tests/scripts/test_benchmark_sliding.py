"""The benchmark of sliding windows, with tiny numbers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = "--heads 2 --kv-heads 1 --dim 8 --slices 2 --rounds 1"


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_sliding")


def test_the_last_line_is_json_with_every_case(tmp_path: Path) -> None:
    written = tmp_path / "report.json"
    cases = "--window 8 --window 16 --width 1 --width 3 --slack 5"
    options = [*cases.split(), *SIZES.split(), "--json", str(written)]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "benchmark_sliding.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(written.read_text()) == report
    assert report["machine"].keys() >= {"cpu", "cores", "platform"}
    assert report["arguments"]["slices"] == 2
    assert [
        (case["window"], case["width"], case["measure"]) for case in report["results"]
    ] == [
        (window, width, measure)
        for window in (8, 16)
        for width in (1, 3)
        for measure in ("write", "round")
    ]
    for case in report["results"]:
        assert case["slack"] == 5
        ratios = case["over_plain"]
        assert ratios.pop("plain")["median"] == 1
        assert ratios.keys() == {
            "sliding",
            "moving",
            "native",
            "concatenating",
            "amortized",
        }
        for ratio in ratios.values():
            assert 0 < ratio["lower"] <= ratio["median"] <= ratio["upper"]
    assert report["worst"].keys() == {"write", "round"}


def test_wrong_attention_is_not_measured(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = importlib.import_module("sliding_arms")
    shape = arms.Shape(window=8, width=2, slack=5, heads=2, kv_heads=1, dim=8)
    script.check(shape)
    right = arms.ConcatenatingArm.round

    def wrong(self: Any, rows: tuple[mx.array, mx.array], *rest: Any) -> None:
        right(self, (rows[0] * 1.001, rows[1]), *rest)

    monkeypatch.setattr(arms.ConcatenatingArm, "round", wrong)
    with pytest.raises(AssertionError, match="differs by"):
        script.check(shape)


def test_a_moving_arm_moves_in_every_round(script: ModuleType) -> None:
    arms = importlib.import_module("sliding_arms")
    shape = arms.Shape(window=8, width=3, slack=5, heads=2, kv_heads=1, dim=8)
    arm, rows = arms.MovingArm(shape, shape.rows(8, 0)), shape.rows(3, 1)
    full, seen = arm.cache.keys, []
    for _ in range(3):
        arm.round(rows, 2, lambda *_: seen.append(arm.cache.keys))
        assert seen.pop() is not full
        assert arm.cache.keys is full


def test_amortized_charges_a_share_of_a_move(script: ModuleType) -> None:
    arms = importlib.import_module("sliding_arms")
    shape = arms.Shape(window=8, width=2, slack=10, heads=2, kv_heads=1, dim=8)
    seconds = {"plain": [1.0] * 3, "sliding": [1.0] * 3, "moving": [6.0] * 3}
    case = script.case_of(shape, "write", seconds)
    assert shape.keep == 1
    assert case.over_plain["amortized"].median == 1.5
