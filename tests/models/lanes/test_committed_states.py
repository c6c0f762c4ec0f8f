"""States of committed positions, whatever rounds a lane has had."""

import random

import mlx.core as mx
import pytest

from mlx_speculation.models import CommittedStates, HiddenStates, Lane, ModelHooks
from mlx_speculation.models.lanes import committed_states as committed_module
from support.models.tiny_models import build


def followed(name: str) -> tuple[Lane, CommittedStates]:
    """Return a lane and what follows it."""
    model = build(name)
    lane = Lane(model)
    taps = HiddenStates(model, after_norm=True)
    lane.follower = CommittedStates(taps, lambda states: states.after_norm)
    return lane, lane.follower


def expected(lane: Lane, tokens: list[int]) -> mx.array:
    """Return the states that one forward makes."""
    assert lane.follower is not None
    with lane.follower.taps.collect() as states:
        lane.model(mx.array([tokens]))
    return states.after_norm


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_states_are_those_of_the_committed_tokens(name: str, seed: int) -> None:
    """Prompts, rounds of which a part is kept, rounds taken back, states dropped."""
    draw = random.Random(seed)
    lane, held = followed(name)
    recorders = ModelHooks(lane.model)
    tokens: list[int] = []
    for _ in range(14):
        new = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        kind = draw.choice(["feed", "round", "round", "undone", "left", "drop"])
        if kind == "feed":
            lane.feed(new, step=3)
            tokens += new
        elif kind == "drop":
            first = draw.randint(held.start, held.stop)
            held.drop(first)
            assert held.start == first
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
        assert held.stop == lane.seen == len(tokens)
        assert held.start <= held.stop
    recorders.remove()
    if held.start < held.stop:
        found = held.between(held.start, held.stop)
        truth = expected(lane, tokens)[:, held.start :]
        assert found.shape == truth.shape
        assert mx.allclose(found, truth, atol=1e-3)
        middle = (held.start + held.stop) // 2
        if middle > held.start:
            piece = held.between(held.start, middle)
            assert mx.array_equal(piece, found[:, : middle - held.start])


def test_positions_that_were_left_out_end_what_was_held() -> None:
    lane, held = followed("llama")
    lane.feed([1, 2, 3])
    lane.seen += 2  # as after the caches were resumed from a snapshot
    lane._unknown -= 2
    lane.feed([4, 5])
    assert (held.start, held.stop) == (5, 7)
    assert held.between(5, 7).shape == (1, 2, 64)


def test_taking_back_what_was_dropped_leaves_nothing() -> None:
    lane, held = followed("llama")
    with lane.begin() as lane_round:
        lane_round.forward(mx.array([1, 2, 3, 4]))
        lane_round.commit(4)
    held.drop(3)
    lane_round.rollback()
    assert (held.start, held.stop, held.arrays) == (0, 0, [])


def test_states_that_nobody_reads_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committed_module, "MOST_UNREAD", 8)
    lane, held = followed("llama")
    for token in range(30):
        lane.feed([token])
        assert held.stop - held.start <= 9
    assert held.stop == 30


def test_a_chunk_that_is_done_is_announced_while_somebody_listens() -> None:
    class Reader:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def read(self) -> None:
            self.seen.append(held.stop)
            held.drop(held.stop)

    lane, held = followed("llama")
    reader = Reader()
    held.after_chunk(reader.read)
    lane.feed([1, 2, 3, 4, 5], step=2)
    assert reader.seen == [2, 4, 5]
    assert held.arrays == []
    del reader
    lane.feed([6])
    assert (held.start, held.stop) == (5, 6)
