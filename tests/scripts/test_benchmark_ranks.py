"""The benchmark of several ranks runs, on one rank and under mlx.launch.

Faults that were made by hand, and found here: every rank prints; the target stays
whole; a length is not an arm.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_ranks.py"
OPTIONS = "--draft lookup --draft-length 4 --group code --prompts 1 --tokens 48"


def printed(command: list[str]) -> Any:
    """Return the only JSON object that is printed."""
    # Threads of OpenBLAS would take the processor from the other rank.
    done = subprocess.run(
        [*command, str(SCRIPT), *OPTIONS.split()],
        capture_output=True,
        text=True,
        timeout=400,
        env=dict(os.environ, OPENBLAS_NUM_THREADS="1"),
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_arms_run_on_all_ranks(ranks: int) -> None:
    launch = Path(sys.executable).with_name("mlx.launch")
    options = ["--backend", "ring", "-n", str(ranks), "--", sys.executable]
    found = printed([str(launch), *options] if ranks > 1 else [sys.executable])
    assert found["ranks"] == ranks
    assert sorted(found["sums_ms"]) == ["1", "17", "5"]
    (result,) = found["results"]
    arms = {arm["arm"]: arm for arm in result["arms"]}
    names = ["ours plain", "mlx-lm plain", "ours lookup auto", "ours lookup k=4"]
    assert list(arms) == names
    assert all(arm["tokens_per_second"] > 0 for arm in arms.values())
    assert all(arm["wrong_from"] is None for arm in arms.values())
    assert arms["ours lookup k=4"]["mean_accepted_length"] > 1
