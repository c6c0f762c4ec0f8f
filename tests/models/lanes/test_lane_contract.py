"""A lane of one request and a batch take the same calls, and give the same rows."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.caches import SlidingKVCache, array_bytes, leaves
from mlx_speculation.models import (
    BatchLane,
    CommittedStates,
    HiddenStates,
    Lane,
    ModelHooks,
    RequestLane,
    RowSizes,
)
from support.identity import ROUNDING, prompt_of
from support.models.tiny_models import build

NAMES = ("llama", "gemma3_text", "qwen3_5")
LENGTHS = (17, 6, 20)


@cache
def hooked(name: str) -> tuple[nn.Module, ModelHooks]:
    model = build(name)
    return model, ModelHooks(model)


def alone(name: str, length: int) -> Lane:
    lane = Lane(hooked(name)[0], sliding="slack")
    lane.feed(prompt_of(length))
    return lane


def lanes_of(name: str, count: int, sizes: RowSizes | None = None) -> RequestLane:
    first, *others = (alone(name, length) for length in LENGTHS[:count])
    first.sizes = sizes
    lane: RequestLane = first.join(others) if others else first
    assert (lane is first) == (not others)
    assert not others or first.caches == []
    assert lane.requests == count
    assert lane.nbytes == array_bytes(lane.caches) > 0
    return lane


def drafted(count: int, width: int, serial: int) -> mx.array:
    """Return the tokens that a round is fed, uint32 [requests, width]."""
    rows = [prompt_of(40 + serial + place)[:width] for place in range(count)]
    return mx.array(rows, mx.uint32)


def close(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=ROUNDING, atol=ROUNDING).item())


@pytest.mark.parametrize("sizes", [None, RowSizes(used=True)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_of_requests_is_that_of_each_alone(
    name: str, count: int, sizes: RowSizes | None
) -> None:
    lane = lanes_of(name, count, sizes)
    twins = [alone(name, length) for length in LENGTHS[:count]]
    keeps: tuple[list[int] | int, ...] = ([4, 1, 0], [2, 6, 3], 6, [5, 6, 6])
    for serial, keep in enumerate(keeps):
        kept = [keep] * count if isinstance(keep, int) else keep[:count]
        tokens = drafted(count, 6, serial)
        with lane.begin(6) as lane_round:
            logits = lane_round.forward(tokens)
            assert logits.shape[:2] == (count, 6)
            if serial == 1:
                lane_round.rollback()
                continue
            lane_round.prepare(keep if isinstance(keep, int) else kept)
            lane_round.commit(keep if isinstance(keep, int) else kept)
        for place, twin in enumerate(twins):
            with twin.begin() as twin_round:
                assert close(twin_round.forward(tokens[place]), logits[place])
                twin_round.commit(kept[place])
    order = [*range(count)][::-2]
    lane.leave(order)
    for place, origin in enumerate(order):
        assert_extracted(lane.extract(place), twins[origin])
    lane.leave([])
    assert lane.nbytes == 0


def assert_extracted(caches: Sequence[object], twin: Lane) -> None:
    kinds = [type(leaf) for _, leaf in leaves(caches)]
    assert kinds == [type(leaf) for _, leaf in leaves(twin.caches)]
    if twin.model.model_type == "gemma3_text":
        assert SlidingKVCache in kinds
    other = Lane(twin.model, [*caches], twin.seen)
    probe = drafted(1, 3, 90)[0]
    with other.begin() as one, twin.begin() as two:
        assert close(one.forward(probe), two.forward(probe))


@pytest.mark.parametrize("count", [1, 3])
def test_a_round_shows_the_states_of_its_requests_alone(count: int) -> None:
    sizes = RowSizes(used=True)
    lane, tokens = lanes_of("llama", count, sizes), drafted(count, 6, 0)
    taps = HiddenStates(lane.model, after_norm=True)
    if isinstance(lane, BatchLane):
        with lane.begin(6):
            pass
        lane.leave([2, 1, 0])  # the rows of the caches stay in place
        assert lane.stand == [2, 1, 0]
        for single in lane.members:
            single.follower = CommittedStates(taps, lambda states: states.after_norm)
    else:
        assert isinstance(lane, Lane)
        lane.taps = taps
    requests = lane.requests
    with lane.begin(6) as lane_round:
        lane_round.forward(tokens[:requests])
        shown = lane_round.hidden.after_norm
    assert shown.shape[:2] == (requests, 6)
    for place, length in enumerate(LENGTHS[:count][::-1]):
        twin = alone("llama", length)
        twin.taps = taps
        with twin.begin() as single:
            single.forward(tokens[place])
            assert close(single.hidden.after_norm[0], shown[place])
