"""mlx-lm's caches replace mlx-vlm's, with equal results."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlx_speculation.errors import UnsupportedCacheError
from mlx_speculation.models.source_digests import source_digest
from mlx_speculation.models.vision.families import CACHES
from mlx_speculation.models.vision.native_caches import HOME, native_caches
from support.models.tiny_vision import WITHOUT_MLX_VLM, grid, tiny

pytestmark = WITHOUT_MLX_VLM


def theirs() -> Any:
    return import_module("mlx_vlm.models.cache")


@pytest.mark.parametrize("name", CACHES)
def test_the_class_is_the_one_that_was_compared(name: str) -> None:
    assert theirs() is not None
    assert source_digest(HOME, name) == CACHES[name]


@pytest.mark.parametrize("name", grid())
def test_logits_are_equal_on_either_class(name: str) -> None:
    model = tiny(name)
    vlm_caches = theirs().make_prompt_cache(model.language_model)
    native = model.make_cache()
    assert [type(c).__name__ for c in vlm_caches] == [type(c).__name__ for c in native]
    kinds = {ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache}
    assert {type(c) for c in native} <= kinds
    ids = mx.array([[(7 * i) % 200 for i in range(20)]])
    for start, stop in ((0, 12), (12, 16), (16, 17), (17, 18)):
        one = model(ids[:, start:stop], vlm_caches)
        other = model(ids[:, start:stop], native)
        assert mx.array_equal(one, other).item()
    for one, other in zip(vlm_caches, native, strict=True):
        if isinstance(other, RotatingKVCache):
            assert (one.max_size, one.keep) == (other.max_size, other.keep)


class Making:
    """A language model whose `make_cache` returns the given caches."""

    def __init__(self, *caches: Any) -> None:
        self._caches = caches

    def make_cache(self) -> list[Any]:
        return list(self._caches)


@pytest.mark.parametrize(
    "name", ["QuantizedKVCache", "ConcatenateKVCache", "CacheList", "PoolingCache"]
)
def test_another_class_is_refused(name: str) -> None:
    kind = getattr(theirs(), name)
    cache = kind.__new__(kind)
    with pytest.raises(UnsupportedCacheError, match=f"layer 1 is a .*{name}"):
        native_caches(Making(theirs().KVCache(), cache))


def test_a_subclass_is_refused() -> None:
    subclass = type("KVCache", (theirs().KVCache,), {})
    with pytest.raises(UnsupportedCacheError, match="KVCache"):
        native_caches(Making(subclass()))


def test_a_class_whose_source_has_changed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CACHES, "KVCache", "0" * 64)
    with pytest.raises(UnsupportedCacheError, match="not that of mlx-vlm"):
        native_caches(Making(theirs().KVCache()))
