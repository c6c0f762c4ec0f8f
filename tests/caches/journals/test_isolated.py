"""With `isolated=True` the live caches are never written before the commit.

test_twins.py and test_interrupts.py cover it too; here are whole models, refused
writes, and caches that cannot be copied.
"""

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches import Speculation, leaves, states
from mlx_speculation.caches.journals.batch_kv import LOOSE
from mlx_speculation.caches.journals.checked_writes import check_writes
from mlx_speculation.caches.journals.isolated import twin_of
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import Held, assert_same, detached, read
from support.models.tiny_models import TINY_MODELS, build

PROMPT = mx.array([[(37 * i * i + 11 * i) % 256 for i in range(20)]])
BLOCK = mx.array([[200, 100, 50, 25]])
HALF, SINGLE = mx.bfloat16, mx.float32


def prefilled(name: str, dtype: mx.Dtype = SINGLE) -> tuple[nn.Module, list[Any]]:
    """Build a tiny model whose caches hold a prompt longer than its windows."""
    model = build(name)
    model.set_dtype(dtype)
    caches = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    mx.eval(states(caches))
    return model, caches


def cache_contents(caches: list[Any]) -> Any:
    """Return the content of the caches as numpy arrays and numbers."""
    offsets = [vars(leaf).get("offset") for _, leaf in leaves(caches)]
    return read([states(caches), offsets])


HALVES = ("llama", "gemma4_text", "qwen3_5", "mamba2", "nemotron_h", "rwkv7", "lfm2")
# The first run of each model in half precision compiles a dozen kernels.
QUICK_HALVES = ("llama", "qwen3_5", "lfm2")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, SINGLE) for name in TINY_MODELS),
        *(
            pytest.param(
                name, HALF, marks=() if name in QUICK_HALVES else pytest.mark.slow
            )
            for name in HALVES
        ),
    ],
    ids=str,
)
def test_a_model_sees_the_native_caches_and_writes_nothing_live(
    name: str, dtype: mx.Dtype
) -> None:
    model, caches = prefilled(name, dtype)
    native = detached(caches)
    before = Held(caches, values=True)
    owner = ModelHooks(model)
    with Speculation(caches, isolated=True) as speculation:
        for width in (4, 1, 3):
            shown = model(BLOCK[:, :width], cache=speculation.caches)
            expected = model(BLOCK[:, :width], cache=native)
            mx.eval(states(speculation.caches))
            before.assert_unchanged(f"the live caches after {width} rows")
            assert_same(read([shown]), read([expected]), f"the logits of {width} rows")
        speculation.prepare(8)
        before.assert_unchanged("the live caches after a prepare")
        speculation.commit(8)
    owner.remove()
    assert_same(cache_contents(caches), cache_contents(native), "all of a round")


def test_a_part_of_an_unrecorded_mixer_is_run_again_on_the_live_caches() -> None:
    model, caches = prefilled("qwen3_5")
    native = detached(caches)
    model(BLOCK[:, :2], cache=native)
    before = Held(caches, values=True)

    def rerun(keep: int) -> None:
        before.assert_unchanged("the live caches before the second run")
        model(BLOCK[:, :keep], cache=caches)

    with Speculation(caches, rerun=rerun, isolated=True) as speculation:
        model(BLOCK, cache=speculation.caches)
        speculation.commit(2)
    assert speculation.reran
    assert_same(cache_contents(caches), cache_contents(native), "a part, run again")


def test_a_batch_stays_narrow_over_many_ragged_rounds() -> None:
    """The count of loose padding is kept by an object, and passed on to its copy."""
    cache: Any = BatchKVCache([0, 0])
    cache.update_and_fetch(mx.ones((2, 1, 1, 2)), mx.ones((2, 1, 1, 2)))
    for index in range(90):
        with Speculation([cache], isolated=True) as speculation:
            speculation.caches[0].update_and_fetch(*[mx.ones((2, 1, 4, 2))] * 2)
            speculation.commit([4, 1] if index % 2 else [1, 4])
    assert cache.offset.tolist() == [226, 226]
    assert cache._idx <= 226 + LOOSE + 4


class Tag:
    """A user's attribute on a cache."""


@pytest.mark.parametrize("value", [Tag(), {"a": [Tag()]}, {1, 2}, bytearray(2)])
def test_what_cannot_be_copied_is_refused_before_anything_is_touched(
    value: object,
) -> None:
    caches: Any = [KVCache(), RotatingKVCache(max_size=4)]
    caches[1].tag = value
    before = Held(caches, values=False)
    with pytest.raises(UnsupportedCacheError, match=r"RotatingKVCache\.tag holds a"):
        Speculation(caches, isolated=True)
    before.assert_unchanged("the caches after a refusal")
    Speculation(caches)


def test_a_twin_holds_arrays_lists_and_tuples_of_its_own() -> None:
    cache: Any = QuantizedKVCache(group_size=32, bits=8)
    keys = mx.random.normal((1, 2, 3, 32), key=mx.random.key(1))
    cache.update_and_fetch(keys, keys)
    cache.notes = {"scale": 0.5, "arrays": [mx.zeros(2)], "name": "one"}
    before = read(detached([cache.keys, cache.values, cache.notes["arrays"]]))
    twin = twin_of(cache)
    assert vars(twin).keys() == vars(cache).keys()
    twin.update_and_fetch(keys, keys)
    twin.notes["arrays"][0] += 1
    twin.notes["arrays"].append(None)
    twin.notes["name"] = "other"
    mx.eval(twin.keys, twin.values)
    after = read([cache.keys, cache.values, cache.notes["arrays"]])
    assert_same(after, before, "the cache beside its twin")
    assert (cache.offset, twin.offset, cache.notes["name"]) == (3, 6, "one")


# Writes have to fit the rows that a cache holds.

WRONG = {
    "rank": ((2, 2, 8), SINGLE),
    "batch": ((1, 2, 3, 8), SINGLE),
    "heads": ((2, 1, 3, 8), SINGLE),
    "width": ((2, 2, 3, 1), SINGLE),
    "dtype": ((2, 2, 3, 8), HALF),
}


def kv_caches() -> list[Any]:
    """Return caches of two sequences and two heads that hold rows 8 and 6 wide."""
    caches: list[Any] = [
        KVCache(),
        RotatingKVCache(max_size=4),
        RotatingKVCache(max_size=4, keep=1),
        ChunkedKVCache(8),
        BatchKVCache([0, 2]),
    ]
    for cache in caches:
        cache.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 6)))
    return caches


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_write_that_does_not_fit_is_refused_with_both_shapes(
    wrong: str, part: str
) -> None:
    shape, dtype = WRONG[wrong]
    width = 6 if part == "values" and wrong != "width" else shape[-1]
    new = mx.ones((*shape[:-1], width), dtype)
    right = {"keys": mx.ones((2, 2, 3, 8)), "values": mx.ones((2, 2, 3, 6))}
    for native in kv_caches():
        name, cache = type(native).__name__, twin_of(native)
        check_writes(cache, name)
        before = Held([cache], values=True)
        with pytest.raises(InvalidRequestError) as refusal:
            cache.update_and_fetch(**(right | {part: new}))
        text = str(refusal.value)
        assert f"{new.shape}, {str(dtype)[9:]}, was written to the {part}" in text
        assert f"of a {name}, {getattr(native, part).shape}, float32" in text
        before.assert_unchanged("a refused write")
        shown, expected = (c.update_and_fetch(**right) for c in (cache, native))
        assert_same(read(list(shown)), read(list(expected)), "a write that fits")


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(4)])
def test_a_wrong_write_is_refused_inside_a_round_and_leaves_all_as_it_was(
    make: Any,
) -> None:
    caches: list[Any] = [make(), CacheList(make(), make())]
    for _, leaf in leaves(caches):
        leaf.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 8)))
    before = Held(caches, values=True)
    rows = mx.ones((1, 2, 1, 8))

    def forward(shown: list[Any]) -> None:
        shown[0].update_and_fetch(rows, rows)
        shown[1][1].update_and_fetch(rows[:, :1], rows[:, :1])

    speculation = Speculation(caches, isolated=True)
    with pytest.raises(InvalidRequestError), speculation:
        forward(speculation.caches)
    before.assert_unchanged("a round with a refused write")


@pytest.mark.parametrize(
    ("keys", "values", "both"),
    [
        ((1, 2, 3, 8), (1, 1, 3, 8), True),
        ((2, 2, 3, 8), (1, 2, 3, 8), True),
        ((1, 2, 3, 8), (1, 2, 1, 8), True),
        ((1, 2, 8), (1, 2, 8), False),
    ],
)
def test_keys_and_values_have_to_fit_one_another_in_an_empty_cache(
    keys: tuple[int, ...], values: tuple[int, ...], both: bool
) -> None:
    empty: list[Any] = [KVCache(), RotatingKVCache(4), QuantizedKVCache()]
    for cache in empty:
        check_writes(cache, "KVCache")
        with pytest.raises(InvalidRequestError) as refusal:
            cache.update_and_fetch(mx.ones(keys), mx.ones(values))
        assert str(keys) in str(refusal.value)
        assert not both or str(values) in str(refusal.value)
        assert cache.empty()


def test_keys_may_have_another_dtype_and_width_than_values() -> None:
    cache: Any = KVCache()
    check_writes(cache, "KVCache")
    for _ in range(2):
        cache.update_and_fetch(mx.ones((1, 1, 3, 8)), mx.ones((1, 1, 3, 0), HALF))
    assert cache.offset == 6


def empty_layers() -> dict[str, tuple[list[Any], mx.array]]:
    """Return two empty layers of each kind, and the rows that a model writes."""
    rows = mx.ones((1, 2, 3, 32))
    pairs: dict[str, tuple[list[Any], mx.array]] = {
        "kv": ([KVCache(), KVCache()], rows),
        "list": ([CacheList(KVCache()), KVCache()], rows),
        "ring": ([RotatingKVCache(4), RotatingKVCache(8)], rows),
        "chunked": ([ChunkedKVCache(8), ChunkedKVCache(8)], rows),
        "quantized": ([QuantizedKVCache(32), QuantizedKVCache(32)], rows),
        "batch": ([BatchKVCache([0]), BatchKVCache([0])], rows),
        "arrays": ([ArraysCache(2), ArraysCache(2)], rows),
        "layer": ([LayerCache(4), LayerCache(4)], mx.ones((1, 3, 8))),
    }
    return pairs


def written(cache: Any, rows: mx.array) -> None:
    """Write to a cache of any kind, as a model does."""
    if isinstance(cache, CacheList):
        written(cache[0], rows)
    elif isinstance(cache, LayerCache):
        cache.update_window(rows)
    else:
        write(cache, rows)


@pytest.mark.parametrize("beforehand", [False, True])
@pytest.mark.parametrize("wrong", ["dtype", "batch"])
@pytest.mark.parametrize("name", empty_layers())
def test_a_first_write_has_the_dtype_and_batch_of_the_other_layers(
    name: str, wrong: str, beforehand: bool
) -> None:
    """Layers that held rows before the round count, and layers written in it."""
    caches, rows = empty_layers()[name]
    other = rows.astype(HALF) if wrong == "dtype" else mx.concatenate([rows, rows])
    if beforehand:
        written(caches[0], rows)
    before = Held(caches, values=True)

    def forward(shown: list[Any]) -> None:
        if not beforehand:
            written(shown[0], rows)
        written(shown[1], other)

    speculation = Speculation(caches, whole=True, isolated=True)
    with pytest.raises(InvalidRequestError) as refusal, speculation:
        forward(speculation.caches)
    before.assert_unchanged("a refused first write")
    named = str(refusal.value)
    assert f"{other.shape}" in named
    assert wrong == "batch" or ("float16" in named and "float32" in named)
    with Speculation(caches, whole=True, isolated=True) as speculation:
        for cache in speculation.caches:
            written(cache, rows)
        speculation.commit(3)


def test_layers_of_two_kinds_may_have_two_dtypes() -> None:
    caches: list[Any] = [KVCache(), RotatingKVCache(4), ArraysCache(1), ArraysCache(2)]
    rows = mx.ones((1, 2, 3, 8))
    kinds = (rows, rows.astype(HALF), rows, rows.astype(HALF))
    with Speculation(caches, whole=True, isolated=True) as speculation:
        for cache, each in zip(speculation.caches, kinds, strict=True):
            written(cache, each)


def test_a_round_leaves_nothing_in_memory_that_compared_its_layers() -> None:
    speculation = Speculation([KVCache(), KVCache()], isolated=True)
    shown = [weakref.ref(cache) for cache in speculation.caches]
    del speculation
    assert [one() for one in shown] == [None, None]


def test_quantized_rows_are_compared_with_what_was_quantized() -> None:
    cache: Any = QuantizedKVCache(group_size=32, bits=4)
    check_writes(cache, "QuantizedKVCache")
    rows = mx.ones((1, 2, 3, 32), HALF)
    cache.update_and_fetch(rows, rows)
    cache.update_and_fetch(rows, rows)
    for wrong in (rows[:, :1], rows.astype(SINGLE), mx.concatenate([rows, rows])):
        with pytest.raises(InvalidRequestError, match=r"keys of a QuantizedKVCache"):
            cache.update_and_fetch(wrong, wrong)
    assert cache.offset == 6


@pytest.mark.parametrize(
    "cache", [BatchKVCache([0, 2, 1]), ArraysCache(2, left_padding=[0, 2, 1])]
)
def test_the_first_write_has_the_batch_of_the_padding(cache: Any) -> None:
    check_writes(cache, "Batch")
    with pytest.raises(InvalidRequestError, match=r"\(2, 1, 4, 8\).*\(3,\)"):
        write(cache, mx.ones((2, 1, 4, 8)))
    assert cache.empty()
    write(cache, mx.ones((3, 1, 4, 8)))
    assert not cache.empty()


def write(cache: Any, rows: mx.array) -> None:
    if isinstance(cache, ArraysCache):
        cache[0] = rows
    else:
        cache.update_and_fetch(rows, rows)


def test_a_state_has_to_fit_its_slot() -> None:
    cache: Any = ArraysCache(3)
    check_writes(cache, "ArraysCache")
    cache[0], cache[1] = mx.ones((2, 3, 8), HALF), mx.ones((2, 4, 8, 8))
    cache[2] = mx.zeros((2, 5), mx.int32)
    for slot, shape, dtype in [
        (0, (1, 3, 8), HALF),
        (0, (2, 3, 8), SINGLE),
        (0, (2, 24), HALF),
        (1, (2, 2, 8, 8), SINGLE),
    ]:
        with pytest.raises(InvalidRequestError, match=f"slot {slot} of a ArraysCache"):
            cache[slot] = mx.zeros(shape, dtype)
    assert [slot.shape for slot in cache.cache] == [(2, 3, 8), (2, 4, 8, 8), (2, 5)]
    cache[0] = mx.zeros((2, 2, 8), HALF)
    cache[2] = mx.zeros((2, 6), mx.uint32)  # token ids, as from argmax
    cache[1] = None


def test_a_layer_cache_checks_its_window_and_its_fields() -> None:
    cache: Any = LayerCache(4)
    check_writes(cache, "LayerCache")
    with pytest.raises(InvalidRequestError, match="take rank 3"):
        cache.update_window(mx.ones((1, 1, 3, 8)))
    cache.update_window(mx.ones((1, 3, 8)))
    cache.pending_kv = mx.ones((1, 2, 8))
    for wrong in (mx.ones((2, 3, 8)), mx.ones((1, 3, 8), HALF), mx.ones((1, 3, 1))):
        with pytest.raises(InvalidRequestError, match="window of a LayerCache"):
            cache.update_window(wrong)
    with pytest.raises(InvalidRequestError, match="pending_kv of a LayerCache"):
        cache.pending_kv = mx.ones((2, 2, 8))
    assert (cache.offset, cache.pending_kv.shape) == (3, (1, 2, 8))
    cache.pending_kv = None
