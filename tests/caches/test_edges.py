"""Edge cases outside random tests: file limits, large offsets, odd lengths."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation import CacheFileError, Speculation, UnsupportedCacheError
from mlx_speculation.caches import load_caches, load_into, save_caches, snapshot, split
from mlx_speculation.caches.files import fit, mlx_lm_format
from mlx_speculation.caches.files.field_checks import _check_groups, check_quantized
from mlx_speculation.caches.files.fields import Leaf
from mlx_speculation.caches.files.safetensors_reader import (
    MAX_DIM,
    FlawError,
    read_header,
)
from mlx_speculation.caches.files.safetensors_writer import write
from mlx_speculation.caches.journals.batch_kv import moved
from mlx_speculation.caches.journals.kv import even_out
from mlx_speculation.caches.journals.ring import SavedSlots


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
        ({**EMPTY, "shape": [2**16, 2**15, 0]}, "is empty, with a shape above"),
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


@pytest.mark.parametrize("more", [1, 8, 16])
def test_a_header_longer_than_the_file_is_said(more: int, tmp_path: Path) -> None:
    with pytest.raises(FlawError, match="is said to have"):
        header_of(tmp_path, {**EMPTY, "shape": [0]}, more=more)


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


def test_two_buffers_of_two_lengths_are_evened_out() -> None:
    cache = KVCache()
    cache.update_and_fetch(rows(3), rows(3))
    assert cache.values is not None
    length = cache.values.shape[2]
    cache.values = cache.values[:, :, :4]
    even_out(cache)
    assert cache.keys is not None
    assert cache.keys.shape[2] == cache.values.shape[2] == 4 < length


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


def test_a_state_is_cut_where_it_was_taken_whatever_the_number() -> None:
    cache, state = KVCache(), ArraysCache(1)
    cache.update_and_fetch(rows(300), rows(300))
    state[0] = mx.ones((1, 2))
    whole = snapshot([cache, state], 0)
    before, after = split(whole, int("300"))
    assert (before.start, before.stop, after.start, after.stop) == (0, 300, 300, 300)


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


def test_a_file_of_another_kind_is_refused_by_both_names(tmp_path: Path) -> None:
    ring, live = RotatingKVCache(max_size=8), KVCache()
    ring.update_and_fetch(rows(3), rows(3))
    save_caches(tmp_path / "file.safetensors", [ring], tokens=[1, 2, 3])
    message = "the file has a RotatingKVCache and the live cache is KVCache"
    with pytest.raises(CacheFileError, match=message):
        load_into(tmp_path / "file.safetensors", [live])
    assert live.offset == 0


def test_the_error_says_how_long_a_header_may_be(tmp_path: Path) -> None:
    entry: dict[str, Any] = {**EMPTY, "shape": [0]}
    length = len(json.dumps({"x": entry}))
    with pytest.raises(FlawError, match=f"have {length + 1} bytes of {length}$"):
        header_of(tmp_path, entry, more=1)


def test_scales_of_another_number_of_rows_are_refused() -> None:
    packed = mx.zeros((1, 1, 4, 8), mx.uint32)
    scales = mx.zeros((1, 1, 3, 1))
    arrays: dict[str, mx.array] = {f"{name}.0": packed for name in ("keys", "values")}
    arrays |= {f"{n}.{i}": scales for n in ("keys", "values") for i in (1, 2)}
    numbers: Any = {"group_size": 64, "bits": 4, "offset": 4}
    with pytest.raises(FlawError, match="do not fit groups of 64"):
        check_quantized(Leaf("QuantizedKVCache", numbers, arrays))


def test_a_text_of_one_letter_is_a_text() -> None:
    assert mlx_lm_format._scalar(mx.array([65]), "string", "x") == "A"


def test_a_layer_without_an_offset_is_said() -> None:
    with pytest.raises(FlawError, match="has no offset"):
        mlx_lm_format._complete_layer(Leaf("LayerCache", {}, {}), "0", 0)


def test_numbers_that_do_not_belong_there_are_said() -> None:
    with pytest.raises(FlawError, match="has numbers it should not"):
        mlx_lm_format._numbers31("ArraysCache", {(0,): "1"}, "0")


def test_fewer_last_tokens_are_alike() -> None:
    two, three = mx.zeros((1, 2), mx.int32), mx.zeros((1, 3), mx.int32)
    assert fit._alike("ArraysCache", three, two)
    assert not fit._alike("ArraysCache", three.astype(mx.float32), two)


def test_groups_hold_more_tokens_than_are_pending() -> None:
    """3 groups of 1 token and 2 pending ones cannot make 5 tokens."""
    pending = {"pending_kv": 2, "pending_gate": 2}
    with pytest.raises(FlawError, match="do not make 5 tokens"):
        _check_groups(5, {"compress_kv": 3, "index_k": 3, **pending})
    _check_groups(5, {"compress_kv": 1, "index_k": 1, **pending})


def test_a_block_of_saved_slots_begins_anywhere() -> None:
    keys, values = rows(8), rows(8)
    saved = SavedSlots(weakref.ref(keys), weakref.ref(values), 4, 10, rows(3))
    cache = SimpleNamespace(
        keys=keys,
        values=values,
    )
    assert saved.holds(cache, 5, 11)
    assert not saved.holds(cache, 4, 11)
