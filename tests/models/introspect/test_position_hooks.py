"""Position tables are found by their lookups; hooks keep lookups inside the tables."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models import ModelHooks, position_table
from support.models.census import BUILT, structure
from support.models.position_tables import TABLES, highest, table_of, with_table


def test_of_all_architectures_two_have_a_table() -> None:
    tables = {name: position_table(structure(name)) for name in BUILT}
    assert {n: count for n, count in tables.items() if count} == dict.fromkeys(
        TABLES, 1024
    )


class _Shifted(nn.Module):
    """A model whose table begins with rows for padding, as OPT's table does."""

    def __init__(self, shift: int, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wte = nn.Embedding(16, 8)
        self.places = nn.Embedding(rows, 8)
        self.layers = [nn.Linear(8, 8)]
        self._shift = shift

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        places = mx.arange(x.shape[1]) + cache[0].offset + self._shift
        hidden = self.layers[0](self.wte(x) + self.places(places))
        logits: mx.array = self.wte.as_linear(hidden)
        return logits


@pytest.mark.parametrize(("shift", "rows"), [(0, 9), (2, 11)])
def test_rows_for_no_position_do_not_count(shift: int, rows: int) -> None:
    assert position_table(_Shifted(shift, rows)) == 9
    assert position_table(_quantized(shift, rows)) == 9


def _quantized(shift: int, rows: int) -> nn.Module:
    model = _Shifted(shift, rows)
    model.wte, model.places = nn.Embedding(16, 64), nn.Embedding(rows, 64)
    model.layers = [nn.Linear(64, 64)]
    nn.quantize(model, class_predicate=lambda _, part: isinstance(part, nn.Embedding))
    assert isinstance(model.places, nn.QuantizedEmbedding)
    return model


@pytest.mark.parametrize("name", TABLES)
def test_padding_past_the_table_looks_up_its_last_row(name: str) -> None:
    model = with_table(name, 8)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    assert mx.isnan(model(tokens, cache=make_prompt_cache(model))[:, -1]).any()
    assert highest(model) == 9
    hooks = ModelHooks(model)
    logits = model(tokens, cache=make_prompt_cache(model))
    assert not mx.isnan(logits).any()
    assert highest(model) == 7
    hooks.remove()
    same = model(tokens[:, :8], cache=make_prompt_cache(model))
    np.testing.assert_array_equal(np.array(logits[:, :8]), np.array(same))
    assert type(table_of(model)).__name__ == "_Noting"
