"""The check of a model's own rows, on tiny models, right and wrong."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model
from typer.testing import CliRunner

from mlx_speculation import models
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer
from support.models.wrong_wide_forward import WrongInWideForwards

SCRIPTS = Path(__file__).parents[2] / "scripts"
LENGTHS = ["--tokens", "12", "--places", "3", "--draft-length", "3"]
OPTIONS = ["--prompt", "hello", "--blas", "stock", *LENGTHS]


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_identity")


@pytest.fixture(name="folder", params=["llama", "gpt_oss", "qwen3_5"])
def _folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a tiny model with its tokenizer, in mlx-lm's layout."""
    name: str = request.param
    tiny, folder = TINY_MODELS[name], tmp_path / name
    folder.mkdir()
    save_model(folder, build(name))
    save_config({**tiny.args, "model_type": tiny.module}, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def check(script: ModuleType, *options: str) -> tuple[int, list[str], dict[str, Any]]:
    """Run the script; return its status, its lines and its last line's object."""
    done = CliRunner().invoke(script.app, [*OPTIONS, *options])
    lines = done.stdout.splitlines()
    assert lines, done.exception
    report: dict[str, Any] = json.loads(lines[-1])
    return done.exit_code, lines[:-1], report


def test_the_last_line_is_json_with_the_verdict(
    script: ModuleType, folder: Path, tmp_path: Path
) -> None:
    written = tmp_path / "report.json"
    status, lines, report = check(script, str(folder), "--json", str(written))
    assert json.loads(written.read_text()) == report
    assert report["machine"].keys() >= {"cpu", "cores", "platform"}
    assert report["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    assert report["blas"].keys() == {"name", "detail"}
    assert report["arguments"]["model"] == folder.name
    assert report["arguments"]["seed"] == 0
    assert status == 0
    assert report["verdict"] in ("identical", "same choices")
    assert report["first"] is None
    assert report["rows"] == 12
    assert [place["position"] for place in report["places"]] == [0, 4, 9]
    assert report["largest_difference"] < 1e-3
    assert lines[0].startswith("token 0: 4 rows, 0 choose another token")
    assert lines[-1].startswith(f"{report['verdict']}: 0 of 12 rows")


def test_a_row_that_differs_is_printed_with_both_ids_and_the_margin(
    script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = models.load

    def load_wrong(path: Path | str) -> tuple[Any, Any]:
        model, tokenizer = load(path)
        return WrongInWideForwards(model, 2, 4), tokenizer

    monkeypatch.setattr(models, "load", load_wrong)
    status, lines, report = check(script, str(folder))
    assert (status, report["verdict"]) == (1, "different")
    assert report["differing_rows"] == 3
    first = report["first"]
    assert (first["position"], first["index"]) == (0, 2)
    assert first["at_once"] != first["one_by_one"]
    assert 0 < first["margin"] <= first["difference"] <= report["largest_difference"]
    assert (
        f"first: row 2 of the draft after token 0 chooses {first['at_once']} at once "
        f"and {first['one_by_one']} one by one; the two best differ by "
        f"{first['margin']:.3g} there"
    ) in lines[-2]
    assert lines[-1].startswith("different: 3 of 12 rows")

    margins = [row["margin"] for p in report["places"] for row in p["rows"]]
    status, lines, report = check(script, str(folder), "--tolerance", str(max(margins)))
    assert (status, report["verdict"]) == (0, "near-ties")
    assert report["first"] == first


def test_a_text_shorter_than_a_draft_is_refused(script: ModuleType) -> None:
    done = CliRunner().invoke(script.app, ["dense", "--tokens", "2"])
    assert done.exit_code == 2
    assert "--tokens 4" in done.output
