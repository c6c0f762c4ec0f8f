"""Trainings from beginning to end, on tiny targets, on a CPU."""

import json
import os
import re
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine import EagleDraft
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.models import load, read_config
from mlx_speculation.training import memory_estimate, training_run
from mlx_speculation.training.kinds.choose_trainee import make_trainee
from mlx_speculation.training.loop import Reports
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.output import curves
from mlx_speculation.training.state import Progress
from mlx_speculation.training.training_run import TrainingResult, train
from support.models.chat_folders import chat_folder
from support.short_training import OPTIONS, lengths


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


def weights(out: Path) -> dict[str, Any]:
    file = json.loads((out / "run" / "state.json").read_text())["weights"]
    loaded: Any = mx.load(str(out / "run" / file))
    return dict(loaded)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        mx.array_equal(value, other[name]) for name, value in one.items()
    )


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curves: drawing takes longer than these trainings."""
    monkeypatch.setattr(curves, "_draw", lambda *_: None)


class KilledError(Exception):
    """Ends a run at once, as a kill does: nothing is saved."""


@pytest.fixture(scope="module")
def trained(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainingResult]:
    """Return the folder and the result of an uninterrupted training."""
    out = tmp_path_factory.mktemp("trained") / "head"
    return out, train(target, out, OPTIONS)


@pytest.mark.openblas
def test_a_head_learns_to_draft(
    target: Path, trained: tuple[Path, TrainingResult]
) -> None:
    out, result = trained
    untrained, *_, last = lengths(result)
    assert result.ended == "steps"
    assert last > untrained + 0.05
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == {"planned": 12, "taken": 12}
    assert record["target"] == target.name
    assert (out / curves.PLOT).is_file()
    for name in ("training.json", "README.md"):  # files that users publish
        assert str(target.parent) not in (out / name).read_text()
    model, tokenizer = load(target)
    draft = EagleDraft.from_folder(out, model)
    generator = SpeculativeGenerator(model, tokenizer, draft=draft, draft_length=3)
    plain = SpeculativeGenerator(model, tokenizer)
    drafted = generator.generate([1, 2, 3], max_tokens=24)
    assert drafted.tokens == plain.generate([1, 2, 3], max_tokens=24).tokens
    assert drafted.stats.drafted > 0


@pytest.mark.openblas
@pytest.mark.parametrize(
    ("how", "at"),
    [
        pytest.param("Ctrl-C", 8, marks=pytest.mark.slow),
        pytest.param("Ctrl-C", 4, marks=pytest.mark.slow),
        pytest.param("killed", 8, marks=pytest.mark.slow),
        pytest.param("killed", 4, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_training_comes_to_the_same_weights(
    how: str,
    at: int,
    target: Path,
    trained: tuple[Path, TrainingResult],
    tmp_path: Path,
) -> None:
    whole, result = trained

    def stop(progress: Progress, loss: float) -> None:
        if progress.step == at:
            if how == "killed":
                raise KilledError
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "head"
    if how == "killed":
        with pytest.raises(KilledError):
            train(target, out, OPTIONS, reports=Reports(step=stop))
    else:
        assert train(target, out, OPTIONS, reports=Reports(step=stop)).ended == (
            "interrupt"
        )
        assert json.loads((out / "training.json").read_text())["ended"] == "interrupt"
    resumed = train(target, out, OPTIONS)
    assert resumed.ended == "steps"
    assert same(weights(out), weights(whole))
    assert (out / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()
    assert resumed.record["losses"] == result.record["losses"]
    assert lengths(resumed) == lengths(result)


BLOCKS = replace(
    OPTIONS,
    kind="dspark",
    depths=None,
    dialogues=8,
    held_out=4,
    block=4,
    anchors=16,
    draft_layers=1,
    evaluations=2,
)


@pytest.mark.openblas
@pytest.mark.parametrize(
    "kind", ["dspark", pytest.param("dflash", marks=pytest.mark.slow)]
)
def test_a_drafter_of_blocks_learns_to_draft(
    kind: Any, target: Path, tmp_path: Path
) -> None:
    """Without `draft_vocab` every id can be drafted. A killed run resumes."""
    out, whole = tmp_path / "drafter", replace(BLOCKS, kind=kind, draft_vocab=None)
    at = whole.steps or 0

    def stop(progress: Progress, loss: float) -> None:
        if progress.step == at // 2:
            raise KilledError

    with pytest.raises(KilledError):
        train(target, out, whole, reports=Reports(step=stop))
    result = train(target, out, whole)
    untrained, *_, last = lengths(result)
    assert result.ended == "steps"
    assert last > untrained + 0.02
    shares = result.record["evaluations"][-1]["acceptance"]["greedy"]["positions"]
    assert len(shares) == (4 if kind == "dspark" else 3)
    generator = SpeculativeGenerator.from_pretrained(target, draft=out, draft_length=3)
    drafted = generator.generate([1, 2, 3], max_tokens=24)
    plain = generator.generate([1, 2, 3], max_tokens=24, draft_length=0)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0


def test_options_of_another_kind_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"kind": "eagle", "block": 8},
        {"kind": "mtp", "anchors": 8},
        {"kind": "eagle", "draft_layers": 2},
        {"kind": "dflash", "markov_rank": 8},
        {"kind": "dspark", "depths": 3},
    ]
    for options in wrong:
        name = list(options)[-1]
        with pytest.raises(InvalidRequestError, match=rf"{name} is \d, but kind is"):
            TrainOptions(**options).check()
    assert TrainOptions(kind="dflash").unrolled == 7
    assert TrainOptions(kind="dspark", block=6).unrolled == 6


def test_a_finished_training_takes_no_further_step(
    target: Path, trained: tuple[Path, TrainingResult]
) -> None:
    before = weights(trained[0])
    again = train(target, trained[0], OPTIONS)
    assert again.ended == "steps"
    assert same(weights(trained[0]), before)


def test_other_options_are_refused(
    target: Path, trained: tuple[Path, TrainingResult]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"began with depths = 3"):
        train(target, trained[0], replace(OPTIONS, depths=4))


def test_a_folder_of_something_else_is_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader")
    with pytest.raises(InvalidRequestError, match=r"'letter.txt', but no training"):
        train(target, tmp_path, OPTIONS)
    with pytest.raises(InvalidRequestError, match="is a file"):
        train(target, tmp_path / "letter.txt", OPTIONS)


def test_what_cannot_be_trained_is_refused_before_the_target_writes(
    target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    small = replace(OPTIONS, kind="draft", draft_model=draft)
    wrong: dict[str, tuple[TrainOptions, str]] = {
        "small": (small, r"config\.json: .*missing"),
        "layers": (replace(OPTIONS, layers=[1, 99]), "99"),
        "mtp": (replace(OPTIONS, kind="mtp"), "^MTP heads of .* not supported"),
    }
    for name, (options, words) in wrong.items():
        with pytest.raises(SpeculationError, match=words):
            train(target, tmp_path / name, options)
        assert not (tmp_path / name).exists()


def test_an_interrupt_says_what_is_kept(target: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def interrupted(done: int, whole: int) -> None:
        assert whole == OPTIONS.dialogues + OPTIONS.held_out
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            target,
            tmp_path,
            OPTIONS,
            reports=Reports(say=said.append, data=interrupted),
        )
    assert re.match(r"\d+ dialogues are kept in .*dialogues\.safetensors; ", said[-1])


@pytest.mark.slow
def test_a_training_ends_before_its_time_is_up(target: Path, tmp_path: Path) -> None:
    """The last evaluation ends in time too. The kept head is that of the last step."""
    began = time.monotonic()
    options = replace(OPTIONS, steps=9_999, minutes=0.25, evaluations=2)
    result = train(target, tmp_path / "head", options)
    assert time.monotonic() - began < 20
    assert result.ended == "time"
    taken = result.record["steps"]["taken"]
    assert taken > 0
    assert result.record["evaluations"][-1]["step"] == taken
    assert result.record["best"]["step"] == taken


def test_memory_can_be_limited() -> None:
    before = mx.set_memory_limit(10**10)
    try:
        with memory_estimate.memory_limit(2):
            assert mx.set_memory_limit(2 * 10**9) == 2 * 10**9
        assert mx.set_memory_limit(before) == 10**10
    finally:
        mx.set_memory_limit(before)


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_each_depth_is_computed_again_where_memory_is_short(
    kind: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(target)
    small = replace(OPTIONS, kind=kind, depths=None)
    trainee = make_trainee(small, model, tokenizer, target, [], range(128))

    def estimate(gb: float) -> tuple[bool, int]:
        options, config = replace(small, memory_gb=gb), read_config(target)
        return memory_estimate.choose_checkpoint(options, model, trainee, config, 4)

    plain, most = estimate(2)
    again, least = estimate((most - 1) / 0.9e9)
    assert (plain, again) == (False, True)
    assert least < most
    monkeypatch.setattr(training_run, "memory_limit", lambda _: nullcontext())
    with pytest.raises(InvalidRequestError, match=r"needs about .* but only 0\.0 GB"):
        train(target, tmp_path / "head", replace(small, memory_gb=1e-6))


@pytest.mark.openblas
def test_dialogues_of_several_runs_are_trained_on(target: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    few = replace(OPTIONS, dialogues=6, held_out=4, batch=6, data_only=True)
    said = [
        train(target, tmp_path / "head", replace(few, data=[file], seed=seed))
        for seed, file in enumerate(files)
    ]
    assert [each.ended for each in said] == ["data", "data"]
    assert not (tmp_path / "head").exists()
    before = files[1].read_bytes()
    whole = replace(OPTIONS, dialogues=14, held_out=8, steps=2, data=files)
    result = train(target, tmp_path / "head", whole)
    counts = [each.record["data"]["dialogues"] for each in said]
    assert min(counts) > 0
    data = result.record["data"]
    assert data["dialogues"] >= 14  # missing dialogues were written
    assert data["held_out"] == 8
    assert data["more"] == ["1.safetensors"]
    assert files[1].read_bytes() == before
    again = train(target, tmp_path / "head", whole)
    assert again.record["data"] == data


def test_a_missing_file_of_dialogues_is_refused(target: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    with pytest.raises(InvalidRequestError, match=r"two\.safetensors.*cannot be read"):
        train(target, tmp_path / "head", replace(OPTIONS, data=files))
