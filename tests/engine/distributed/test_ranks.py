"""Two ranks of a target write the text of one, agree on decisions and never hang.

A launch takes seconds, so one launch runs all programs that are not slow.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.engine.distributed.ring_watch import STATUS
from support.processes.ranks import Ended, run_ranks, wait_for

DENSE_HYBRID = "llama:lookup,measured qwen3_5:mixed head/qwen3_5:mtp"
# Each way to divide a target, with the architectures for which it fails, always or only
# with drafts. An architecture's value is a part of the error message.
REFUSED: list[tuple[str, dict[str, str]]] = [
    ("tensor", {"prism_hadamard_qwen35": "does not have parameter"}),
    (
        "pipeline",
        {
            "bailing_hybrid": "must be positive and sum to",
            **dict.fromkeys(
                ("deepseek_v41", "kimi_k3", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
                "not rows of keys and values",
            ),
            "prism_hadamard_qwen35": "not rows of keys and values",
        },
    ),
]


def said_by(ended: list[Ended]) -> list[Any]:
    assert [each.status for each in ended] == [0] * len(ended), ended
    return [each.said for each in ended]


def check_texts(
    said: list[list[dict[str, Any]]], *, ties: int = 0
) -> list[dict[str, Any]]:
    """Assert that all ranks write an undivided target's texts, but for near-ties."""
    first, *others = said
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one["tokens"] == two["tokens"], one["case"]
            assert one["cached"] == two["cached"], one["case"]
            assert one["text"] == two["text"], one["case"]
            assert one["accepted"] == two["accepted"], one["case"]
    assert not [each["case"] for each in first if not each["near_tie"]], first
    assert len([each for each in first if each["parting"]]) <= ties, first
    assert max(each["difference"] for each in first) < 1e-3
    for each in first:
        if "mixed" in each["case"]:
            assert 0 < each["accepted"] < each["drafted"], each["case"]
    return first


def check_several(each: list[Any], kinds: list[str]) -> None:
    """Assert equal texts on all ranks, and for each stream alone and beside others."""
    said = each[0]
    assert each == [said] * len(each)
    counts = {name: len(texts) - 1 for name, texts in said.items()}
    assert counts == dict.fromkeys(kinds, 7)
    for name, texts in said.items():
        assert len(texts["alone"]) == 6
        for way, tokens in texts.items():
            assert tokens == texts["alone"], (name, way)


def check_apart(each: list[Any]) -> None:
    """Assert that all ranks raise the same errors, and agree again afterwards."""
    before, last = each[0]["before"], len(each) - 1
    for rank, said in enumerate(each):
        other = last if rank != last else 0
        for name in ("order", "another_stream", "another_generator"):
            text = said[name]
            assert text.startswith(f"RankMismatchError: Rank {other} "), (rank, name)
            assert f", but rank {rank} " in text
            assert "their programs are no longer in step" in text
            assert said[f"after {name}"] == before, (rank, name)
        assert "of stream" in said["order"]
        assert "makes generator" in said["another_generator"]
        assert said["options_meanwhile"].startswith(
            f"RankMismatchError: max_tokens is 7 on rank {last}, and 6 on rank 0"
        )
        assert "ValueError: the last rank has failed" in said["leaving"]
        if rank != last:
            assert said["leaving"].startswith(f"RankLostError: Rank {last} (")
        assert said["after leaving"] == before


def test_two_ranks_write_the_text_of_one_and_rank_0_decides_until_one_is_lost(
    tmp_path: Path,
) -> None:
    killed: list[float] = []

    def kill(processes: list[int]) -> None:
        wait_for(tmp_path / "started0")
        wait_for(tmp_path / "started1")
        killed.append(time.time())
        os.kill(processes[1], signal.SIGKILL)

    program = f"processes.rank_streams.all_and_lost {DENSE_HYBRID}"
    ended = run_ranks(program, tmp_path, meanwhile=kill)
    zero, one = (each.said for each in ended)
    said = check_texts([zero["texts"], one["texts"]])
    assert len(said) == 4
    assert all(each["accepted"] for each in said if "lookup" in each["case"])
    _check_refusals(zero["decisions"], one["decisions"])
    _check_decisions(zero["decisions"], one["decisions"])
    check_several([zero["several"], one["several"]], ["mixed"])
    check_apart([zero["apart"], one["apart"]])
    assert ended[1].status == -signal.SIGKILL
    _check_lost(replace(ended[0], said=zero.get("lost")), tmp_path, killed[0])


def _check_decisions(zero: dict[str, Any], one: dict[str, Any]) -> None:
    """Assert that rank 1 follows rank 0 in what timing, faults and users decide."""
    plain = zero["plain"]["tokens"]
    for name in ("plain", "stopped", "no seed", "serial", "rejection", "block"):
        for what in ("tokens", "text", "reason", "cached", "seed", "accepted"):
            assert zero[name][what] == one[name][what], name
    assert zero["stopped"]["reason"] == "stop"
    assert zero["stopped"]["text"] == zero["plain"]["text"][:9]
    assert zero["no seed"]["seed"] != zero["plain"]["seed"]
    assert zero["serial"]["tokens"] == plain
    assert (zero["calls"], one["calls"]) == (len(plain), 0)
    for said in (zero, one):
        assert said["closed"]["reason"] == "closed"
        assert said["closed"]["held"] == len(said["closed"]["cached"])
        assert said["closed"]["whole"] == plain
        assert said["broken"]["tokens"] == said["after all"]["tokens"] == plain
    assert (zero["calibrated contexts"], one["calibrated contexts"]) == (1, 0)
    assert zero["closed"]["cached"] == one["closed"]["cached"]
    assert len(zero["closed"]["tokens"]) == 6
    assert zero["broken"]["faults"] == ["OSError: the drafter has failed"]
    assert zero["rank 0 raises"] == "ValueError: the processor has failed"
    assert one["rank 0 raises"].startswith("RankLostError: Rank 0 (")
    assert "ValueError: the processor has failed" in one["rank 0 raises"]
    assert "has left the stream, which has ended on all ranks" in one["rank 0 raises"]
    assert zero["and then"]["tokens"] == one["and then"]["tokens"] == plain


def _check_refusals(zero: dict[str, Any], one: dict[str, Any]) -> None:
    shown = {
        "seed": "seed is 12 on rank 1, and 11 on rank 0",
        "length": "draft_length is 4 on rank 1, and 3 on rank 0",
        "max_tokens": "max_tokens is 9 on rank 1, and 8 on rank 0",
        "stop": "stop is ['xx'] on rank 1, and ['x'] on rank 0",
        "prompt": "the prompt is 41 tokens",
    }
    for name, text in shown.items():
        assert zero[name] == one[name]
        assert zero[name].startswith(f"RankMismatchError: {text}"), zero[name]
    assert one["refused generator"].startswith(
        "InvalidRequestError: draft_length is -1"
    )
    assert "Rank 1 raised InvalidRequestError: draft_l" in zero["refused generator"]
    for said in (zero, one):
        assert "cannot run on the 2 ranks of this target" in said["a batch"]
        assert "the model on this rank is not split" in said["whole"]
        assert "no group of several ranks was passed" in said["no group"]


def _check_lost(zero: Ended, folder: Path, killed: float) -> None:
    """Assert that rank 0 reports the loss of rank 1 within ten seconds."""
    assert "ank 1 (" in _reported(zero, folder, 0, killed)
    # Rank 0 does not always come out of mlx, see docs/distributed.md.
    errors = [zero.errors]
    if zero.said is not None:
        errors = [zero.said["raised"], zero.said["again"].split(": ", 1)[1]]
        assert all(error.startswith("Rank 1 (") for error in errors)
    for error in errors:
        assert "is lost to rank 0" in error
        assert "Start the program again on all ranks." in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "where", "who"),
    [
        *[(2, where, who) for where in ("ready", "started") for who in (0, 1)],
        *[(3, "started", 2), (4, "started", 2)],
    ],
)
def test_any_rank_can_be_killed_anywhere(
    tmp_path: Path, ranks: int, where: str, who: int
) -> None:
    """A rank is killed while it reads a prompt or writes a text.

    The remaining ranks notice that it has ended, or that a rank has ended which had
    noticed it (of four ranks, rank 0 is no neighbour of rank 2).
    """
    killed: list[float] = []

    def kill(processes: list[int]) -> None:
        for rank in range(ranks):
            wait_for(tmp_path / f"{where}{rank}")
        time.sleep(0.3)
        killed.append(time.time())
        os.kill(processes[who], signal.SIGKILL)

    program = f"endless {'prompt' if where == 'ready' else 'wait'} {who}"
    ended = run_ranks(program, tmp_path, ranks=ranks, meanwhile=kill)
    lines = [
        _reported(each, tmp_path, rank, killed[0])
        for rank, each in enumerate(ended)
        if rank != who
    ]
    assert any(f"ank {who} (" in line for line in lines), lines
    for line in lines:
        assert f"ank {who} (" in line or "has lost a rank itself" in line


def _reported(ended: Ended, folder: Path, rank: int, since: float) -> str:
    """Return what a rank reports within ten seconds: its error, or its forced end."""
    at, said = (folder / f"errors{rank}.txt").stat().st_mtime, ended.errors
    if ended.said is not None:
        at, said = ended.said["at"], f"RankLostError: {ended.said['raised']}"
    else:
        assert ended.status == STATUS
    assert at - since < 10
    (line,) = [each for each in said.splitlines() if "RankLostError: " in each]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("deed", ["raise", "exit", "fail", "sulk"])
def test_a_rank_that_raises_or_ends_ends_the_text_of_the_other(
    tmp_path: Path, deed: str, who: int
) -> None:
    """To "sulk" is to fail inside a forward while the process lives on."""
    ended = run_ranks(f"endless {deed} {who}", tmp_path)
    other = ended[1 - who]
    if deed == "raise" and who == 0:  # rank 0 closes its stream on the way
        assert "the stream has ended" in other.errors
        return
    said = other.errors if other.said is None else other.said["raised"]
    assert other.status == (STATUS if other.said is None else 0), ended
    assert f"Rank {who} (" in said
    reason = "the connection was closed"
    if deed == "raise":
        reason = "has left the stream, which has ended on all ranks: ValueError: its"
    assert reason in said
    if deed == "sulk":
        failed = ended[who].said["at"]
        assert f"ank {who} (" in _reported(other, tmp_path, 1 - who, failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "launcher"),
    [
        ("tensor head/deepseek_v3:mtp head/step3p5:mtp", False),
        (
            "pipeline ministral3:mixed deepseek_v3(MLA):mixed,lookup "
            "qwen3_moe:measured,plain",
            False,
        ),
        ("tensor llama:mixed llama(sliding):mixed", True),
    ],
)
def test_heads_pipelines_and_mlx_launch_write_the_text_of_one(
    program: str, launcher: bool, tmp_path: Path
) -> None:
    ended = run_ranks(f"texts {program}", tmp_path, launcher=launcher)
    for each in check_texts(said_by(ended)):
        assert not each["faults"]
        assert "mtp" not in each["case"] or each["drafted"] > len(each["tokens"])


@pytest.mark.slow
def test_an_mtp_head_drafts_on_rank_0(tmp_path: Path) -> None:
    """Both ranks load a trained head by `from_pretrained`."""
    for zero, one in zip(*said_by(run_ranks("mtp", tmp_path)), strict=True):
        assert zero["tokens"] == one["tokens"] == zero["plain"]
        assert zero["accepted"] == one["accepted"] > 0
        assert zero["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "refused"), REFUSED)
def test_every_architecture_that_can_be_spread_writes_the_text_of_one(
    parallel: str, refused: dict[str, str], tmp_path: Path
) -> None:
    """This tests all architectures that mlx-lm divides and the census builds."""
    zero, one = said_by(run_ranks(f"architectures {parallel}", tmp_path, seconds=600))
    assert zero.keys() == one.keys()
    reasons = {name: said for name, said in zero.items() if isinstance(said, str)}
    assert reasons.keys() == refused.keys(), reasons
    for name, reason in refused.items():
        assert reason in zero[name]
    for name in zero.keys() - refused.keys():
        check_texts([zero[name], one[name]], ties=1)


@pytest.mark.slow
def test_streams_can_be_dropped_and_interleaved_on_three_ranks(tmp_path: Path) -> None:
    ended = run_ranks("processes.rank_streams.several", tmp_path, ranks=3)
    check_several(said_by(ended), ["plain", "fixed", "adaptive", "mixed"])


@pytest.mark.slow
def test_programs_that_differ_are_an_error_on_three_ranks(tmp_path: Path) -> None:
    check_apart(said_by(run_ranks("processes.rank_streams.apart", tmp_path, ranks=3)))
