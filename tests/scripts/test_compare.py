"""The comparison on tiny models, what it demands, and transformers' arms.

Faults that were made by hand, and found here: candidates counted with the row behind
them; transformers that never samples.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model

from mlx_speculation.demo import demo_models, demo_prompts
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

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


def run_compare(*options: str) -> dict[str, Any]:
    """Run the script as a user does; return its last line."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "compare.py", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_the_last_line_is_json_with_every_arm(tmp_path: Path) -> None:
    target, draft = save("llama", tmp_path / "one"), save("qwen3", tmp_path / "two")
    options = "--group edit --tokens 18 --passes 1 --final-tokens 18 --final-passes 1"
    options += " --draft-length 2 --draft-length 3 --plain-runs 1 --draft model"
    options += " --no-torch --temperature 0"
    models = ["--target", str(target), "--draft-model", str(draft)]
    written, plot = tmp_path / "report.json", tmp_path / "plot.png"
    out = ["--json", str(written), "--plot", str(plot)]
    report = run_compare(*models, *options.split(), *out)
    assert json.loads(written.read_text()) == report
    assert (tmp_path / "plot-one.png").read_bytes().startswith(b"\x89PNG")
    parts = {"machine", "versions", "blas", "arguments", "plain_over_mlx_lm"}
    assert report.keys() >= parts | {"results", "finals", "demands", "round_seconds"}
    (ratio,) = report["plain_over_mlx_lm"]
    assert 0 < ratio["lower"] <= ratio["median"] <= ratio["upper"]
    assert (ratio["temperature"], ratio["slices"]) == (0, 11)
    assert report["machine"].keys() >= {"cpu", "cores", "platform"}
    assert report["versions"].keys() >= {"python", "mlx", "mlx-lm", "transformers"}
    assert report["blas"].keys() == {"name", "detail"}
    assert report["arguments"]["targets"] == ["one"]
    costs = report["round_seconds"]["one"]["model"]
    assert costs.keys() == set("012345678")
    assert len(report["results"]) == len(report["finals"]) == 1
    for case in report["results"]:
        assert (case["target"], case["group"]) == ("one", "edit")
        assert case["best_draft_length"] in (2, 3)
        assert case["plain"] in ("ours", "mlx-lm")
        arms = {arm["arm"]: arm for arm in case["arms"]}
        ours = ["ours model k=2", "ours model k=3", "ours model auto"]
        theirs = [f"mlx-lm k={length}" for length in (2, 3, 4, 8)]
        assert list(arms) == ["ours plain", "mlx-lm plain", *ours, *theirs]
        for name in ["ours plain", "mlx-lm plain", *ours]:
            assert arms[name]["tokens_per_second"]["median"] > 0
            assert arms[name]["first_token_seconds"]["median"] > 0
            assert arms[name]["speedup"]["median"] > 0
        for name, length in zip(ours, (2, 3, 8), strict=True):
            assert arms[name]["text"].startswith("equal")
            assert 0 <= arms[name]["acceptance_rate"] <= 1
            assert 1 <= arms[name]["mean_accepted_length"] <= length + 1
            assert len(arms[name]["accepted_per_position"]) <= length
        for name in theirs:
            assert arms[name]["text"].startswith("equal")
    for case in report["finals"]:
        names = [arm["arm"] for arm in case["arms"]]
        assert names[:2] == ["ours plain", "mlx-lm plain"]
        assert sorted(names[2:-1]) == sorted(ours)
        assert names[-1] in theirs
    asked = {demand["what"] for demand in report["demands"]}
    assert asked == {
        "our plain over mlx-lm's",
        "adaptive over the best length",
        "time to the first token",
    }


def test_what_mlx_lm_refuses_is_said(arms: ModuleType, tmp_path: Path) -> None:
    target, draft = save("qwen3_5", tmp_path / "one"), save("llama", tmp_path / "two")
    models = arms.Models.load(target, draft)
    run = arms.mlx_lm_arms(models, [2])[0].run(job(arms, PROMPT))
    assert run.failure.startswith("refused: ValueError: Speculative decoding requires")
    assert not run.tokens


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


def job(arms: ModuleType, prompt: list[int], temperature: float = 0.0) -> Any:
    return arms.Job(prompt, 20, temperature, 1)


@pytest.fixture(name="dense", scope="module")
def _dense() -> Any:
    """The dense demo target with its draft, and transformers' arms of both."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        arms = importlib.import_module("benchmark_arms")
        torch_arms = importlib.import_module("torch_arms")
    finally:
        sys.path.remove(str(SCRIPTS))
    folders, text = demo_models(), demo_prompts()[0].text
    models = arms.Models.load(folders["dense"], folders["draft"])
    made, note = torch_arms.torch_arms(
        models, folders["dense"], folders["draft"], [3], text
    )
    assert "Qwen3ForCausalLM" in note
    return arms, models, made


@pytest.mark.slow
def test_transformers_says_the_same_and_its_rounds_are_counted(dense: Any) -> None:
    arms, models, (plain, assisted, auto) = dense
    asked = job(arms, models.encode(demo_prompts()[1].text))
    expected = arms.plain_arms(models)[0].run(asked)
    for arm, longest in ((plain, 0), (assisted, 3), (auto, 20)):
        run = arm.run(asked)
        counts = run.statistics
        assert run.failure is None
        assert run.tokens == expected.tokens
        assert 0 < run.first_seconds < 60
        assert run.seconds > 0
        # All but the first round are timed: it has one token or more.
        assert run.timed <= 19
        assert counts.emitted == counts.rounds + counts.accepted == 20
        assert counts.accepted <= counts.drafted <= longest * counts.rounds
        assert len(counts.reached) <= longest
    assert assisted.run(asked).statistics.drafted > 20 // 2
    assert [a.name for a in (plain, assisted, auto)] == [
        "transformers plain",
        "transformers k=3",
        "transformers auto",
    ]


def test_transformers_samples_at_a_temperature(dense: Any) -> None:
    arms, models, (plain, assisted, _) = dense
    prompt = models.encode(demo_prompts()[1].text)
    greedy = plain.run(job(arms, prompt)).tokens
    for arm in (plain, assisted):
        run = arm.run(job(arms, prompt, 1.0))
        assert len(run.tokens) == 20
        assert run.tokens != greedy
        assert not arm.is_comparable(1.0)


@pytest.mark.parametrize("name", ["sliding", "hybrid"])
def test_targets_are_the_same_in_transformers(dense: Any, name: str) -> None:
    twins = importlib.import_module("torch_twins")
    text = dense[1].encode(demo_prompts()[0].text)[:150]  # longer than the window
    assert twins.load_twin(demo_models()[name], text).difference < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # mlx-lm's class reads neither.
        ({"hidden_act": "relu"}, "logits differ by"),
        ({"attention_bias": True}, "other parameters"),
    ],
)
def test_a_model_with_other_logits_has_no_arms(
    dense: Any, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    torch_arms = importlib.import_module("torch_arms")
    folder = tmp_path / "other"
    copytree(demo_models()["draft"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    made, note = torch_arms.torch_arms(dense[1], folder, folder, [3], "text " * 9)
    assert not made
    assert note.startswith(f"transformers: no arms, since {said}")


def test_predicted_speeds_are_tokens_over_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults found here: one position off; rounds without drafts left out."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    predicted_speeds = importlib.import_module("compare_target").predicted_speeds
    seconds = {0: 1.0, 1: 2.0, 2: 3.0, 4: 5.0}
    assert predicted_speeds(seconds, [0.5, 0.25]) == {
        0: 1.0,
        1: pytest.approx(1.5 / 2),
        2: pytest.approx(1.75 / 3),
    }
    half = predicted_speeds(seconds, [0.5, 0.25], drafting=0.5)
    assert half == {
        0: 1.0,
        1: pytest.approx((1 + 0.25) / 1.5),
        2: pytest.approx((1 + 0.375) / 2),
    }
