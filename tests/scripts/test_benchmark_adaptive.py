"""The worst cases of adaptive lengths: the script on tiny models, and its ratios.

Faults that were made by hand, and found here: the first length of each group for the
best; seconds the wrong way round; requests of one group after the other; a wrong draft
that is right.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model

from mlx_speculation import Sampling, SpeculativeGenerator, load
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_model(folder, build("llama"))
    config = {**TINY_MODELS["llama"].args, "model_type": TINY_MODELS["llama"].module}
    save_config(config, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(name="scripts")
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("benchmark_arms", "benchmark_case", "adaptive_cases")
    return SimpleNamespace(
        **{name.split("_")[1]: importlib.import_module(name) for name in names}
    )


@pytest.mark.slow
def test_the_last_line_is_json_with_every_ratio(folder: Path, tmp_path: Path) -> None:
    sizes = "--temperature 0 --tokens 48 --passes 1 --requests 4 --request-tokens 48"
    models = ["--target", str(folder), "--draft-model", str(folder)]
    written = tmp_path / "report.json"
    script = [sys.executable, str(SCRIPTS / "benchmark_adaptive.py")]
    sizes += " --draft-length 2 --draft model --draft lookup"
    options = [*models, *sizes.split(), "--json", str(written)]
    done = subprocess.run(
        [*script, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(written.read_text()) == report
    assert [(d["what"], d["least"]) for d in report["demands"]] == [
        ("model, adaptive over plain", 0.97),
        ("lookup, adaptive over plain", 0.97),
        ("wrong, adaptive over plain", 0.97),
        ("model, requests over the best lengths", 0.95),
        ("lookup, requests over the best lengths", 0.95),
    ]
    every, *groups = report["results"]
    assert every["group"] == "all groups"
    wrong = every["arms"][-1]
    assert (wrong["arm"], wrong["accepted"]) == ("ours wrong auto", 0)
    assert [case["group"] for case in groups] == ["code", "prose", "edit"] * 2
    # Four requests: the groups take turns, and the first has its second one.
    assert [len(case["arms"][2]["repeats"]) for case in groups] == [2, 1, 1] * 2
    for case in [every, *groups]:
        for arm in case["arms"]:
            assert arm["text"].startswith("equal")


def test_a_draft_that_is_always_wrong_is_never_accepted(
    folder: Path, scripts: Any
) -> None:
    target, tokenizer = load(folder)
    draft = scripts.cases.always_wrong(load(folder)[0])
    generator = SpeculativeGenerator(target, tokenizer, draft=draft, draft_length=3)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=1)
        result = generator.generate("a prompt", max_tokens=40, sampling=sampling)
        assert result.stats.drafted > 60
        assert result.stats.accepted <= 2 * temperature  # by chance, where there is any


def case_of(scripts: Any, group: str, speeds: dict[Any, tuple[int, ...]]) -> Any:
    found = []
    for (length, auto), passes in speeds.items():
        draft = "model" if length else ""
        series = scripts.case.Series(
            scripts.arms.Arm("ours", length, None, draft, auto)
        )
        for speed in passes:
            run = scripts.arms.Run(tokens=[1] * 60, timed=speed, seconds=1.0)
            run.reasons = {"best": 0.9, "trial": 0.1}
            series.runs.append(run)
        found.append(series)
    return scripts.case.Case("dense", group, 0.0, [], found)


def test_requests_are_compared_with_the_best_length_of_each_group(scripts: Any) -> None:
    plain, short, long, auto = (0, False), (2, False), (8, False), (8, True)
    cases = [
        case_of(
            scripts, "code", {plain: (20,), short: (30,), long: (60,), auto: (50,)}
        ),
        case_of(
            scripts, "prose", {plain: (30,), short: (20,), long: (10,), auto: (20,)}
        ),
    ]
    demand = scripts.cases.Adaptive.demand_of_requests(
        SimpleNamespace(name="dense"), cases
    )
    # One second at 60 and two at 30, over 1.2 seconds and 3.
    assert demand.value == pytest.approx(3 / 4.2)
    assert demand.note == "2 requests, 120 tokens; code 8, prose 0"
    (series,) = cases[0].of("ours", auto=True)
    assert (
        scripts.cases.tried(series) == "50 tokens, 0 of 0 rounds drafted; trial 10.0%"
    )
