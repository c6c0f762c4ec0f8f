"""The table of cheaper drafts, on a tiny model and with tiny numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.utils import save_config, save_model

from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_cheaper.py"


@pytest.mark.slow
def test_the_last_line_is_json_with_every_variant(tmp_path: Path) -> None:
    save_model(tmp_path, build("llama"))
    config = {**TINY_MODELS["llama"].args, "model_type": TINY_MODELS["llama"].module}
    save_config(config, tmp_path / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(tmp_path)
    options = "--bits 4 --ids 90 --prompts 1 --tokens 10 --turns 4 --length 2"
    models = ["--target", str(tmp_path), "--draft", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *models, *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() >= {"machine", "versions", "blas", "turns", "results"}
    loaded, few, quantized, both = report["results"]
    names = [each["variant"] for each in report["results"]]
    assert names == ["as loaded", "as loaded, 90 ids", "4 bits", "4 bits, 90 ids"]
    assert loaded["over_first"] == [1.0, 1.0, 1.0]
    row = 64 * 4
    assert few["bytes"] == loaded["bytes"] + 90 * row
    assert quantized["bytes"] < loaded["bytes"] / 5
    assert quantized["bytes"] < both["bytes"] < quantized["bytes"] + 90 * row / 5
    for each in report["results"]:
        assert each["step_seconds"] > 0
        assert each["groups"].keys() == {"code", "prose"}
        for counts in each["groups"].values():
            assert counts["drafted"] >= counts["accepted"]
    assert loaded["groups"]["code"]["acceptance_rate"] > 0.9
