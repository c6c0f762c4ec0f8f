"""A model's fingerprint depends on all its weights and settings, and nothing else."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRALinear

from mlx_speculation.caches import PrefixCache
from mlx_speculation.caches.prefix.roles import fingerprint
from support.caches.prefix_roles import EVERY, ROWS, request

SIZE = 96


class Model(nn.Module):
    """Two layers with more weights than a few samples would cover."""

    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.args = {"size": SIZE}
        values = mx.arange(SIZE * SIZE).reshape(SIZE, SIZE) / SIZE**2
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.first.weight, self.last.weight = values, values + 1
        self.first.bias, self.last.bias = values[0], values[1]
        self.set_dtype(dtype)


def one_element(model: Model) -> None:
    model.first.weight[70, 37] += 1e-3


def one_bit(model: Model) -> None:
    bits = model.last.weight.view(mx.uint32)
    bits[-1, -2] = bits[-1, -2] ^ 1
    model.last.weight = bits.view(mx.float32)


def swapped(model: Model) -> None:
    model.first, model.last = model.last, model.first


def adapted(model: Model, scale: float = 20.0) -> None:
    layer = LoRALinear.from_base(model.first, scale=scale)
    layer.lora_a, layer.lora_b = mx.ones((SIZE, 8)), mx.ones((8, SIZE))
    model.first = layer


def quantized(model: Model) -> None:
    nn.quantize(model, group_size=32)


CHANGES: dict[str, Any] = {
    "none": lambda _: None,
    "one element": one_element,
    "one bit": one_bit,
    "layers swapped": swapped,
    "adapter": adapted,
    "the scale of an adapter": lambda model: adapted(model, 10.0),
    "quantized": quantized,
    "eight bits": lambda model: nn.quantize(model, group_size=32, bits=8),
    "dtype": lambda model: model.set_dtype(mx.float16),
    "arguments": lambda model: model.args.update(size=0),
}


def test_each_change_of_a_model_has_a_mark_of_its_own() -> None:
    marks = {}
    for name, change in CHANGES.items():
        model = Model()
        change(model)
        marks[name] = fingerprint(model)
    assert len(set(marks.values())) == len(CHANGES), marks


@pytest.mark.parametrize("name", CHANGES)
def test_an_equal_model_has_the_same_mark(name: str) -> None:
    """The arrays of the equal model are strided views of computed arrays."""
    one, other = Model(), Model()
    for model in (one, other):
        CHANGES[name](model)
    weights: Any = other
    copies = tree_map(lambda x: mx.stack([x, x], -1)[..., 1], weights.parameters())
    other.update(copies)
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_finds_nothing_in_the_folder(name: str, tmp_path: Path) -> None:
    tokens = [1, 2] * 6
    reused = []
    for change in (CHANGES["none"], CHANGES[name]):
        model = Model()
        change(model)
        prefixes = PrefixCache(1 << 20, every=EVERY, folder=tmp_path / "own")
        prefixes.bind([model], [ROWS.empty()])
        reused.append(request(prefixes, [*tokens, 0], {0: (ROWS, 0)})[0][0])
        prefixes.flush()
    assert reused == [0, len(tokens) if name == "none" else 0]
