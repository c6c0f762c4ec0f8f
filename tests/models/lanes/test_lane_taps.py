"""A lane with taps has the hidden states of its rounds and of its prefill."""

import io
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import HiddenStates, Lane, ModelHooks, States
from support.caches.cache_twins import assert_same, read
from support.models.tiny_models import build

TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(60)]
RECURRENT = ["qwen3_5", "nemotron_h"]
NAMES = ["llama", "gemma3_text", *RECURRENT]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hook", [True, False])
def test_a_round_has_the_hidden_states_of_its_rows(name: str, hook: bool) -> None:
    """The states stay the same if the model runs again to keep a prefix."""
    model = build(name)
    bare, lane = Lane(model), Lane(model)
    recorders = ModelHooks(model) if hook else None
    lane.taps = taps = HiddenStates(model, layers=(1,), after_norm=True)
    for each in (lane, bare):
        each.feed(TOKENS[:25])
    for start in (25, 27):
        with lane.begin() as tapped, bare.begin() as plain:
            parts = [TOKENS[start : start + 2], TOKENS[start + 2 : start + 5]]
            logits = [tapped.forward(mx.array(part)) for part in parts]
            expected = [plain.forward(mx.array(part)) for part in parts]
            tapped.commit(2)
            plain.commit(2)
        assert_same(read(logits), read(expected), "logits")
        rows = tapped.hidden.after_norm
        assert rows.shape == tapped.hidden.layer(1).shape == (1, 5, 64)
        head = [taps.head(rows[:, :2])[0], taps.head(rows[:, 2:])[0]]
        assert_same(read(head), read(logits), "the head")
    assert bool(lane.reruns) is (not hook and name in RECURRENT)
    taps.remove()
    if recorders is not None:
        recorders.remove()


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_hands_out_each_chunk_with_its_hidden_states(name: str) -> None:
    model = build(name)
    lane, caches = Lane(model), make_prompt_cache(model)
    lane.taps = taps = HiddenStates(model, after_norm=True)
    fed: list[list[int]] = []

    def each(chunk: Sequence[int], hidden: States) -> None:
        fed.append(list(chunk))
        assert lane.seen == sum(len(tokens) for tokens in fed)
        assert all(evaluated(array) for array in hidden.arrays)
        with taps.collect() as expected:
            model(mx.array([chunk]), cache=caches)
        assert_same(
            read(hidden.after_norm), read(expected.after_norm), f"{len(fed)}th chunk"
        )

    lane.feed(TOKENS[:25], 10, each)
    assert fed == [TOKENS[:10], TOKENS[10:20], TOKENS[20:25]]
    taps.remove()


def test_a_lane_without_taps_has_no_hidden_states() -> None:
    lane = Lane(build("llama"))
    with lane.begin() as lane_round:
        with pytest.raises(InvalidRequestError, match="collects no hidden states"):
            lane_round.hidden  # noqa: B018
        lane_round.forward(mx.array([1]))
    with pytest.raises(InvalidRequestError, match="collects no hidden states"):
        lane.feed([1, 2], each=lambda chunk, hidden: None)
    assert lane.seen == 0
    assert all(cache.empty() for cache in lane.caches)


def test_a_listener_that_fails_leaves_the_finished_chunks() -> None:
    lane = Lane(build("qwen3_5"))
    lane.taps = HiddenStates(lane.model, before_norm=True)

    def failing(chunk: Sequence[int], hidden: States) -> None:
        if lane.seen == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.feed(TOKENS[:25], 10, failing)
    assert lane.seen == 20
    lane.begin().rollback()  # raises unless the caches hold these tokens
    lane.taps.remove()


def test_hidden_states_are_computed_when_they_are_used() -> None:
    model = build("llama")
    model.model.norm.weight = mx.ones((64,)) * 2
    lane = Lane(model)
    lane.taps = HiddenStates(model, after_norm=True)
    lane.feed(TOKENS[:20])
    with lane.begin() as lane_round:
        lane_round.forward(mx.array([1]))
        assert not evaluated(model.model.norm.weight)
        mx.eval(lane_round.hidden.after_norm)
        assert evaluated(model.model.norm.weight)
    lane.taps.remove()


def evaluated(array: mx.array) -> bool:
    """Return whether an array has no pending operations."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "label" not in graph.getvalue()
