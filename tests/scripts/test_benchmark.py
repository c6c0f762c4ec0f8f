"""The benchmark on tiny models, and the check of equal texts that it relies on."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import save_config, save_model

from mlx_speculation import Sampling
from mlx_speculation.samplers import Chooser
from mlx_speculation.samplers.noise import CHOICE, gumbel, stream_key
from support.tiny_models import TINY_MODELS, build
from support.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROMPT = [7, 200, 31, 64, 5]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("identity_check")


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
    models = ["--target", str(target), "--draft", str(draft)]
    written = tmp_path / "report.json"
    report = run_benchmark(*models, *options.split(), "--json", str(written))
    assert json.loads(written.read_text()) == report
    assert report.keys() == {"machine", "versions", "blas", "arguments", "results"}
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


def test_a_margin_within_the_difference_of_the_widths_is_a_near_tie(
    identity: ModuleType,
) -> None:
    chooser = Chooser(Sampling(seed=0), 4)
    row = mx.array([[1.0, 3.0, 2.9999, 0.0]])
    assert identity.weigh(chooser, row, 9, (0, 1, 2), 1e-4).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 1, 2), 1e-5).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 1, 0), 1e-4).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 1, None), 1e-4).near_tie


def test_noise_and_temperature_count_when_sampling(identity: ModuleType) -> None:
    sampling = Sampling(temperature=0.5, seed=3)
    noise = gumbel(stream_key(3, CHOICE), mx.array([9]), 4)
    # Scores of zero but for the noise: it alone would make the difference.
    row = -noise * sampling.temperature + mx.array([[0.0, 1e-4, 0.0, -9.0]])
    chooser = Chooser(sampling, 4)
    tie = identity.weigh(chooser, row, 9, (0, 0, 1), 1e-4)
    assert tie.near_tie
    assert tie.margin == pytest.approx(2e-4, rel=0.02)
    assert not identity.weigh(chooser, row, 8, (0, 0, 1), 1e-4).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 0, 3), 1e-4).near_tie


def test_a_token_at_the_border_of_top_p_is_a_near_tie(identity: ModuleType) -> None:
    chooser = Chooser(Sampling(temperature=1.0, top_p=0.7, seed=0), 3)
    row = mx.log(mx.array([[0.70001, 0.2, 0.09999]]))
    assert identity.weigh(chooser, row, 9, (0, 0, 1), 1e-4).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 0, 2), 1e-4).near_tie
    assert not identity.weigh(chooser, row, 9, (0, 0, 1), 1e-6).near_tie


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_the_deciding_row_is_the_one_that_chose(
    identity: ModuleType, name: str
) -> None:
    model, prompt = build(name), [*range(40)]
    steps = generate_step(mx.array(prompt), model, max_tokens=12)
    text = [*prompt, *(int(token) for token, _ in steps)]
    for width in (1, 4):
        for first in range(1, width + 1):
            for end in (40, 41, 47):
                row = identity.deciding_row(
                    model, text[:end], 40, first=first, width=width
                )
                assert int(mx.argmax(row)) == text[end]


class RoundsByWidth:
    """Prefers token 1 to token 2 by a little, and the other way round in blocks."""

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        width = ids.shape[1]
        row = mx.array([0.0, 1.0, 0.99995 if width == 1 else 1.00005])
        return mx.broadcast_to(row, (1, width, 3))


def test_texts_that_part_at_a_near_tie_are_the_same(identity: ModuleType) -> None:
    model, chooser = RoundsByWidth(), Chooser(Sampling(seed=0), 3)

    def compare(other: list[int], width: int) -> Any:
        return identity.assert_same_text(
            model, chooser, PROMPT, [1, 1, 1], other, width=width
        )

    tie = compare([1, 2, 0], 4)
    assert (tie.index, tie.expected, tie.got) == (1, 1, 2)
    assert tie.margin == pytest.approx(5e-5, rel=0.01)
    assert tie.difference == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(AssertionError, match="margin"):
        compare([1, 0, 0], 4)
    with pytest.raises(AssertionError, match="margin"):
        compare([1, 2, 0], 1)


def test_a_real_difference_is_refused(identity: ModuleType) -> None:
    model, chooser = build("llama"), Chooser(Sampling(seed=0), 256)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=8)
    text = [int(token) for token, _ in steps]

    def compare(other: list[int]) -> Any:
        return identity.assert_same_text(model, chooser, PROMPT, text, other, width=3)

    assert compare(text) is None
    with pytest.raises(AssertionError, match=r"token 5 is .* margin"):
        compare([*text[:5], (text[5] + 1) % 256, *text[6:]])
    with pytest.raises(AssertionError, match="token 7 is None"):
        compare(text[:7])
