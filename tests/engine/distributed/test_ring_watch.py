"""The loss of a neighbour is noticed, over real connections."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_speculation.engine.distributed import ring_watch
from mlx_speculation.engine.distributed.ring_watch import (
    END_SECONDS,
    SAY_SECONDS,
    STATUS,
    RingWatch,
    ring_connections,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def watch_of(pair: Pair, ended: list[int] | None = None) -> RingWatch:
    """Return a watch over a connection to rank 3, without a thread."""
    ended = [] if ended is None else ended
    return RingWatch({3: [pair[0]]}, "Ranks {} are lost.".format, ended.append)


def test_a_neighbour_is_there_until_its_connection_is_closed(pair: Pair) -> None:
    watch = watch_of(pair)
    pair[1].send(b"of a forward")
    assert watch.lost() == []
    pair[1].close()
    assert watch.lost(wait=5.0) == [3]
    assert watch.lost() == [3]


def test_who_severs_its_connections_is_lost_to_its_neighbours(pair: Pair) -> None:
    watch_of((pair[1], pair[0])).sever()
    assert watch_of(pair).lost(wait=5.0) == [3]


def test_without_a_ring_nobody_is_lost() -> None:
    watch = RingWatch({}, str)
    assert watch.lost(wait=5.0) == []
    watch.sever()


def test_a_process_that_waits_in_mlx_is_ended_and_says_why(
    pair: Pair,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_watch, "LOOK_SECONDS", 3600.0)  # no thread looks
    ended: list[int] = []
    watch = watch_of(pair, ended)
    pair[1].close()
    assert watch.lost(wait=5.0) == [3]
    assert watch._known is not None
    known = watch._known[1]
    watch._end_if_stuck(known + 60)
    assert not ended  # no thread waits in mlx
    with watch.inside(), watch.inside():
        # A wait that begins after the loss gets its full time.
        entered = watch._entered
        assert entered >= known
        watch._end_if_stuck(entered + SAY_SECONDS - 0.1)
        assert capsys.readouterr().err == ""
        for seconds in (SAY_SECONDS + 0.1, END_SECONDS - 0.1):
            watch._end_if_stuck(entered + seconds)
            assert not ended
        watch._end_if_stuck(entered + END_SECONDS + 0.1)
        assert ended == [STATUS]
    said = capsys.readouterr().err
    assert said.startswith("RankLostError: Ranks [3] are lost.")
    assert said.count("\n") == 1
    assert f"will be ended with status {STATUS}" in said
    watch._end_if_stuck(entered + 60)
    assert ended == [STATUS]  # the thread is out of mlx


def test_a_lost_neighbour_is_found_by_the_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ring_watch, "END_SECONDS", 0.05)
    ended, other = socket.socketpair()
    with ended, other:
        ended.settimeout(30.0)
        watch = RingWatch({3: [pair[0]]}, str, lambda status: other.send(b"."))
        with watch.inside():
            pair[1].close()
            assert ended.recv(1) == b"."


def test_connections_of_the_ring_are_found_by_their_ports(tmp_path: Path) -> None:
    """Rank 1 of 3 has accepted the connection of rank 0, and is connected to rank 2."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in listeners]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    before = socket.create_connection(("127.0.0.1", ports[1]))
    taken = listeners[1].accept()[0]
    after = socket.create_connection(("127.0.0.1", ports[2]))
    connections = ring_connections(1, 3, str(hosts))
    assert sorted(connections) == [0, 2]
    # A connection may be listed twice.
    assert taken.getpeername() in [each.getpeername() for each in connections[0]]
    assert after.getpeername() in [each.getpeername() for each in connections[2]]
    for each in [*listeners, before, taken, after, *connections[0], *connections[2]]:
        each.close()


@pytest.mark.parametrize("said", ["", "[]", "{", '[["a"], ["b:c"]]', "[[1], [2]]"])
def test_a_hostfile_of_something_else_names_no_connections(
    said: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(said)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0],
    ):
        before = len(list(Path("/dev/fd").iterdir()))
        assert ring_connections(0, 2, str(path)) == {}
        assert ring_connections(0, 2, str(tmp_path / "none.json")) == {}
        assert len(list(Path("/dev/fd").iterdir())) == before
