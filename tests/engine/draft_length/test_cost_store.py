"""What rounds cost is kept in a file, which may be lost, foreign or broken."""

import json
import math
from pathlib import Path

import pytest

from mlx_speculation import CostFileWarning
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
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
    for length, seconds in COSTS.items():
        for _ in range(3):
            known.costs.note(10, length, seconds)
    known.rates.note(drafted=2, accepted=1)
    known.parts, known.part = PARTS, 4
    known.save_if_new()
    return known


def path_of(known: Known) -> Path:
    assert known.file is not None
    assert known.file.path is not None
    return known.file.path


def test_it_is_read_as_it_was_written() -> None:
    known = saved()
    again = Known.read(KEY)
    assert again.costs.table() == {0: pytest.approx(COSTS)}
    assert again.parts == PARTS
    assert again.part == 4
    assert again.rates.rates(2) == pytest.approx(known.rates.rates(2), abs=0.1)


def test_other_models_have_another_file() -> None:
    saved()
    assert Known.read(KEY | {"target": "c"}).costs.table() == {}


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    saved()
    known = Known.read(KEY)
    path = path_of(known)
    path.unlink()
    known.costs.note(10, 4, 1.1)
    known.save_if_new()
    assert not path.exists()
    known.costs.note(10, 8, 1.5)  # a length that is not in it
    known.save_if_new()
    assert Known.read(KEY).costs.table()[0].keys() == {0, 4, 8}


def test_rates_that_have_changed_are_written() -> None:
    known = saved()
    before = Known.read(KEY).rates.rates(1)
    rates = AcceptanceRates([0.1] * 2, 20.0)
    known.keep(rates)
    assert Known.read(KEY).rates.rates(1)[0] < before[0] - 0.2


def test_a_draft_without_a_name_keeps_nothing(tmp_path: Path) -> None:
    known = Known.read(None)
    known.costs.note(10, 0, 1.0)
    known.save()
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
        {"rates": [1.5]},
        {"rates": None},
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
    for _ in range(3):
        known.costs.note(10, 0, 1.0)
    with pytest.warns(CostFileWarning, match="MLX_SPECULATION_CACHE"):
        known.save_if_new()
    known.save_if_new()  # a second warning would be an error


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_SPECULATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/mlx-speculation")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "mlx-speculation"
