"""The scripts that say where time goes, on the bundled models."""

import importlib
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import position
from mlx_speculation.demo import demo_models
from mlx_speculation.models import load
from mlx_speculation.models.round_context import in_round

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *options: str) -> dict[str, Any]:
    """Run a script as a user does; return its last line."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_a_profile_has_every_part_and_piece() -> None:
    options = "--target hybrid --length 3 --repeats 2 --rounds 2"
    plain, drafted = run("profile_round.py", *options.split())["results"]
    for one in (plain, drafted):
        parts = one["as_it_runs"]
        assert parts["verify"] > 0
        assert parts["host"] > 0
        assert parts["round"] > max(parts["verify"], parts["host"])
    assert plain["taken_apart"] == {}
    pieces = drafted["taken_apart"]
    names = ["draft", "forward", "sampler", "commit", "replay", "host", "round"]
    assert list(pieces) == names
    assert all(value > 0 for name, value in pieces.items() if name != "replay")
    assert pieces["forward"] > pieces["commit"]


def test_efficiency_is_reported_at_each_context_and_length() -> None:
    options = "--target dense --length 2 --contexts 32 --contexts 64 --repeats 3"
    report = run(
        "benchmark_efficiency.py", *options.split(), "--rounds", "2", "--forwards", "2"
    )
    cases = [(one["drafter"], one["context"]) for one in report["results"]]
    assert cases == [("plain", 32), ("model", 32), ("plain", 64), ("model", 64)]
    for one in report["results"]:
        assert one["efficiency"] > 0
        assert one["tokens_per_second"] > 0
        lower, middle, upper = one["beside_ms"]
        assert lower <= middle <= upper
        assert (middle > 0) == (one["drafter"] == "model")
        assert one["repeats"] == 3
        assert (one["forward_over_plain"] == 1) == (one["drafter"] == "plain")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("steady_forwards")


def test_steady_forwards_are_fed_their_own_choices_and_leave_no_rows(
    steady: ModuleType,
) -> None:
    model, _ = load(demo_models()["draft"])
    caches = steady.filled(model, [7, 8, 9])
    step = steady.step_of(model, caches)
    fed: list[list[int]] = []

    def watched(tokens: mx.array) -> mx.array:
        read: Any = tokens.tolist()
        fed.append(read[0])
        chosen: mx.array = step(tokens)
        return chosen

    seconds = steady.steady_seconds(watched, 3, 4, time.perf_counter)
    assert seconds > 0
    assert position(caches) == 3
    assert len(fed) == 6
    for tokens, following in pairwise(fed):
        fresh = make_prompt_cache(model)
        logits = model(mx.array([[7, 8, 9, *tokens]]), cache=fresh)
        assert following == [int(logits[0, -1].argmax().item())] * 3


@pytest.mark.parametrize("drafts", [False, True])
def test_single_tokens_take_the_ways_of_a_round_where_they_are_drafts(
    steady: ModuleType, drafts: bool
) -> None:
    """As in rounds: a plain step keeps mlx's operations, a draft does not."""
    model, _ = load(demo_models()["draft"])
    kind: Any = type(model)
    ways: list[bool] = []

    class Watched(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            ways.append(in_round())
            return super().__call__(*arguments, **options)

    caches = steady.filled(model, [7, 8, 9])
    model.__class__ = Watched
    step = steady.step_of(model, caches, drafts=drafts)
    for width in (1, 2):
        mx.eval(step(mx.array([[5] * width])))
    assert ways == [drafts, True]
    assert position(caches) == 3


def test_rounds_stand_where_the_forwards_do_in_every_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that goes on is further in its text each time, and forwards are not."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("benchmark_efficiency")
    cases = script.make_cases("dense", ["model"], [2], 32, time.perf_counter)
    case = next(case for case in cases if case.drafter == "model")
    begin, streams = case.open, []

    def opened() -> Any:
        streams.append(begin())
        return streams[-1]

    case.open = opened
    for _ in range(3):
        case.repeat(2, 2)
    assert len(case.ratios) == len(streams) == 3
    assert {stream.stats.rounds for stream in streams} == {script.WARM_UP + 2 + 2}
    assert len(case.beside) == 3 * 2
    assert len({stream.stats.emitted for stream in streams}) == 1
