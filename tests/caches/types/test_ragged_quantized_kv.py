"""A model reads a batch of quantized rows as it reads each request's own cache."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_speculation.caches import KVQuantization, Speculation, array_bytes
from mlx_speculation.caches.types.ragged_quantized_kv import RaggedQuantizedKVCache
from mlx_speculation.errors import InvalidRequestError
from support.identity import ROUNDING, prompt_of
from support.models.tiny_models import TINY_MODELS, build_tiny

LENGTHS = (17, 6, 20)


def quantized(model: nn.Module, length: int, bits: int) -> list[Any]:
    """Return caches that hold a prompt, quantized as in a stream."""
    caches = make_prompt_cache(model)
    model(mx.array([prompt_of(length)]), cache=caches)
    KVQuantization(bits, 32).replace(caches)
    return caches


def close(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=ROUNDING, atol=ROUNDING).item())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 4])
def test_a_model_reads_quantized_rows_together(bits: int, width: int) -> None:
    tiny = TINY_MODELS["llama"]
    model = build_tiny(replace(tiny, args={**tiny.args, "head_dim": 32}))
    alone = [quantized(model, length, bits) for length in LENGTHS]
    batch = [RaggedQuantizedKVCache.merge(layer) for layer in zip(*alone, strict=True)]
    keeps = [[width, 0, 1], [1, 1, 1], [0, width, 0]]
    for serial, keep in enumerate(keeps):
        tokens = mx.array([prompt_of(50 + serial + i)[:width] for i in range(3)])
        with Speculation(batch) as speculation:
            logits = model(tokens, cache=speculation.caches)
            speculation.commit(keep)
        for row, caches in enumerate(alone):
            with Speculation(caches) as row_speculation:
                row_logits = model(tokens[row : row + 1], cache=row_speculation.caches)
                assert close(row_logits[0], logits[row])
                row_speculation.commit(keep[row])
    for cache, *rows in zip(batch, *alone, strict=True):
        assert cache.nbytes == array_bytes([cache])
        for row, one in enumerate(rows):
            out = cache.extract(row)
            assert isinstance(out, QuantizedKVCache)
            assert (out.offset, out.bits, out.group_size) == (one.offset, bits, 32)


def row_of(length: int, tag: int) -> Any:
    """Return a quantized cache of one sequence, with numbers drawn from seed `tag`."""
    cache: Any = QuantizedKVCache(32, 4)
    keys = mx.random.normal((1, 2, length, 32), key=mx.random.key(tag))
    cache.update_and_fetch(keys, mx.tile(keys, (1, 1, 1, 2)) + 1)
    return cache


@pytest.mark.parametrize("order", [[2, 0], mx.array([1]), [0, 1, 2]])
def test_rows_that_leave_and_join_keep_all_of_their_parts(order: Any) -> None:
    rows = [row_of(length, tag) for tag, length in enumerate((300, 6, 20))]
    batch = RaggedQuantizedKVCache.merge(rows)
    batch.filter(order)
    new = row_of(270, 9)
    batch.extend(RaggedQuantizedKVCache.merge([new]))
    places: Any = order.tolist() if isinstance(order, mx.array) else order
    expected = [*(rows[place] for place in places), new]
    assert batch.offset.tolist() == [row.offset for row in expected]
    for place, row in enumerate(expected):
        out = batch.extract(place)
        pairs = zip(out.keys_and_values(), row.keys_and_values(), strict=True)
        for parts, others in pairs:
            assert len(parts) == len(others) == 3
            for one, other in zip(parts, others, strict=True):
                assert mx.array_equal(one, other)


def test_rows_that_are_quantized_in_other_ways_are_refused() -> None:
    rows: list[Any] = [QuantizedKVCache(32, bits) for bits in (4, 4, 8)]
    with pytest.raises(InvalidRequestError, match=r"bits=8, group_size=32.*bits=4"):
        RaggedQuantizedKVCache.merge(rows)
    batch = RaggedQuantizedKVCache.merge(rows[:2])
    with pytest.raises(InvalidRequestError, match="quantized alike"):
        batch.extend(RaggedQuantizedKVCache.merge(rows[2:]))
    assert batch.lengths == [0, 0]
    batch.extend(RaggedQuantizedKVCache(1, 32, 4))
    assert batch.lengths == [0, 0, 0]
    assert batch.nbytes == 0
