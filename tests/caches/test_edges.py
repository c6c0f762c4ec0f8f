"""Edge cases that no random test reaches: file limits, large offsets, odd lengths."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation import Speculation, UnsupportedCacheError
from mlx_speculation.caches import load_caches, save_caches
from mlx_speculation.caches.files.safetensors_reader import (
    MAX_DIM,
    FlawError,
    read_header,
)
from mlx_speculation.caches.files.safetensors_writer import write
from mlx_speculation.caches.journals.batch_kv import moved


def rows(count: int, first: int = 0) -> mx.array:
    """Return keys or values [1, 1, count, 2] that carry their positions."""
    positions = mx.arange(first, first + count, dtype=mx.float32)
    return mx.broadcast_to(positions[None, None, :, None], (1, 1, count, 2))


def header_of(tmp_path: Path, entry: dict[str, Any], *, more: int = 0) -> None:
    """Read the header of a file with one tensor and no data."""
    text = json.dumps({"x": entry}).encode()
    file = tmp_path / "file"
    file.write_bytes((len(text) + more).to_bytes(8, "little") + text)
    with file.open("rb") as opened:
        read_header(opened, file.stat().st_size)


EMPTY = {"dtype": "F32", "data_offsets": [0, 0]}


def test_the_largest_dimension_of_a_file_is_read(tmp_path: Path) -> None:
    assert MAX_DIM == 2**31 - 1
    header_of(tmp_path, {**EMPTY, "shape": [2**31 - 1, 0]})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**EMPTY, "shape": [2**31, 0]}, "whole numbers from 0 to 2147483647"),
        ({**EMPTY, "shape": [2**16, 2**15, 0]}, "is empty, and the product of its"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [0]}, "two whole numbers"),
        ({"dtype": "F32", "shape": [0], "data_offsets": []}, "two whole numbers"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [0, 0, 0]}, "two whole"),
    ],
)
def test_what_is_larger_or_odd_is_said(
    entry: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FlawError, match=message):
        header_of(tmp_path, entry)


@pytest.mark.parametrize(
    "dtype", [mx.bool_, mx.bfloat16, mx.float32, mx.int64, mx.uint64]
)
def test_arrays_of_every_width_are_written(dtype: mx.Dtype, tmp_path: Path) -> None:
    array = mx.array([0, 1, 1, 0, 1]).astype(dtype)
    write(tmp_path / "file.safetensors", {"x": array}, {})
    loaded = mx.load(str(tmp_path / "file.safetensors"))
    assert isinstance(loaded, dict)
    assert loaded["x"].dtype == dtype
    assert mx.array_equal(loaded["x"], array)


def test_a_ring_that_grows_past_small_numbers_is_put_back() -> None:
    ring = RotatingKVCache(max_size=320)
    ring.update_and_fetch(rows(300), rows(300))
    before = ring.keys
    with Speculation([ring]) as speculation:
        speculation.caches[0].update_and_fetch(rows(1, 300), rows(1, 300))
    assert ring.offset == 300
    assert ring.keys is not None
    assert before is not None
    assert mx.array_equal(ring.keys[:, :, :300], before[:, :, :300])
    twin = RotatingKVCache(max_size=320)
    twin.update_and_fetch(rows(300), rows(300))
    for position in range(300, 330):
        got = ring.update_and_fetch(rows(1, position), rows(1, position))
        expected = twin.update_and_fetch(rows(1, position), rows(1, position))
        assert mx.array_equal(got[0], expected[0])


def test_rows_that_are_moved_left_repeat_the_last() -> None:
    x = rows(4)
    got = moved(mx.concatenate([x, x]), mx.array([-2, 1]), 4)
    assert got[0, 0, :, 0].tolist() == [2, 3, 3, 3]
    assert got[1, 0, :, 0].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("offset", [2, 4])
def test_a_concatenated_cache_with_another_offset_is_refused(offset: int) -> None:
    cache = ConcatenateKVCache()
    cache.update_and_fetch(rows(3), rows(3))
    cache.offset = offset
    with pytest.raises(UnsupportedCacheError, match="holds 3 rows"):
        Speculation([cache])


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])  # mlx-lm's cache packs no others
def test_every_way_to_quantize_is_saved_and_loaded(
    group: int, bits: int, tmp_path: Path
) -> None:
    cache = QuantizedKVCache(group_size=group, bits=bits)
    keys = mx.random.normal((1, 2, 5, 256), key=mx.random.key(bits))
    cache.update_and_fetch(keys, 2 * keys)
    save_caches(tmp_path / "file.safetensors", [cache], tokens=[1, 2, 3, 4, 5])
    [loaded] = load_caches(tmp_path / "file.safetensors").caches
    assert (loaded.group_size, loaded.bits, loaded.offset) == (group, bits, 5)
    pairs: Any = zip(loaded.keys, cache.keys or (), strict=True)
    for mine, theirs in pairs:
        assert mx.array_equal(mine[:, :, :5], theirs[:, :, :5])


def test_the_error_says_how_long_a_header_may_be(tmp_path: Path) -> None:
    entry: dict[str, Any] = {**EMPTY, "shape": [0]}
    length = len(json.dumps({"x": entry}))
    with pytest.raises(FlawError, match=f"have {length + 1} bytes, but only {length} "):
        header_of(tmp_path, entry, more=1)
