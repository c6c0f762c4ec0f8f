"""Times to the first token: by turns, and over the sooner plain decoding's.

Faults that were made by hand, and found here: the ratio is upside down; plain decoding
is the later one, or always ours; the warm-up counts; all passes have one order.
"""

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_first_token")


@dataclass
class Timed:
    """An arm that takes the seconds that its job is worth, and notes its turns."""

    name: str
    share: float
    turns: list[str]
    first_seconds: float = field(default=99.0)  # of the warm-up

    def run(self, job: float) -> "Timed":
        self.turns.append(self.name)
        seconds = self.first_seconds if self.turns.count(self.name) == 1 else 0.0
        return Timed(self.name, self.share, [], seconds or job * self.share)


@pytest.mark.parametrize("sooner", [0, 1])
def test_a_ratio_is_to_the_sooner_plain_decoding(
    script: ModuleType, sooner: int
) -> None:
    turns: list[str] = []
    shares = [2.0, 2.0, 3.0, 1.0]
    shares[sooner] = 1.5
    arms = [Timed(f"arm {n}", share, turns) for n, share in enumerate(shares)]
    found = script._measured(arms, [1.0, 4.0, 8.0], 4)
    assert found["plain"] == f"arm {sooner}"
    ratios = [arm["x_plain"] for arm in found["arms"]]
    assert ratios == pytest.approx([share / 1.5 for share in shares])
    assert [arm["quartiles"] for arm in found["arms"]] == [
        pytest.approx([ratio, ratio]) for ratio in ratios
    ]
    assert [arm["seconds"] for arm in found["arms"]] == [4 * share for share in shares]
    assert {arm["runs"] for arm in found["arms"]} == {12}
    orders = [turns[n : n + 4] for n in range(4, len(turns), 4)]
    assert len(orders) == 12
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert {order[0] for order in orders} == {arm.name for arm in arms}


@pytest.mark.slow
def test_it_measures_a_target() -> None:
    options = "--target dense --group code --draft lookup --prompts 1 --passes 2"
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "benchmark_first_token.py"),
            *options.split(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    names = [arm["arm"] for arm in result["arms"]]
    assert names == ["ours plain", "mlx-lm plain", "ours lookup auto"]
    assert all(arm["seconds"] > 0 for arm in result["arms"])
