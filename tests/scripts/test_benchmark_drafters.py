"""The table of drafters, on tiny models and with tiny numbers.

Faults that were made by hand, and found here:
    texts are not compared; a length is not passed on; prompts are counted once only
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.demo import demo_prompts
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOKENS = 12


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_model(folder, build("llama"))
    config = {**TINY_MODELS["llama"].args, "model_type": TINY_MODELS["llama"].module}
    save_config(config, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(name="listed")
def _listed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("drafter_list")


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the script on a tiny target that drafts for itself."""
    sizes = f"--group edit --temperature 0 --prompts 2 --tokens {TOKENS}"
    models = ["--target", str(folder), "--draft", str(folder)]
    script = str(SCRIPTS / "benchmark_drafters.py")
    return subprocess.run(
        [sys.executable, script, *models, *sizes.split(), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_head_that_is_not_the_targets_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    head = write_eagle(tmp_path / "head", "vllm")
    done = run(folder, "--head", str(head))
    assert done.returncode == 1
    assert "The EAGLE-3 head guesses" in done.stderr


@pytest.mark.slow
def test_the_last_line_is_json_with_every_drafter(folder: Path) -> None:
    done = run(folder, "--length", "1", "--length", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() >= {"machine", "versions", "blas", "prompts", "tokens"}
    lines = report["results"]
    kinds = [(line["drafter"], line["length"]) for line in lines]
    assert kinds == [
        (name, length) for name in ("model", "lookup", "cascade") for length in (1, 3)
    ]
    for line in lines:
        assert line["emitted"] == 2 * TOKENS
        assert len(line["by_position"]) <= line["length"]
        assert line["by_position"] == sorted(line["by_position"], reverse=True)
        assert line["accepted"] == sum(line["reached"])
    model = lines[1]
    assert model["acceptance_rate"] > 0.95  # the target drafts for itself
    assert len(model["by_position"]) == 3
    plain = SpeculativeGenerator.from_pretrained(folder, draft=folder, draft_length=3)
    drafts = 0
    for prompt in [each for each in demo_prompts() if each.group == "edit"][:2]:
        result = plain.generate(prompt.text, max_tokens=TOKENS, stop_tokens=())
        drafts += result.stats.drafts
    assert model["drafts"] == drafts


def test_a_text_that_is_not_plain_decodings_ends_the_run(
    folder: Path, listed: ModuleType
) -> None:
    bench = listed.Bench.load(folder)
    source: Any = listed.sources_of(bench, folder, [], None)[0]
    sampling = Sampling(seed=0)
    counts, parted = bench.checked_run(source, "a prompt", TOKENS, sampling, 2)
    assert (counts.emitted, parted) == (TOKENS, 0)
    (text,) = bench._texts.values()
    text[5] = (text[5] + 1) % 256
    with pytest.raises(AssertionError, match="not the text of plain"):
        bench.checked_run(source, "a prompt", TOKENS, sampling, 2)


def test_the_bundled_heads_are_known_by_their_folders(listed: ModuleType) -> None:
    from mlx_speculation.demo import demo_models

    beside = demo_models()["draft"].parent
    targets = {"dense", "sliding", "hybrid"}
    folders = {path.parent.name for path in beside.glob("*/config.json")}
    assert folders - targets - {"draft"} <= listed.HEADS.keys()
    assert set(listed.HEADS.values()) <= targets
