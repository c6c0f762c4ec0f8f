"""States of committed positions are correct, whatever rounds a lane has run."""

import random

import mlx.core as mx
import pytest

from mlx_speculation.models import CommittedStates, HiddenStates, Lane, ModelHooks
from mlx_speculation.models.lanes import committed_states as committed_module
from support.models.tiny_models import build


def followed(name: str) -> tuple[Lane, CommittedStates]:
    model = build(name)
    lane = Lane(model)
    taps = HiddenStates(model, after_norm=True)
    lane.follower = CommittedStates(taps, lambda states: states.after_norm)
    return lane, lane.follower


def expected(lane: Lane, tokens: list[int]) -> mx.array:
    assert lane.follower is not None
    with lane.follower.taps.collect() as states:
        lane.model(mx.array([tokens]))
    return states.after_norm


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_states_are_those_of_the_committed_tokens(name: str, seed: int) -> None:
    draw = random.Random(seed)
    lane, committed = followed(name)
    recorders = ModelHooks(lane.model)
    tokens: list[int] = []
    for _ in range(14):
        new = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        kind = draw.choice(["feed", "round", "round", "undone", "left", "drop"])
        if kind == "feed":
            lane.feed(new, step=3)
            tokens += new
        elif kind == "drop":
            first = draw.randint(committed.start, committed.stop)
            committed.drop(first)
            assert committed.start == first
        else:
            keep = draw.randint(0, len(new))
            with lane.begin() as lane_round:
                half = draw.randint(0, len(new))
                for part in (new[:half], new[half:]):
                    if part:
                        lane_round.forward(mx.array(part))
                if kind != "left":
                    lane_round.commit(keep)
            if kind == "undone":
                lane_round.rollback()
            elif kind == "round":
                tokens += new[:keep]
        assert committed.stop == lane.seen == len(tokens)
        assert committed.start <= committed.stop
    recorders.remove()
    if committed.start < committed.stop:
        states = committed.between(committed.start, committed.stop)
        truth = expected(lane, tokens)[:, committed.start :]
        assert states.shape == truth.shape
        assert mx.allclose(states, truth, atol=1e-3)
        middle = (committed.start + committed.stop) // 2
        if middle > committed.start:
            piece = committed.between(committed.start, middle)
            assert mx.array_equal(piece, states[:, : middle - committed.start])


def test_positions_that_were_left_out_end_what_was_held() -> None:
    lane, committed = followed("llama")
    lane.feed([1, 2, 3])
    lane.seen += 2  # as after the caches were resumed from a snapshot
    lane._unknown -= 2
    lane.feed([4, 5])
    assert (committed.start, committed.stop) == (5, 7)
    assert committed.between(5, 7).shape == (1, 2, 64)


def test_taking_back_what_was_dropped_leaves_nothing() -> None:
    lane, committed = followed("llama")
    with lane.begin() as lane_round:
        lane_round.forward(mx.array([1, 2, 3, 4]))
        lane_round.commit(4)
    committed.drop(3)
    lane_round.rollback()
    assert (committed.start, committed.stop, committed.arrays) == (0, 0, [])


def test_states_that_nobody_reads_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committed_module, "MOST_UNREAD", 8)
    lane, committed = followed("llama")
    for token in range(30):
        lane.feed([token])
        assert committed.stop - committed.start <= 9
    assert committed.stop == 30


def test_a_chunk_that_is_done_is_announced_while_somebody_listens() -> None:
    class Reader:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def read(self) -> None:
            self.seen.append(committed.stop)
            committed.drop(committed.stop)

    lane, committed = followed("llama")
    reader = Reader()
    committed.after_chunk(reader.read)
    lane.feed([1, 2, 3, 4, 5], step=2)
    assert reader.seen == [2, 4, 5]
    assert committed.arrays == []
    del reader
    lane.feed([6])
    assert (committed.start, committed.stop) == (5, 6)
