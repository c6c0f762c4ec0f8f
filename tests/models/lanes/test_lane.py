"""A lane: a model, its caches, and how many tokens they hold."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import UnsupportedCacheError
from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.models.recurrent.replay import MixerCall
from support.caches.cache_twins import assert_same, detached, read
from support.models.tiny_models import build

TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(40)]
NAMES = ["llama", "qwen3_5", "llama(sliding)"]


def logits_after(lane: Lane) -> mx.array:
    """Return the logits of one more token, which the lane does not keep."""
    with lane.begin() as lane_round:
        output = lane_round.forward(mx.array([9]))
        mx.eval(output)
    return output


def fed(name: str, count: int) -> Lane:
    """Return a lane whose model was fed `count` tokens one by one."""
    model, caches = fed_once(name, count)
    return Lane(model, detached(caches), seen=count)


@cache
def fed_once(name: str, count: int) -> tuple[nn.Module, list[Any]]:
    model = build(name)
    caches: list[Any] = make_prompt_cache(model)
    for token in TOKENS[:count]:
        mx.eval(model(mx.array([[token]]), cache=caches))
    return model, caches


def assert_close(actual: Lane, expected: Lane, name: str) -> None:
    one, other = read([logits_after(actual), logits_after(expected)])
    # Rows written one by one have another order in a ring than rows written at once.
    if name == "llama(sliding)":
        assert abs(one - other).max() < 1e-4
    else:
        assert_same(one, other, "the next logits")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7, 2048])
def test_feeding_in_chunks_equals_feeding_one_by_one(name: str, step: int) -> None:
    lane = Lane(build(name))
    lane.feed(TOKENS[:30], step)
    assert lane.seen == 30
    assert_close(lane, fed(name, 30), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [0, 1, 3, 5])
@pytest.mark.parametrize("hook", [True, False])
def test_a_kept_prefix_equals_plain_decoding(name: str, keep: int, hook: bool) -> None:
    lane = Lane(build(name))
    owner = ModelHooks(lane.model) if hook else None
    lane.feed(TOKENS[:20])
    with lane.begin() as lane_round:
        lane_round.forward(mx.array(TOKENS[20:22]))
        lane_round.forward(mx.array(TOKENS[22:25]))
        lane_round.prepare(keep)
        lane_round.commit(keep)
    assert lane.seen == 20 + keep
    ran_again = name == "qwen3_5" and not hook and keep in (1, 3)
    assert lane.reruns == ran_again
    assert_close(lane, fed(name, 20 + keep), name)
    if owner is not None:
        owner.remove()


@pytest.mark.parametrize("keep", [0, 2, 5])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5", "mamba"])
def test_mixers_that_run_again_are_counted(
    name: str, keep: int, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixer runs again if it has no replay recipe (mamba) or an incomplete record."""
    model = build(name)
    owner = ModelHooks(model)
    for ruined in (False, True):
        lane = Lane(model)
        lane.feed(TOKENS[:20])
        if ruined:
            monkeypatch.setattr(MixerCall, "complete", False)
        with lane.begin() as lane_round:
            lane_round.forward(mx.array(TOKENS[20:25]))
            if prepared:
                lane_round.prepare(1)
                lane_round.prepare(keep)
            lane_round.commit(keep)
        assert lane.mixer_reruns == (keep == 2 and (ruined or name == "mamba"))
        assert lane.reruns == 0
    owner.remove()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hook", [True, False])
def test_a_commit_taken_back_gives_the_tokens_back(name: str, hook: bool) -> None:
    lane = Lane(build(name))
    owner = ModelHooks(lane.model) if hook else None
    lane.feed(TOKENS[:20])
    lane_round = lane.begin()
    with lane_round:
        lane_round.forward(mx.array(TOKENS[20:25]))
        lane_round.commit(2)
    assert lane.reruns == (name == "qwen3_5" and not hook)
    lane_round.rollback()
    lane_round.rollback()
    assert lane.seen == 20
    assert_close(lane, fed(name, 20), name)
    if owner is not None:
        owner.remove()


def test_leaving_a_round_without_a_commit_keeps_nothing() -> None:
    lane = Lane(build("llama"))
    with lane.begin() as lane_round:
        lane_round.forward(mx.array([1, 2, 3]))
    assert lane.seen == 0
    assert all(cache.empty() for cache in lane.caches)


def test_an_error_while_feeding_leaves_the_finished_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane(build("qwen3_5"))
    native = type(lane.model).__call__
    calls: list[int] = []

    def failing(self: object, *args: object, **kwargs: object) -> object:
        calls.append(1)
        logits = native(self, *args, **kwargs)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(type(lane.model), "__call__", failing)
    with pytest.raises(KeyboardInterrupt):
        lane.feed(TOKENS[:30], step=8)
    monkeypatch.undo()
    assert lane.seen == 16
    assert_close(lane, fed("qwen3_5", 16), "qwen3_5")


def test_an_unknown_cache_is_refused_when_the_lane_is_made() -> None:
    with pytest.raises(UnsupportedCacheError, match="layer 0 is a object"):
        Lane(build("llama"), [object()])


@pytest.mark.parametrize(
    "name", ["llama", "llama(sliding)", "recurrent_gemma", "mamba"]
)
def test_a_lane_refuses_batches_and_says_which_layer_and_how_many_rows(
    name: str,
) -> None:
    lane = Lane(build(name))
    lane.feed(TOKENS[:9])
    for rows in (1, 2):
        batch = [type(cache).merge([cache] * rows) for cache in lane.caches]
        if rows == 1 and name == "mamba":
            Lane(lane.model, batch)  # equals the single cache
            continue
        kinds = f"layer [0-9].* for a batch of {rows}, and a cache for one"
        with pytest.raises(UnsupportedCacheError, match=kinds):
            Lane(lane.model, batch)
