"""Several streams at once on all ranks, and programs that differ.

Streams that were dropped ended older ones by `RankLostError: it runs another part of
its program`, since the message of the drop came before those of the older stream, in
every run.

Faults that were made by hand, and found here:
    a dropped stream ends itself on all ranks, from its finalizer
    an exchange does not say of which stream it is; steps of streams are not counted
    the places of ranks are not compared, or by some ranks only
    a rank that leaves a stream does not say so
    a round that was planned in the one before begins without an exchange
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.engine.distributed.ring_watch import END_SECONDS
from support.processes.ranks import Ended, run_ranks, wait_for


def said_by(ended: list[Ended]) -> list[Any]:
    """Return what ranks have said that all came to their end."""
    assert [each.status for each in ended] == [0] * len(ended), ended
    return [each.said for each in ended]


def check_several(each: list[Any], kinds: list[str]) -> None:
    """Assert that each text is the same, on every rank, as without other streams."""
    said = each[0]
    assert each == [said] * len(each)
    assert {name: len(texts) - 1 for name, texts in said.items()} == dict.fromkeys(
        kinds, 7
    )
    for name, texts in said.items():
        assert len(texts["alone"]) == 8
        for way, tokens in texts.items():
            assert tokens == texts["alone"], (name, way)


def check_apart(each: list[Any]) -> None:
    """Assert that all ranks raise alike, and are together again afterwards."""
    before, last = each[0]["before"], len(each) - 1
    for rank, said in enumerate(each):
        other = last if rank != last else 0
        for name in ("order", "another_stream", "another_generator"):
            text = said[name]
            assert text.startswith(f"RankMismatchError: Rank {other} "), (rank, name)
            assert f", and rank {rank} " in text
            assert "their programs have come apart" in text
            assert said[f"after {name}"] == before, (rank, name)
        assert "of stream" in said["order"]
        assert "makes generator" in said["another_generator"]
        assert said["options_meanwhile"].startswith(
            f"RankMismatchError: max_tokens is 9 on rank {last}, and 8 on rank 0"
        )
        assert "ValueError: the last rank has failed" in said["leaving"]
        if rank != last:
            assert said["leaving"].startswith(f"RankLostError: Rank {last} (")
        assert said["after leaving"] == before


def test_two_ranks_can_drop_and_interleave_streams_and_say_how_programs_differ(
    tmp_path: Path,
) -> None:
    said = said_by(run_ranks("processes.rank_streams.several_and_apart", tmp_path))
    check_several([each["several"] for each in said], ["mixed"])
    check_apart([each["apart"] for each in said])


@pytest.mark.slow
def test_streams_can_be_dropped_and_interleaved_on_three_ranks(tmp_path: Path) -> None:
    ended = run_ranks("processes.rank_streams.several", tmp_path, ranks=3)
    check_several(said_by(ended), ["plain", "fixed", "adaptive", "mixed"])


@pytest.mark.slow
def test_programs_that_differ_are_an_error_on_three_ranks(tmp_path: Path) -> None:
    check_apart(said_by(run_ranks("processes.rank_streams.apart", tmp_path, ranks=3)))


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_waited_for(tmp_path: Path, who: int) -> None:
    """Longer than a lost one; when it runs on, the text is what it would have been."""

    def stop(processes: list[int]) -> None:
        wait_for(tmp_path / "started0")
        wait_for(tmp_path / "started1")
        os.kill(processes[who], signal.SIGSTOP)
        (tmp_path / "go").write_text("")
        time.sleep(END_SECONDS + 3)  # what is shown is that nothing happens meanwhile
        for rank, process in enumerate(processes):
            assert not (tmp_path / f"rank{rank}.json").exists()
            os.kill(process, 0)
        os.kill(processes[who], signal.SIGCONT)

    ended = run_ranks("processes.rank_streams.patient", tmp_path, meanwhile=stop)
    assert [each.status for each in ended] == [0, 0], ended
    assert ended[0].said == ended[1].said
    assert len(ended[0].said) == 60
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "go").write_text("")
    again = run_ranks("processes.rank_streams.patient", tmp_path / "again")
    assert again[0].said == ended[0].said
