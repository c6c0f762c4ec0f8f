"""The benchmarks run on a tiny model, and their counts are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import draft_length
import pytest
import server

from bench.servers import Served
from mlx_speculation.demo import demo_models
from support.scripts import run_script, save_tiny

SCRIPTS = Path(draft_length.__file__).parent


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_batches_have_a_ratio_for_each_arm(folder: Path) -> None:
    sizes = "--batch 2 --draft-length 2 --group code --tokens 10 --repeats 2"
    report = run_script("batches", folder, f"{sizes} --draft model --draft lookup")
    rows = {row["arm"]: row for row in report["results"]}
    plain, drafts = ["mlx-lm plain", "ours plain"], ["model k=2", "model adaptive"]
    assert [*rows] == [*plain, *drafts, "lookup k=2", "lookup adaptive"]
    assert rows["mlx-lm plain"]["x_mlx_lm"]["median"] == 1
    assert rows["ours plain"]["x_plain"]["median"] == 1
    assert rows["ours plain"]["forwards"] == 2 * 10
    assert rows["model k=2"]["accepted"] == 1
    assert rows["model k=2"]["rows_a_forward"] == 2


def test_each_round_of_adaptive_lengths_is_counted(folder: Path) -> None:
    sizes = "--prompts 1 --tokens 18 --draft wrong --group code --group edit"
    report = run_script("draft_length", folder, sizes)
    rows = {row["group"]: row for row in report["results"]}
    assert [*rows] == ["code", "edit"]
    assert rows["code"]["accepted"] == 0
    assert rows["code"]["rounds"] >= 17


def test_rounds_are_compared_with_forwards(folder: Path) -> None:
    sizes = "--draft-length 2 --context 32 --context 64 --repeats 2 --rounds 2"
    report = run_script("rounds", folder, f"{sizes} --forwards 2")
    rows = {(row["draft"], row["context"]): row for row in report["results"]}
    cases = [("plain", 32), ("model", 32), ("plain", 64), ("model", 64)]
    assert [*rows] == cases
    for (draft, _), row in rows.items():
        assert row["efficiency"]["median"] > 0
        assert row["tokens_per_second"] > 0
        assert row["verify_ms"] > 0
        assert (row["forward_x"] == 1) == (draft == "plain")


def test_memory_is_within_what_is_allowed(folder: Path) -> None:
    (row,) = run_script("memory", folder, "--prompt 600 --rounds 3")["results"]
    assert row["plain"] < row["peak"] <= row["allowed"]
    assert row["rounds"] >= 3
    assert row["draft_weights"] > 0


def test_no_prompt_is_met_again_by_a_server() -> None:
    prompts = [one for n in range(5) for one in server.prompts_of(n, 16)]
    assert len({one[:12] for one in prompts}) == len(prompts)


def test_a_row_of_a_server_is_of_all_its_clients() -> None:
    served = [Served("x", 0.1 * i, 0.2 * i, 10) for i in range(1, 4)]
    others = [Served("y", 1, 1, 10), *served[1:]]
    row = server.row_of("ours", [(served, 6.0)], [(others, 1.0)])
    assert row["first_ms"] == pytest.approx(200)
    assert row["whole_p95"] == pytest.approx(580)
    assert row["tokens_per_second"] == pytest.approx(5)
    assert row["equal"] == "2 of 3"


@pytest.mark.slow
def test_four_servers_say_the_same() -> None:
    sizes = "--clients 2 --requests 2 --tokens 4 --repeats 1"
    rows = run_script("server", demo_models()["draft"], sizes)["results"]
    ours, theirs = ["ours, no draft", "ours, draft model"], ["mlx-lm, no draft"]
    assert [row["server"] for row in rows] == [*ours, *theirs, "mlx-lm, draft model"]
    assert all(row["tokens"] == 8 for row in rows)
    assert [row["equal"] for row in rows[:2]] == ["2 of 2"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_arms_run_on_all_ranks(folder: Path, ranks: int) -> None:
    launch = Path(sys.executable).with_name("mlx.launch")
    options = ["--backend", "ring", "-n", str(ranks), "--", sys.executable]
    begin = [str(launch), *options] if ranks > 1 else [sys.executable]
    sizes = "--draft lookup --draft-length 4 --group code --prompts 1 --tokens 40"
    script = SCRIPTS / "spec_bench.py"
    done = subprocess.run(
        [*begin, str(script), "--target", str(folder), *sizes.split()],
        capture_output=True,
        text=True,
        timeout=400,
        # More OpenBLAS threads would take the processor from the other rank.
        env=dict(os.environ, OPENBLAS_NUM_THREADS="1"),
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    data = json.loads(line)
    assert data["ranks"] == ranks
    arms = {row["arm"]: row for row in data["results"]}
    assert [*arms] == ["ours plain", "mlx-lm plain", "lookup k=4", "lookup adaptive"]
    assert all(row["texts"].startswith("equal") for row in arms.values())
    assert done.stdout.count("ours plain") == 2  # in the table and in one JSON line
