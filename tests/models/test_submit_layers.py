"""Submission of the outputs of layers on a CPU, with `mx.async_eval`.

A plain step submits each layer but the last, a round every `part`-th layer.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models import PART_SIZES, Lane, ModelHooks
from mlx_speculation.models.lanes.batch import BatchLane
from mlx_speculation.models.round_context import MOST_POSITIONS, plain_step
from mlx_speculation.models.shape_buckets import RowSizes
from support.identity import prompt_of
from support.models.copies import hooked
from support.models.tiny_models import build


@pytest.fixture(name="submitted")
def _submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    usual: Any = mx.async_eval

    def noted(*arrays: Any) -> None:
        shapes.extend(array.shape for array in arrays)
        usual(*arrays)

    monkeypatch.setattr(mx, "async_eval", noted)
    return shapes


@pytest.fixture(name="model", params=["llama", "qwen3_5", "gemma3_text"])
def _model(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = build(request.param)
    recorders = ModelHooks(model)
    yield model
    recorders.remove()
    assert not hooked(model)


class Pairs(nn.Module):
    """A layer that returns a tuple of an array and None."""

    def __call__(self, x: mx.array) -> tuple[mx.array, None]:
        return x + 1, None


def fed(lane: Any, count: int, *, whole: bool) -> mx.array:
    with lane.begin(whole=whole) as lane_round:
        logits: mx.array = lane_round.forward(mx.array(prompt_of(count)))
        lane_round.commit(count)
    return logits


def test_a_step_submits_every_layer_but_the_last(
    model: Any, submitted: list[tuple[int, ...]]
) -> None:
    lane = Lane(model)
    logits = fed(lane, 1, whole=True)
    assert len(submitted) == len(model.layers) - 1 > 0
    assert {shape[:2] for shape in submitted} == {(1, 1)}
    assert logits.tolist() == fed(Lane(build_like(model)), 1, whole=True).tolist()


def build_like(model: Any) -> nn.Module:
    other = build(model.model_type)
    assert not hooked(other)
    return other


@pytest.mark.parametrize("size", [*PART_SIZES, 1])
def test_a_round_submits_after_so_many_layers_and_writes_the_same(
    model: Any, size: int, submitted: list[tuple[int, ...]]
) -> None:
    lanes = Lane(model), Lane(build_like(model))
    lanes[0].part = size
    rows = [fed(lane, 3, whole=False) for lane in lanes]
    parts = (len(model.layers) - 1) // size if size else 0
    assert [shape[:2] for shape in submitted] == [(1, 3)] * parts
    assert rows[0].tolist() == rows[1].tolist()


def test_rounds_and_chunks_of_a_prompt_are_submitted_as_a_whole(
    model: Any, submitted: list[tuple[int, ...]]
) -> None:
    lane = Lane(model)
    fed(lane, 3, whole=False)
    fed(lane, MOST_POSITIONS + 1, whole=True)
    assert submitted == []


def test_a_step_of_a_batch_is_submitted_by_layers_and_its_round_in_parts(
    submitted: list[tuple[int, ...]],
) -> None:
    model = build("llama")
    recorders = ModelHooks(model)
    lanes = [Lane(model), Lane(model)]
    for lane in lanes:
        lane.feed(prompt_of(5))
    lanes[0].part = 2
    batch = BatchLane(model, RowSizes())
    batch.join(lanes)
    submitted.clear()
    every = len(model.layers) - 1
    for count, whole, layers in ((1, True, every), (3, False, every // 2)):
        with batch.begin(count, whole=whole) as batch_round:
            batch_round.forward(mx.array([prompt_of(count)] * 2))
            batch_round.commit(count)
        assert [shape[:2] for shape in submitted] == [(2, count)] * layers
        submitted.clear()
    recorders.remove()


def test_layers_that_return_several_arrays_submit_the_first(
    submitted: list[tuple[int, ...]],
) -> None:
    model: Any = nn.Module()
    kind: Any = Pairs
    model.layers = [kind(), kind()]
    recorders = ModelHooks(model)
    with plain_step(1):
        assert model.layers[0](mx.zeros((1, 1, 2)))[0].tolist() == [[[1.0, 1.0]]]
    assert submitted == [(1, 1, 2)]
    model.layers[0](mx.zeros((1, 1, 2)))
    assert len(submitted) == 1
    recorders.remove()
