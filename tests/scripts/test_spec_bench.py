"""The script spec_bench, on bundled prompts and on a file of questions."""

import json
from pathlib import Path

import pytest
import spec_bench
from typer.testing import CliRunner

from support.scripts import run_script, save_tiny


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_every_arm_has_a_row_with_its_speed_and_its_text(folder: Path) -> None:
    sizes = "--group code --prompts 2 --tokens 24 --mlx-lm-length 2"
    report = run_script("spec_bench", folder, f"{sizes} --draft model --draft-length 2")
    assert report["arguments"]["target"] == ["tiny"]
    rows = {row["arm"]: row for row in report["results"]}
    drafted = ["model k=2", "model adaptive", "mlx-lm k=2"]
    assert [*rows] == ["ours plain", "mlx-lm plain", *drafted]
    assert all(row["texts"].startswith("equal") for row in rows.values())
    speeds = {name: row["tokens_per_second"] for name, row in rows.items()}
    fastest = max(speeds["ours plain"], speeds["mlx-lm plain"])
    for name, row in rows.items():
        assert row["x_plain"] == pytest.approx(speeds[name] / fastest)
        assert row["x_mlx_lm"] == pytest.approx(speeds[name] / speeds["mlx-lm plain"])
        assert row["first_ms"] > 0
        assert row["counts"]["tokens"] == 2 * 24
    model_row = rows["model k=2"]  # the model is its own draft
    assert (model_row["accepted"], model_row["length"]) == (1, 3)
    assert model_row["counts"]["rounds"] == rows["mlx-lm k=2"]["counts"]["rounds"]
    assert model_row["by_position"] == [1, 1]


def test_questions_are_asked_turn_by_turn_and_summed_over_groups(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["Tell.", "And then?"]},
        {"question_id": 2, "category": "qa", "turns": ["Who was it?"]},
        {"question_id": 3, "category": "qa", "turns": ["Not asked."]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    sizes = "--prompts 1 --tokens 12 --draft lookup --draft lookup+model"
    report = run_script("spec_bench", folder, f"{sizes} --mlx-lm-length 4", str(file))
    rows = {(row["group"], row["arm"]): row for row in report["results"]}
    assert {group for group, _ in rows} == {"mt_bench", "qa", "all"}
    arms = [arm for group, arm in rows if group == "all"]
    drafts = ["lookup k=4", "lookup adaptive", "lookup+model k=4"]
    assert arms == [
        *("ours plain", "mlx-lm plain", *drafts),
        *("lookup+model adaptive", "mlx-lm k=4"),
    ]
    for arm in arms:
        each = [rows[group, arm]["counts"] for group in ("mt_bench", "qa", "all")]
        assert [counts["texts"] for counts in each] == [2, 1, 3]
        for name in ("tokens", "rounds", "drafted", "accepted"):
            assert each[2][name] == each[0][name] + each[1][name]
    assert rows["all", "lookup+model k=4"]["length"] > 3


def test_a_file_that_holds_no_questions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": []}\n', "utf-8")
    done = CliRunner().invoke(spec_bench.app, [str(file)])
    assert done.exit_code == 2
    assert "line 1" in done.output
