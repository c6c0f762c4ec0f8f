"""The benchmark of servers, with tiny numbers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "benchmark_server.py"


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_server")


def test_no_prompt_is_met_again(script: ModuleType) -> None:
    asked = [one for n in range(-1, 4) for one in script._requests(n, 16, 8, 0.0)]
    assert len({one.prompt for one in asked}) == len(asked)
    assert len({one.prompt[:12] for one in asked}) == len(asked)


def test_a_row_has_percentiles_and_the_speed_of_all_clients(
    script: ModuleType,
) -> None:
    from server_arms import Served

    series = script.Series("ours", 2)
    series.served = [Served("x", 0.1 * i, 0.2 * i, 10) for i in range(1, 4)]
    series.seconds = [2.0, 3.0]
    assert series.row["first_ms"]["p50"] == pytest.approx(200)
    assert series.row["whole_ms"]["p95"] == pytest.approx(580)
    assert series.row["tokens_per_second"] == pytest.approx(6)


@pytest.mark.slow
def test_the_last_line_is_json_with_every_server() -> None:
    options = "--clients 2 --requests 2 --tokens 4 --passes 1"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["server"] for row in report["results"]] == [
        "ours, no draft",
        "ours, draft model",
        "mlx-lm, no draft",
        "mlx-lm, draft model",
    ]
    assert all(row["tokens"] == 8 for row in report["results"])
    assert report["results"][1]["equal_texts"] == 2
