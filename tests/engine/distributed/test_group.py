"""A rank checks the lines that all ranks exchange."""

import json
from typing import Any

import pytest

from mlx_speculation.engine.distributed.group import LINE_BYTES, Place, RankGroup
from mlx_speculation.engine.distributed.session import RankSession
from mlx_speculation.errors import InvalidRequestError, RankLostError, RankMismatchError
from mlx_speculation.samplers import Sampling

HERE = Place("round", 4, 2)


class Ranks:
    """A group of three ranks; this process is rank 1."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def group_of(monkeypatch: pytest.MonkeyPatch, *lines: bytes) -> RankGroup:
    ranks: Any = Ranks()
    made = RankGroup(ranks, [f"rank {rank} (host)" for rank in range(3)], "word")

    def gather(said: Any, size: int) -> list[bytes]:
        assert size == LINE_BYTES
        made._check()
        return list(lines)

    monkeypatch.setattr(made, "_gather", gather)
    return made


def line(place: Place, *said: Any) -> bytes:
    return json.dumps([*place, *said]).encode()


def test_ranks_at_one_place_get_what_all_have_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = group_of(monkeypatch, line(HERE, "plan", 3), line(HERE), line(HERE, None))
    assert made.exchange(HERE, []) == [["plan", 3], [], [None]]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Place("round", 5, 2), "Rank 2 is at exchange 2 (round) of stream 5, but"),
        (Place("draft", 4, 2), "Rank 2 is at exchange 2 (draft) of stream 4, but"),
        (Place("round", 4, 3), "Rank 2 is at exchange 3 (round) of stream 4, but"),
        (Place("make", 4, 0), "Rank 2 makes generator 4, but"),
    ],
)
def test_ranks_at_other_places_are_named(
    other: Place, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group_of(monkeypatch, line(HERE), line(HERE), line(other))
    with pytest.raises(RankMismatchError) as raised:
        made.exchange(HERE, [])
    assert str(raised.value).startswith(
        f"{text} rank 1 is at exchange 2 (round) of stream 4: their programs"
    )
    with pytest.raises(RankMismatchError):  # no RankLostError: the group has not ended
        made.exchange(HERE, [])


@pytest.mark.parametrize("other", [b"\x00\x80?", b"17.5", b'["round", 4]', b"{}"])
def test_bytes_of_a_forward_end_the_group(
    other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for the rest of an all_sum, so no exchange can follow."""
    made = group_of(monkeypatch, other, line(HERE), line(HERE))
    with pytest.raises(RankMismatchError, match=r"^Rank 0 is inside a forward, but"):
        made.exchange(HERE, [])
    with pytest.raises(RankLostError, match=r"^Rank 1 \(host\) has failed inside of a"):
        made.exchange(HERE, [])


def test_a_seed_is_the_same_on_all_ranks_and_another_for_each_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seeds(sampling: Sampling) -> list[int | None]:
        group = group_of(monkeypatch)
        sessions = [RankSession(group, {}, needs=()) for _ in range(2)]
        return [session.with_seed(sampling).seed for session in sessions]

    first, second = seeds(Sampling())
    assert seeds(Sampling()) == [first, second]
    assert first != second
    assert seeds(Sampling(seed=5)) == [5, 5]


def test_what_is_no_group_is_refused() -> None:
    wrong: Any = 2
    with pytest.raises(InvalidRequestError, match=r"Pass mx\.distributed\.init\(\)"):
        RankGroup.of(wrong)
