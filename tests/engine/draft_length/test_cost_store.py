"""Costs are saved in a file, which may be missing, of another machine, or broken."""

import json
import math
from pathlib import Path

import pytest

from mlx_speculation import CostFileWarning
from mlx_speculation.engine.draft_length.calibration import Calibration
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.environment import cache_folder

KEY = {"target": "a", "draft": ["b"]}
COSTS = {0: 0.5, 4: 1.0}
PARTS = {0: {4: RoundSeconds(draft=0.25, verify=0.5, sampler=0.125, host=0.125)}}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))


def saved() -> Known:
    known = Known.read(KEY)
    measured = Calibration(10, 4)
    for length, seconds in COSTS.items():
        for _ in range(3):
            measured.costs.note(10, length, seconds)
    known.parts, known.part = PARTS, 4
    known.take(measured)
    return known


def path_of(known: Known) -> Path:
    assert known.file is not None
    assert known.file.path is not None
    return known.file.path


def test_it_is_read_as_it_was_written() -> None:
    saved()
    again = Known.read(KEY)
    assert again.seconds == again.costs.table() == {0: COSTS}
    assert again.parts == PARTS
    assert again.part == 4
    assert again.costs.plain(10) is None  # its ratios count, and not its seconds
    assert again.costs.curve(10, 4, 2.0)[4] == 4.0


def test_another_context_is_added(tmp_path: Path) -> None:
    saved()
    known, more = Known.read(KEY), Calibration(1000, 4)
    known.costs.kept = {}  # forgotten by many rounds
    more.costs.take({1: COSTS})
    known.take(more)
    assert Known.read(KEY).seconds == {0: COSTS, 1: COSTS}


def test_other_models_have_another_file() -> None:
    saved()
    assert Known.read(KEY | {"target": "c"}).costs.table() == {}


def test_a_draft_without_a_name_keeps_nothing(tmp_path: Path) -> None:
    Known.read(None).take(Calibration(10, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"key": {}},
        {"seconds": {"0": {"4": 1.0}}},
        {"seconds": {"0": {"0": -1.0}}},
        {"seconds": {"0": {"0": "quick"}}},
        {"seconds": {"0": [1.0]}},
        {"seconds": None},
        {"seconds": {"0": {"0": 0.0}}},
        {"seconds": {"0": {"0": math.inf}}},
        {"seconds": {"0": {"-1": 1.0, "0": 1.0}}},
        {"parts": None},
        {"part": 3},
        {"part": "all"},
        {"parts": {"0": {"4": [1.0, 2.0]}}},
        {"parts": {"0": {"4": [1.0, 2.0, -0.1, 0.0]}}},
    ],
)
def test_a_broken_file_is_said_and_measured_again(change: dict[str, object]) -> None:
    path = path_of(saved())
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.warns(CostFileWarning, match="measured again"):
        known = Known.read(KEY)
    assert known.costs.table() == {}


def test_half_a_file_is_said(tmp_path: Path) -> None:
    path = path_of(saved())
    path.write_text(path.read_text("utf-8")[:40], "utf-8")
    with pytest.warns(CostFileWarning, match=str(path)):
        Known.read(KEY)


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("", "utf-8")
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(file))
    known = Known.read(KEY)
    with pytest.warns(CostFileWarning, match="MLX_SPECULATION_CACHE"):
        known.take(Calibration(10, 4))
    known.take(Calibration(10, 4))  # a second warning would be an error


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_SPECULATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/mlx-speculation")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mlx-speculation"
