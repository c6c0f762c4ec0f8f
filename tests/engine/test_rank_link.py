"""Messages between ranks, and how the loss of one becomes known, over real sockets.

Faults that were made by hand, and found here:
    messages from before a loss are lost; no heartbeats are sent
    rank 0 tells nobody who was lost; who leaves one stream has left the next one too
    the watch does not look whether the thread is in mlx, or does not end it
    silence is not looked at; a stranger who does not know the word is taken in
"""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.engine import rank_link, ranks
from mlx_speculation.engine.rank_addresses import address_for, watched
from mlx_speculation.engine.rank_link import STATUS, Link
from mlx_speculation.engine.together import Together
from mlx_speculation.errors import InvalidRequestError, RankLostError

Ended = list[int]


class Links:
    """Links of one rank 0 and some others, in one process."""

    def __init__(self, others: int, silence: float) -> None:
        names = [f"rank {rank} (host, process {rank})" for rank in range(others + 1)]
        pairs = [socket.socketpair() for _ in range(others)]
        self.ended: dict[int, Ended] = {rank: [] for rank in range(others + 1)}
        peers = {rank + 1: pair[0] for rank, pair in enumerate(pairs)}
        self.each = [Link(0, names, peers, silence=silence, end=self.ended[0].append)]
        for rank, (_, own) in enumerate(pairs, start=1):
            end = self.ended[rank].append
            self.each.append(Link(rank, names, {0: own}, silence=silence, end=end))

    def close(self) -> None:
        """End all of them."""
        for link in self.each:
            link.close()


@pytest.fixture(name="make")
def _make() -> Iterator[Callable[..., list[Link]]]:
    made: list[Links] = []

    def make(others: int = 1, silence: float = 30.0) -> Links:
        made.append(Links(others, silence))
        return made[-1]

    yield make  # type: ignore[misc]
    for links in made:
        links.close()


def test_messages_come_in_order_and_by_stream(make: Any) -> None:
    zero, one = make().each
    zero.send(["plan", 1, 4])
    zero.send(["plan", 2, 5])
    zero.send(["draft", 1, 3])
    assert one.receive(0, 1) == ["plan", 1, 4]
    assert one.receive(0, 1) == ["draft", 1, 3]
    assert one.receive(0, 2) == ["plan", 2, 5]


def test_a_closed_connection_ends_a_wait_after_the_messages_before_it(
    make: Any,
) -> None:
    zero, one = make().each
    one.send(["ready", 1])
    one.close()
    assert zero.receive(1, 1) == ["ready", 1]
    with pytest.raises(
        RankLostError, match=r"^Rank 1 \(host, process 1\) is lost to r"
    ):
        zero.receive(1, 1)
    with pytest.raises(RankLostError, match="its process has ended"):
        zero.receive(1, 2)


def test_rank_0_tells_the_others_who_was_lost(make: Any) -> None:
    _, one, two = make(2).each
    two.close()
    with pytest.raises(
        RankLostError, match=r"^Rank 2 \(host, process 2\) is lost to r"
    ):
        one.receive(0, 1)


def test_a_rank_that_leaves_a_stream_is_lost_to_that_stream(make: Any) -> None:
    zero, one = make().each
    one.send(["left", 1, 1, "ValueError: no", "ValueError"])
    loss = zero.loss(1, wait=5.0)
    assert loss is not None
    assert (loss.rank, loss.error) == (1, "ValueError")
    assert zero.loss(2) is None
    zero.forget(1)  # all have left it, as after logits that no rank could use
    assert zero.loss(1) is None


def test_after_a_rank_has_left_in_the_middle_nothing_is_begun(make: Any) -> None:
    zero, one = make().each
    one.send(["left", 1, 1, "ValueError: no", "ValueError"])
    for stream in (1, 2):
        with pytest.raises(RankLostError, match="ValueError: no"):
            zero.receive(1, stream)


def test_a_rank_that_runs_another_part_of_the_program_is_lost(make: Any) -> None:
    zero, one = make().each
    one.send(["begin", 3])
    with pytest.raises(RankLostError, match="runs another part of its program"):
        zero.receive(1, 2)


def test_what_is_left_of_a_stream_that_has_ended_is_dropped(make: Any) -> None:
    zero, one = make().each
    zero.forget(3)
    one.send(["ready", 3])
    one.send(["ready", 2])
    assert zero.receive(1, 2) == ["ready", 2]
    assert zero.loss(2) is None


def test_a_rank_that_is_silent_is_lost(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "BEAT_SECONDS", 0.05)
    zero, one = make(silence=0.5).each
    time.sleep(0.8)
    assert zero.loss(1) is None  # heartbeats are heard
    one._closed = True  # its heart stands still, and its connection is open
    loss = zero.loss(1, wait=5.0)
    assert loss is not None
    assert "nothing was heard from it" in loss.why


def test_a_process_that_waits_in_mlx_is_ended_and_says_why(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_link, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(rank_link, "GRACE_SECONDS", 0.6)
    links = make()
    zero, one = links.each
    one.close()
    assert zero.loss(1, wait=5.0) is not None
    time.sleep(1.2)
    assert links.ended[0] == []  # nobody waits in mlx
    with zero.inside(1):
        time.sleep(1.2)
    assert STATUS in links.ended[0]
    said = capsys.readouterr().err
    assert said.startswith("RankLostError: Rank 1 (host, process 1) is lost to rank 0")
    assert said.count("\n") == 1
    assert f"is ended with status {STATUS}" in said


def test_who_goes_into_mlx_long_after_a_loss_has_its_time_too(make: Any) -> None:
    """It comes out by itself: it was ended where the watch looked at that moment.

    The watch looks every 200 ms, and a stream that is begun then takes milliseconds
    to raise; more where the machine has much else to do.
    """
    links = make()
    zero, one = links.each
    one.close()
    loss = zero.loss(1, wait=5.0)
    assert loss is not None
    zero._losses[0] = replace(loss, when=loss.when - 60)
    with zero.inside(1):
        zero._end_if_stuck(time.monotonic())
        assert links.ended[0] == []
        zero._end_if_stuck(time.monotonic() + rank_link.GRACE_SECONDS)
        assert STATUS in links.ended[0]


class OnLink:
    """What a stream needs of `Ranks`, over the link of a test."""

    def __init__(self, link: Link) -> None:
        self.link, self.rank = link, link.rank

    def next_number(self) -> int:
        """Return the number of the second stream."""
        return 2


def test_a_rank_that_knows_of_a_loss_does_not_begin_another_stream(make: Any) -> None:
    """Rank 0 heard "begin", and went into mlx for a rank that was about to end."""
    zero, one = make().each
    zero.send(["left", 1, 0, "ValueError: no", "ValueError"])
    ranks_of_one: Any = OnLink(one)
    with pytest.raises(RankLostError, match="ValueError: no"):
        one.receive(0, 1)
    with pytest.raises(RankLostError, match="ValueError: no"):
        Together(ranks_of_one, {}, needs=()).begin()
    one.send(["ready", 3])
    assert zero.receive(1, 3) == ["ready", 3]
    assert (1, 2) not in zero._inbox


def test_strangers_are_sent_away() -> None:
    callers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for said in (b"wrong 1\n", b"word 7\n", b"word\n", b"\xff 1\n", b"word 1\n"):
            callers.append(socket.create_connection(listener.getsockname()))
            callers[-1].sendall(said)
        peers = ranks._accepted(listener, ["rank 0", "rank 1"], "word")
    assert list(peers) == [1]
    assert peers[1].getpeername() == callers[-1].getsockname()
    for each in (*callers, *peers.values()):
        each.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MEETING_SECONDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RankLostError, match=r"^Rank 1 \(a\) did not come to rank 0 at"),
    ):
        ranks._accepted(listener, ["rank 0", "rank 1 (a)"], "word")


def test_the_address_of_rank_0(tmp_path: Path) -> None:
    here = {"host": "a", "machine": 1}
    there = {"host": "b", "machine": 2}
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000"]]')
    named = {"MLX_HOSTFILE": str(hosts)}
    assert address_for([here, here], named) == "127.0.0.1"
    assert address_for([here, there], named) == "10.0.0.1"
    assert address_for([here, there], {"NCCL_HOST_IP": "10.0.0.3"}) == "10.0.0.3"
    coordinator = {"MLX_JACCL_COORDINATOR": "10.0.0.4:7"}
    assert address_for([here, there], coordinator) == "10.0.0.4"
    assert address_for([here, there], {}) == "a"
    said = {"MLX_SPECULATION_HOST": "here"}
    assert address_for([here, there], named | said) == "here"


@pytest.mark.parametrize("said", ["", "45"])
def test_the_time_out_can_be_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ranks.TIMEOUT, said)
    assert ranks._checked_timeout() == float(said or 30)


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan"])
def test_a_wrong_time_out_is_refused(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks.TIMEOUT, said)
    with pytest.raises(InvalidRequestError, match=r"a number of seconds of at least 2"):
        ranks._checked_timeout()


def test_connections_are_watched_by_the_system() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
    ):
        watched(caller)
        assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        listener.accept()[0].close()
