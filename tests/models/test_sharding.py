"""Sharded models, as far as one rank can test them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import load, spread_as
from mlx_speculation.models.sharding import (
    SAID_BYTES,
    broadcast,
    gathered,
    has_split_output,
    joined_output,
    mark_of,
    spread,
)
from support.models.tiny_models import build

GROUP = mx.distributed.init()


class Divided(nn.Module):
    """A model whose output layer is sharded over all ranks. The test has one rank."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lm_head = shard_linear(layer, "all-to-sharded", group=GROUP)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_output_layer_is_put_together(bits: int | None, bias: bool) -> None:
    layer: Any = nn.Linear(128, 48, bias=bias)
    if bits is not None:
        layer = layer.to_quantized(group_size=32, bits=bits)
    model = Divided(layer)
    assert has_split_output(model)
    joined: Any = joined_output(model, GROUP)
    x = mx.random.normal((1, 3, 128), key=mx.random.key(0))
    assert mx.array_equal(joined(x), layer(x))


def test_a_mark_tells_other_weights_and_is_the_same_on_every_part() -> None:
    model, part = build("llama"), build("llama")
    spread(part, GROUP)
    assert mark_of(model) == mark_of(part)
    assert mark_of(model) != mark_of(build("llama", seed=1))


def test_a_model_on_one_rank_is_whole() -> None:
    part = build("qwen3_5")
    spread(part, GROUP)
    assert spread_as(part) is None


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be spread over ranks with"):
        spread(build("mamba"), GROUP)
    with pytest.raises(UnsupportedModelError, match="Try parallel='tensor'"):
        spread(build("llama"), GROUP, "pipeline")
    with pytest.raises(InvalidRequestError, match="one of tensor, pipeline"):
        load("anywhere", parallel="both")  # type: ignore[arg-type]


def test_ranks_tell_and_gather() -> None:
    assert broadcast(mx.array([3, 4], mx.uint32), GROUP).tolist() == [3, 4]
    assert gathered({"host": "ä", "pid": 7}, GROUP) == [{"host": "ä", "pid": 7}]
    with pytest.raises(InvalidRequestError, match=f"at most {SAID_BYTES} fit"):
        gathered({"host": "x" * SAID_BYTES}, GROUP)
