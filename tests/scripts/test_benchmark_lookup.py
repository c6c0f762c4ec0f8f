"""The benchmark of lookups on tiny models, with tiny numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.utils import save_config, save_model

from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "benchmark_lookup.py"


@pytest.mark.slow
def test_the_last_line_is_json_with_costs_and_every_arm(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_model(folder, build("llama"))
    config = {**TINY_MODELS["llama"].args, "model_type": TINY_MODELS["llama"].module}
    save_config(config, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    options = "--group edit --temperature 0 --repeats 1 --tokens 24 --context 2000"
    models = ["--target", str(folder), "--draft", str(folder)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *models, *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["costs"]) == 8
    for cost in report["costs"]:
        assert cost["tokens"] == 2000
        assert 0 < cost["bytes_per_token"] < 400
        assert 0 < cost["append"] < 1000
        assert 0 < cost["propose"] < 10_000
    (case,) = report["results"]
    assert [arm["arm"] for arm in case["arms"]] == [
        "ours plain",
        "mlx-lm plain",
        "ours lookup k=8",
        "ours ngram k=8",
        "ours cascade k=8",
        "ours k=4",
    ]
    for arm in case["arms"]:
        assert arm["text"].startswith("equal")
        assert arm["tokens_per_round"] >= 1
