"""The benchmarks run on a tiny model, and count what they say that they count.

Faults that were made by hand, and found here: a draft that is wrong is right; a text
that differs is let through; a longer draft than was asked for; positions that were
reached are left out of what is expected; the best length is chosen by the slices it is
compared in; texts of servers are not compared; the bound lacks what a draft holds.
"""

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


def test_acceptance_counts_each_draft_at_each_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.models.COUNTED", 1000)
    sizes = "--group code --prompts 1 --tokens 12 --draft-length 3"
    drafts = "--draft lookup --draft wrong --draft model~200"
    first = run_script(
        "acceptance", folder, f"--draft-length 1 {sizes} --draft model {drafts}"
    )
    rows = {(row["draft"], row["k"]): row for row in first["results"]}
    again = run_script("acceptance", folder, f"{sizes} --draft model~200")
    assert again["results"] == [rows["model~200", 3]]  # counts, and no time
    names = ["model", "lookup", "wrong", "model~200"]
    assert [*rows] == [(name, length) for name in names for length in (1, 3)]
    assert (rows["model", 3]["accepted"], rows["model", 3]["length"]) == (1, 4)
    assert rows["model", 1]["tokens_a_round"] == 2
    assert rows["wrong", 3]["accepted"] == 0
    assert all(row["near_ties"] == 0 for row in rows.values())


def test_acceptance_ends_where_a_text_is_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bench.models.Bench.plain_text", lambda self, prompt, tokens, _: [7] * tokens
    )
    sizes = "--group code --prompts 1 --tokens 6 --draft lookup"
    with pytest.raises(AssertionError, match="not the text of plain decoding"):
        run_script("acceptance", folder, sizes)


def test_each_rule_accepts_what_is_expected_of_it(folder: Path) -> None:
    """The model drafts for itself, so that all is accepted, and expected to be."""
    sizes = "--group code --prompts 1 --tokens 24 --temperature 1 --draft-length 2"
    report = run_script("acceptance", folder, f"{sizes} --rules")
    rules = {row["rule"]: row for row in report["results"]}
    assert rules.keys() == {"keyed", "rejection", "block"}
    for row in rules.values():
        assert row["length"] == pytest.approx(row["expected"], abs=1e-3)


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


def test_draft_lengths_are_compared_with_plain_and_the_best(
    folder: Path,
) -> None:
    sizes = "--prompts 1 --tokens 18 --draft-length 2 --draft wrong"
    report = run_script("draft_length", folder, f"{sizes} --group code --group edit")
    rows = {row["group"]: row for row in report["results"]}
    assert [*rows] == ["code", "edit", "all"]
    assert all(row["x_plain"] > 0 and row["x_best"] > 0 for row in rows.values())
    assert rows["code"]["accepted"] == 0
    assert rows["code"]["fixed"].keys() == {"wrong k=2"}
    assert rows["edit"]["texts"].startswith("equal")


def test_the_best_length_is_not_compared_by_its_luck() -> None:
    slow, fast = [(16, 2.0)] * 8, [(16, 0.8), (20, 1.0)] * 4
    own = [(10, 1.0), (6, 0.6)] * 4
    assert draft_length.over_best(own, [slow, fast]) == pytest.approx(0.5)
    # One is fast in one half alone, the other in the other: neither is the best.
    odd, even = [(16, 1.0), (16, 4.0)] * 4, [(16, 4.0), (16, 1.0)] * 4
    assert draft_length.over_best([(16, 1.0)] * 8, [odd, even]) == pytest.approx(4)


def test_rounds_are_compared_with_forwards_and_counted(folder: Path) -> None:
    sizes = "--draft-length 2 --context 32 --context 64 --repeats 2 --rounds 2"
    report = run_script("efficiency", folder, f"{sizes} --forwards 2")
    rows = {(row["draft"], row["context"]): row for row in report["results"]}
    cases = [("plain", 32), ("model", 32), ("plain", 64), ("model", 64)]
    assert [*rows] == cases
    for (draft, _), row in rows.items():
        assert row["efficiency"]["median"] > 0
        assert row["tokens_per_second"] > 0
        assert (row["forward_x"] == 1) == (draft == "plain")
        assert (row["forwards"], row["reads"]) == (1, 1)
        assert 20 < row["python_calls"] < 400
    assert rows["model", 32]["draft_forwards"] == 2
    assert rows["model", 32]["python_calls"] == rows["model", 64]["python_calls"]


def test_memory_is_within_what_is_allowed(folder: Path) -> None:
    (row,) = run_script("memory", folder, "--held 600 --rounds 3")["results"]
    assert row["plain"] < row["peak"] <= row["allowed"]
    assert row["rounds"] >= 3
    assert row["draft_weights"] > 0


def test_a_profile_has_every_part_and_piece(folder: Path) -> None:
    report = run_script(
        "profile_round", folder, "--draft-length 2 --rounds 2 --repeats 2"
    )
    rows = {(row["view"], row["k"]): row["milliseconds"] for row in report["results"]}
    assert [*rows] == [("as it runs", 0), ("as it runs", 2), ("taken apart", 2)]
    for parts in list(rows.values())[:2]:
        assert parts["round"] > max(parts["verify"], parts["host"]) > 0
    pieces = rows["taken apart", 2]
    names = ["draft", "forward", "sampler", "commit", "replay", "host", "round"]
    assert [*pieces] == names
    assert pieces["forward"] > pieces["commit"] > 0


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("attention", 2),
        ("lookup", 3),
        pytest.param("sliding", 2, marks=pytest.mark.slow),
        pytest.param("absorbed", 2, marks=pytest.mark.slow),
    ],
)
def test_operations_take_turns(folder: Path, name: str, cases: int) -> None:
    sizes = f"--only {name} --rows 1 --rows 3 --size 24 --repeats 2"
    rows = run_script("operations", folder, sizes)["results"]
    named = {row["case"] for row in rows}
    assert len(named) == cases
    for case in named:
        first, *others = (row for row in rows if row["case"] == case)
        assert first["x_first"]["median"] == 1
        assert others
        assert all(row["microseconds"]["median"] > 0 for row in others)


@pytest.mark.slow
def test_the_sampler_is_compared_with_a_round(folder: Path) -> None:
    rows = run_script(
        "operations", folder, "--only sampler --rows 3 --size 64 --repeats 2"
    )
    ways = {row["way"]: row["x_first"]["median"] for row in rows["results"]}
    assert [*ways][:2] == ["a round", "greedy"]
    assert all(share < 0.5 for way, share in ways.items() if way != "a round")


def test_no_prompt_is_met_again_by_a_server() -> None:
    asked = [one for n in range(5) for one in server.requests_of(n, 16, 8, 0.0)]
    assert len({one.prompt[:12] for one in asked}) == len(asked)


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
    script = SCRIPTS / "distributed.py"
    done = subprocess.run(
        [*begin, str(script), "--target", str(folder), *sizes.split()],
        capture_output=True,
        text=True,
        timeout=400,
        # Threads of OpenBLAS would take the processor from the other rank.
        env=dict(os.environ, OPENBLAS_NUM_THREADS="1"),
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["ranks"] == ranks
    assert len(found["sums_ms"]) == 6
    arms = {row["arm"]: row for row in found["results"]}
    assert [*arms] == ["ours plain", "mlx-lm plain", "lookup k=4", "lookup adaptive"]
    assert all(row["texts"].startswith("equal") for row in arms.values())
    assert done.stdout.count("ours plain") == 2  # the table and the line of one rank
