"""The journals of rarer caches, case by case (random rounds: test_rare_twins.py)."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches import Speculation
from mlx_speculation.errors import UnsupportedCacheError
from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import (
    Rows,
    assert_same,
    detached,
    read,
    tagged,
)
from support.caches.rare_cache_twins import (
    LayerKind,
    attentions,
)

(COMPRESSING, *_) = attentions()  # groups of 4 rows
LAYER = LayerKind(COMPRESSING, window=3)


@pytest.fixture(name="hooked")
def _hooked() -> Iterator[None]:
    owner = ModelHooks(COMPRESSING)
    yield
    owner.remove()


def write(cache: Any, position: int, width: int, serial: int = 900) -> None:
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()
    serials = tuple(range(serial, serial + width))
    cache.update_and_fetch(*tagged(Rows(position, serials)))


def positions(cache: ChunkedKVCache) -> list[int]:
    keys, values = cache.keys_and_values()
    np.testing.assert_array_equal(np.array(values[..., :2]), -np.array(keys))
    result: list[int] = np.array(keys[0, 0, :, 0]).astype(int).tolist()
    return result


def test_a_front_trim_of_a_layer_that_is_then_not_written_is_undone() -> None:
    cache = ChunkedKVCache(4)
    write(cache, 0, 6)
    with Speculation([cache]) as speculation:
        speculation.caches[0].maybe_trim_front()
    assert positions(cache) == [0, 1, 2, 3, 4, 5]
    assert cache.start_position == 0


def test_a_concatenated_cache_that_was_trimmed_is_refused() -> None:
    """A trim of this cache keeps the trimmed rows. A write would append to them."""
    kv, cache = KVCache(), ConcatenateKVCache()
    write(cache, 0, 5)
    cache.trim(2)
    keys = cache.keys
    with pytest.raises(UnsupportedCacheError, match="5 rows, but its offset is 3"):
        Speculation([kv, cache])
    assert cache.keys is keys
    assert kv.empty()


def forward(cache: Any, start: int, width: int) -> None:
    LAYER.forward(cache, Rows(start, tuple(range(start, start + width))))


def layer_with(rows: int) -> Any:
    cache = LAYER.make()
    forward(cache, 0, rows)
    return cache


def image(cache: LayerCache) -> Any:
    return read(LAYER.content(cache, 1))


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows in each call of a compressor, hooked or not."""
    native, widths = deepseek_v41.Compressor.__call__, list[int]()

    def counted(self: Any, x: mx.array, start: int, cache: Any) -> Any:
        widths.append(x.shape[1])
        return native(self, x, start, cache)

    monkeypatch.setattr(deepseek_v41.Compressor, "__call__", counted)
    return widths


@pytest.mark.parametrize(("keep", "again"), [(5, []), (0, []), (2, [2])])
def test_only_a_part_runs_the_compressor_again(
    keep: int, again: list[int], hooked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = layer_with(6)
    widths = count_calls(monkeypatch)
    with Speculation([cache]) as speculation:
        forward(speculation.caches[0], 6, 5)
        speculation.commit(keep)
    assert widths == [5, *again]


def test_a_whole_round_of_a_layer_records_nothing(hooked: None) -> None:
    cache = layer_with(6)
    with Speculation([cache], whole=True) as speculation:
        assert speculation.caches[0] is cache
        forward(cache, 6, 5)
        speculation.commit(5)
    assert cache.offset == 11


def test_a_part_of_an_unrecorded_compressor_needs_a_rerun() -> None:
    caches = [KVCache(), layer_with(6)]  # the KV cache knows how many rows are written
    before = image(caches[1])
    with Speculation(caches) as speculation:
        write_both(speculation.caches)
        with pytest.raises(UnsupportedCacheError, match="cannot keep 2 of 5"):
            speculation.commit(2)
    assert_same(image(caches[1]), before, "a refused part")
    rerun_counts: list[int] = []
    with Speculation(caches, rerun=rerun_counts.append) as speculation:
        write_both(speculation.caches)
        speculation.commit(2)
    assert rerun_counts == [2]
    assert_same(image(caches[1]), before, "before the second run")
    with Speculation(caches, rerun=rerun_counts.append) as speculation:
        write_both(speculation.caches)
        speculation.commit(5)
    assert rerun_counts == [2]
    assert caches[1].offset == 11


def write_both(caches: list[Any]) -> None:
    write(caches[0], caches[0].offset, 5)
    forward(caches[1], 6, 5)


def test_compressed_rows_from_elsewhere_are_not_taken_for_this_round_s(
    hooked: None,
) -> None:
    """A pipeline stage appends rows of another stage before its own layers write."""
    cache = layer_with(6)
    with Speculation([cache]) as speculation:
        shown = speculation.caches[0]
        shown.compress_kv = mx.concatenate([shown.compress_kv, shown.compress_kv], 1)
        forward(shown, 6, 5)
        assert speculation.written is None
    assert cache.compress_kv.shape[1] == 1


@pytest.mark.parametrize("kind", ["quantized", "chunked"])
def test_single_rows_copy_no_buffer(kind: str) -> None:
    cache: Any = (
        QuantizedKVCache(64, 8) if kind == "quantized" else ChunkedKVCache(4096)
    )
    row, block = mx.ones((1, 4, 1, 64)), mx.ones((1, 4, 1920, 64))
    mx.eval(cache.update_and_fetch(block, block), row)
    buffers = detached(cache.keys)
    whole = (
        sum(a.nbytes for a in buffers) if isinstance(buffers, tuple) else buffers.nbytes
    )
    del buffers
    for _ in range(40):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with Speculation([cache]) as speculation:
            shown = speculation.caches[0]
            if kind == "chunked":
                shown.maybe_trim_front()
            shown.update_and_fetch(row, row)
            mx.eval(cache.keys, cache.values)
            speculation.commit(1)
        assert mx.get_peak_memory() - before < whole // 2
