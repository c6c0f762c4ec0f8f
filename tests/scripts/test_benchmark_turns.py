"""Ways to decode by turns: every arm takes the same tokens, and the ratio is of times.

Faults that were made by hand, and found here: the first slice counts; the ratio is
upside down; plain decoding is the slower one; another text of ours is let through.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_turns")


def test_a_ratio_is_to_the_faster_plain_decoding(script: ModuleType) -> None:
    seconds = {
        "mlx-lm plain": [1.0, 2.0],
        "ours plain": [2.0, 2.0],
        "lookup auto": [1.0, 0.5],
    }
    found = script.ratios(seconds, tokens=50)
    assert found["plain"] == "mlx-lm plain"
    speeds = {arm["arm"]: arm["tokens_per_second"] for arm in found["arms"]}
    assert speeds["ours plain"] == pytest.approx(
        2 * 32 / 4
    )  # the first 16 do not count
    assert [arm["x_plain"] for arm in found["arms"]] == [1.0, 0.75, 2.0]
    assert found["arms"][2]["each"] == [1.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_all_arms_take_turns(temperature: str) -> None:
    options = "--target dense --group code --draft lookup --draft model --prompts 1"
    options += " --tokens 32 --draft-length 2 --mlx-lm-length 2"
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
        "mlx-lm plain",
        "ours plain",
        "lookup auto",
        "lookup k=2",
        "model auto",
        "model k=2",
        "mlx-lm k=2",
    ]


def test_another_text_of_ours_is_an_error(script: ModuleType) -> None:
    arms = importlib.import_module("benchmark_arms")
    options = importlib.import_module("benchmark_options")
    models = arms.Models.load(options.folder_of("draft"), options.folder_of("draft"))
    job = arms.Job(models.encode("def f(n):"), 8, 1.0, 3)
    ours = models.plain.generate(
        job.prompt, max_tokens=8, sampling=job.sampling, stop_tokens=()
    ).tokens
    other = [*ours[:-1], (ours[-1] + 1) % 500]
    script.check(models, job, {"ours plain": ours, "mlx-lm plain": other})
    with pytest.raises(AssertionError, match="lookup auto"):
        script.check(models, job, {"ours plain": ours, "lookup auto": other})
