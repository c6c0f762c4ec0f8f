"""The benchmark on tiny models, and the check of equal texts that it relies on."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model

from support.tiny_models import TINY_MODELS, build
from support.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROMPT = [7, 200, 31, 64, 5]


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_arms")


def save(name: str, folder: Path) -> Path:
    """Save a tiny model with its tokenizer, in mlx-lm's layout."""
    tiny = TINY_MODELS[name]
    folder.mkdir()
    save_model(folder, build(name))
    save_config({**tiny.args, "model_type": tiny.module}, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def run_benchmark(*options: str) -> dict[str, Any]:
    """Run the script as a user does; return its last line."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "benchmark.py", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_the_last_line_is_json_with_every_arm(tmp_path: Path) -> None:
    target, draft = save("qwen3_5", tmp_path / "one"), save("llama", tmp_path / "two")
    options = "--group edit --prompts 1 --tokens 8 --repeats 1 --draft-length 2"
    options += " --plain-runs 1"
    models = ["--target", str(target), "--draft", str(draft)]
    written = tmp_path / "report.json"
    report = run_benchmark(*models, *options.split(), "--json", str(written))
    assert json.loads(written.read_text()) == report
    parts = {"machine", "versions", "blas", "arguments", "plain_over_mlx_lm", "results"}
    assert report.keys() == parts
    assert [ratio["temperature"] for ratio in report["plain_over_mlx_lm"]] == [0, 1]
    for ratio in report["plain_over_mlx_lm"]:
        assert 0 < ratio["lower"] <= ratio["median"] <= ratio["upper"]
        assert ratio["slices"] == 11
    assert report["machine"].keys() >= {"cpu", "cores", "platform"}
    assert report["versions"].keys() >= {"python", "mlx", "mlx-lm", "transformers"}
    assert report["blas"].keys() == {"name", "detail"}
    assert report["arguments"]["targets"] == ["one"]
    assert [case["temperature"] for case in report["results"]] == [0, 1]
    for case in report["results"]:
        plain, mlx_lm_plain, ours, mlx_lm = case["arms"]
        assert (case["target"], case["group"]) == ("one", "edit")
        assert case["best_draft_length"] == 2
        assert case["plain"] in ("ours", "mlx-lm")
        for arm in (plain, mlx_lm_plain, ours):
            assert arm["tokens_per_second"]["median"] > 0
            assert arm["speedup"]["median"] > 0
        assert ours["text"].startswith("equal")
        assert 0 <= ours["acceptance_rate"] <= 1
        assert 1 <= ours["mean_accepted_length"] <= 3
        assert len(ours["accepted_per_position"]) == 2
        assert mlx_lm["text"].startswith("refused: ValueError")
        assert mlx_lm["tokens_per_second"] is None


def test_rounds_of_mlx_lm_are_counted_from_its_flags(arms: ModuleType) -> None:
    statistics = arms.Statistics()
    # k = 3, 10 tokens: all accepted and a bonus; one and a correction; none and a
    # correction; then 3 tokens are left, all of which were drafted.
    flags = [True] * 3 + [False, True, False, False] + [True] * 3
    arms.count_rounds(statistics, flags, 3, 10)
    assert (statistics.rounds, statistics.drafted, statistics.accepted) == (4, 12, 7)
    assert statistics.emitted == 10
    assert statistics.reached == [3, 2, 2]


def test_tokens_of_the_first_round_are_not_timed(arms: ModuleType) -> None:
    run = arms.Run().follow(iter([(5, 1), (6, 1), (7, 1), (8, 2), (9, 3)]))
    assert (run.tokens, run.timed) == ([5, 6, 7, 8, 9], 2)
