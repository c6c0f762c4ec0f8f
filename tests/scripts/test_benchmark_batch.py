"""The script that measures batches, on a tiny model, and how it takes its turns.

Faults that were made by hand, and found here: a text that differs is let through; the
clock runs from the start; arms always in the same order.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from mlx_lm.utils import save_config, save_model

from mlx_speculation import SpeculativeGenerator
from support.identity import plain_text, prompt_of
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="arms")
def _arms(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("batch_arms")


def test_the_last_line_is_json_with_every_ratio(tmp_path: Path) -> None:
    save_model(tmp_path, build("llama"))
    config = {**TINY_MODELS["llama"].args, "model_type": TINY_MODELS["llama"].module}
    save_config(config, tmp_path / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(tmp_path)
    sizes = "--batch 2 --draft-length 2 --group code --tokens 10 --repeats 2"
    sizes += " --prompt-tokens 20"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPTS / "benchmark_batch.py")),
            *("--target", str(tmp_path), "--draft-model", str(tmp_path)),
            *sizes.split(),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (result["batch"], result["group"]) == (2, "code")
    names = ["model 2", "model auto", "lookup 2", "lookup auto"]
    assert [arm["arm"] for arm in result["arms"]] == ["mlx-lm", "plain", *names]
    assert result["arms"][0]["ratio"] == [1, 1, 1]
    assert result["arms"][2]["accepted"] == 1  # the model drafts for itself
    assert all(len(arm["speeds"]) == 2 for arm in result["arms"])


def test_arms_run_the_same_prompts_and_count_after_the_first_tokens(arms: Any) -> None:
    model = build("llama")
    job = arms.Job([prompt_of(5), prompt_of(9)], 12)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    expected = [plain_text(model, prompt, 12) for prompt in job.prompts]
    for run in (arms.mlx_lm(model, job), arms.ours(plain, 0, job)):
        assert run.texts == expected
        assert run.timed == 2 * 11
        assert run.speed == run.timed / run.seconds


def test_another_arm_comes_first_in_every_pass(arms: Any) -> None:
    order = []

    def noting(name: str) -> Any:
        return lambda job: order.append((name, job))

    made = [arms.Arm(name, noting(name), warm_up=n) for n, name in enumerate("abc")]
    arms.run_in_turns(made, [1, 2], 3)
    warm, counted = order[:3], order[3:]
    assert warm == [("b", 1), ("c", 1), ("c", 2)]
    assert [name for name, _ in counted] == list("abcbcacab")
    assert [job for _, job in counted] == [1, 1, 1, 2, 2, 2, 1, 1, 1]


def test_heads_are_loaded_for_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    models: Any = importlib.import_module("batch_models")
    small = models.demo_models()["draft"]
    found = models.load_models("hybrid", small, "as it is", ["mtp", "lookup"])
    SpeculativeGenerator(found.target, found.tokenizer, draft=found.drafts["mtp"])
    assert found.drafts["lookup"] == "lookup"
    found = models.load_models("dense", small, "as it is", ["eagle"])
    SpeculativeGenerator(found.target, found.tokenizer, draft=found.drafts["eagle"])
    with pytest.raises(typer.BadParameter, match="no 'other'"):
        models.load_models("dense", small, "as it is", ["other"])
