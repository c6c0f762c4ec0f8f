"""Costs are saved in a file, which can be missing, broken, or another machine's."""

import json
import math
from pathlib import Path

import pytest

from mlx_speculation import CostFileWarning
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.environment import cache_folder

KEY = {"target": "a", "draft": ["b"]}
COSTS = {0: 0.5, 4: 1.0}
DRAFTED = RoundSeconds(draft=0.25, verify=0.5, sampler=0.125, host=0.125)
TIMES = {0: RoundSeconds(verify=0.5), 4: DRAFTED}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))


def saved() -> Source:
    known = Source.read(KEY)
    known.part = 4
    assert known.take({0: TIMES}) == {0: COSTS}
    return known


def path_of(known: Source) -> Path:
    assert known.file is not None
    assert known.file.path is not None
    return known.file.path


def test_it_is_read_as_it_was_written() -> None:
    saved()
    again = Source.read(KEY)
    assert again.costs.table() == {0: COSTS}
    assert again.measured == {0: TIMES}
    assert again.part == 4
    assert again.costs.plain(10) is None  # only ratios of saved costs are used
    assert again.costs.curve(10, 4, 2.0)[4] == 4.0


def test_another_context_is_added(tmp_path: Path) -> None:
    saved()
    known = Source.read(KEY)
    known.costs.kept = {}  # as `note` does every `FORGETS` rounds
    known.take({1: TIMES})
    assert Source.read(KEY).measured == {0: TIMES, 1: TIMES}


def test_other_models_have_another_file() -> None:
    saved()
    assert Source.read(KEY | {"target": "c"}).costs.table() == {}


def test_a_draft_without_a_name_keeps_nothing(tmp_path: Path) -> None:
    Source.read(None).take({0: TIMES})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"key": {}},
        {"parts": None},
        {"parts": {"0": [1.0]}},
        {"parts": {"0": {"4": [1.0, 1.0, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [1.0, 1.0, 1.0, -0.1]}}},
        {"parts": {"0": {"0": ["quick", 1.0, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [0.0, 0.0, 0.0, 0.0]}}},
        {"parts": {"0": {"0": [math.inf, 1.0, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [math.nan, 1.0, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [1.0, math.nan, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [10**400, 1.0, 1.0, 1.0]}}},
        {"parts": {"0": {"0": [10**400, 1, 1, 1]}}},
        {"parts": {"0": {"-1": [1.0] * 4, "0": [1.0] * 4}}},
        {"parts": {"0": {"0": [1.0, 2.0]}}},
        {"part": 3},
        {"part": "all"},
    ],
)
def test_a_broken_file_is_said_and_measured_again(change: dict[str, object]) -> None:
    path = path_of(saved())
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.warns(CostFileWarning, match="measured again"):
        known = Source.read(KEY)
    assert known.costs.table() == {}


def test_half_a_file_is_said(tmp_path: Path) -> None:
    path = path_of(saved())
    path.write_text(path.read_text("utf-8")[:40], "utf-8")
    with pytest.warns(CostFileWarning, match=str(path)):
        Source.read(KEY)


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("", "utf-8")
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(file))
    known = Source.read(KEY)
    with pytest.warns(CostFileWarning, match="MLX_SPECULATION_CACHE"):
        known.take({0: TIMES})
    known.take({0: TIMES})  # a second warning would be an error


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_SPECULATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/mlx-speculation")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mlx-speculation"
