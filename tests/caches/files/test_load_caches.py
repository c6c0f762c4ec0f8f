"""Files of mlx-lm load as mlx-lm loads them; bad files are refused as a whole."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as native
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    save_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches import SlidingKVCache, load_caches, save_caches
from mlx_speculation.caches.files import kinds, safetensors_writer
from mlx_speculation.caches.files.mlx_lm_format import native_parts
from mlx_speculation.errors import (
    CacheFileError,
    InvalidRequestError,
    UnsupportedCacheError,
)
from support.caches.mlx_lm_031 import files
from support.caches.saved_caches import (
    Case,
    attend,
    batch_cases,
    content,
    drawn_case,
    filled,
    plain,
)

DATA = Path(__file__).parent / "data"
WIDTHS = st.lists(st.integers(1, 6) | st.just(1), max_size=6)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "caches.safetensors"


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


def continued(case: Case, cache: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [case.write(cache, width, rng) for width in (1, 3, 1, 2)]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), widths=WIDTHS, batch=st.booleans())
def test_a_file_of_mlx_lm_continues_as_the_saved_caches(
    folder: Path, seed: int, widths: list[int], batch: bool
) -> None:
    rng = np.random.default_rng(seed)
    cases = (
        batch_cases(rng, [1, 0, 2])
        if batch
        else [drawn_case(rng) for _ in range(rng.integers(1, 4))]
    )
    caches = [filled(case, widths, rng) for case in cases]
    path = folder / "native.safetensors"
    save_prompt_cache(str(path), caches, {"model": "a.b"})
    saved = load_caches(path, like=[case.make() for case in cases])
    assert saved.layout == "mlx-lm 0.32"
    assert saved.metadata == {"model": "a.b"}
    assert saved.rows is None
    for case, cache, loaded in zip(cases, caches, saved.caches, strict=True):
        assert continued(case, loaded, seed) == continued(case, cache, seed)


def visible(cache: Any) -> list[Any]:
    if isinstance(cache, native.CacheList):
        return [visible(member) for member in cache.caches]
    if isinstance(cache, ArraysCache):
        return [plain(cache.cache)]
    names = ("keep", "max_size", "_idx", "_offset", "rotated", "chunk_size", "bits")
    values = [getattr(cache, name, None) for name in names]
    return [
        type(cache).__name__,
        *plain([values, cache.offset, cache.keys_and_values()]),
    ]


@pytest.mark.parametrize("name", ["single", "batch", "list"])
def test_a_file_of_mlx_lm_031_holds_what_that_version_saved(name: str) -> None:
    saved = load_caches(DATA / f"mlx_lm_0.31.3_{name}.safetensors")
    expected = files(native)[name]
    assert saved.layout == "mlx-lm 0.31"
    assert saved.metadata == {"text": "old.er"}
    assert [*map(visible, saved.caches)] == [*map(visible, expected)]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("0.31.3_chunked", "has dropped 256 positions, and its offset is not in"),
        ("0.26.4_single", "has 5 numbers and not 4, so mlx-lm before 0.31 wrote"),
        ("0.28.4_single", "is a MambaCache, so mlx-lm before 0.31 wrote the file"),
        ("0.28.4_list", "does not name its members, so mlx-lm before 0.31 wrote"),
    ],
)
def test_a_file_that_does_not_tell_enough_or_is_older_is_refused(
    file: str, says: str
) -> None:
    with pytest.raises(CacheFileError, match=says):
        load_caches(DATA / f"mlx_lm_{file}.safetensors")


def kv(rows: int = 3, dtype: mx.Dtype = mx.float32, heads: int = 2) -> KVCache:
    cache = KVCache()
    shape = (1, heads, rows, 4)
    cache.update_and_fetch(mx.ones(shape, dtype), mx.ones(shape, dtype))
    return cache


def ring(size: int = 4, keep: int = 0, rows: int = 3) -> RotatingKVCache:
    cache = RotatingKVCache(size, keep)
    for _ in range(rows):
        cache.update_and_fetch(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 4)))
    return cache


def state(slots: int = 2, shape: tuple[int, ...] = (1, 3, 2)) -> ArraysCache:
    cache = ArraysCache(slots)
    cache[0] = mx.ones(shape)
    return cache


def test_a_list_of_mlx_lm_is_cut_into_target_and_drafter(path: Path) -> None:
    save_prompt_cache(str(path), [kv(5), ring(), kv(3)])
    like = [KVCache(), RotatingKVCache(4)]
    saved = load_caches(path, like=like, draft_like=[KVCache()])
    assert saved.draft_caches is not None
    assert [c.offset for c in (*saved.caches, *saved.draft_caches)] == [5, 3, 3]


def test_a_window_that_is_not_full_is_sized_by_like(path: Path) -> None:
    layer = LayerCache(8)
    layer.update_window(mx.ones((1, 3, 4)))
    save_prompt_cache(str(path), [layer])
    with pytest.raises(CacheFileError, match="has no window_size in the file"):
        load_caches(path)
    (loaded,) = load_caches(path, like=[LayerCache(8)]).caches
    assert (loaded.offset, loaded.window_size) == (3, 8)


@settings(max_examples=25)
@given(widths=WIDTHS, size=st.integers(1, 6), slack=st.integers(1, 5))
def test_a_sliding_cache_is_saved_as_a_ring(
    folder: Path, widths: list[int], size: int, slack: int
) -> None:
    rng, path = np.random.default_rng(0), folder / "sliding.safetensors"

    def write(cache: Any, width: int, rng: Any) -> Any:
        return attend(cache, width, rng, mx.bfloat16)

    case = Case("SlidingKVCache", lambda: SlidingKVCache(size, slack), write)
    cache = filled(case, widths, rng)
    save_caches(path, [cache], range(sum(widths)))
    (ring,) = load_caches(path, like=[cache]).caches
    assert type(ring) is RotatingKVCache
    from_ring = SlidingKVCache.from_native(ring, slack)
    assert continued(case, from_ring, 1) == continued(case, cache, 1)


@pytest.mark.parametrize(
    ("saved", "live", "says"),
    [
        (kv, ring, "has a KVCache, and the live cache is a RotatingKVCache"),
        (
            kv,
            lambda: kv(dtype=mx.bfloat16),
            "float32 in the file and .* mlx.core.bfloat16 in the live cache",
        ),
        (kv, lambda: kv(heads=1), r"keys is \(1, 2, 3, 4\)"),
        (ring, lambda: ring(size=5), "max_size is 4 in the file and 5 in the live"),
        (ring, lambda: RotatingKVCache(4, keep=1), "keep is 0 in the file and 1 in"),
        (state, lambda: state(slots=3), "slots is 2 in the file and 3 in the live"),
        (state, lambda: state(shape=(1, 3, 3)), r"cache.0 is \(1, 3, 2\)"),
        (ring, lambda: SlidingKVCache(5), "max_size is 4 in the file and 5 in the"),
        (lambda: ring(keep=1), lambda: SlidingKVCache(4), "keep is 1 in the file"),
        (kv, lambda: native.CacheList(kv()), "one side has a CacheList"),
        (lambda: native.CacheList(kv()), kv, "one side has a CacheList"),
        (
            lambda: native.CacheList(kv()),
            lambda: native.CacheList(kv(), kv()),
            "it holds 1 caches in a list, but the live list has 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    saved: Callable[[], Any], live: Callable[[], Any], says: str, path: Path
) -> None:
    save_caches(path, [kv(), saved()], range(3))
    caches = [kv(7), live()]
    before = content(caches)
    with pytest.raises(CacheFileError, match=says):
        load_caches(path, like=caches)
    assert content(caches) == before


def test_counts_of_caches_have_to_agree(path: Path) -> None:
    save_caches(path, [kv()], range(3))
    with pytest.raises(CacheFileError, match=r"holds 1 caches in a list, but .* has 2"):
        load_caches(path, like=[kv(), kv()])
    with pytest.raises(CacheFileError, match="holds no caches of the drafter"):
        load_caches(path, like=[kv()], draft_like=[kv()])
    assert load_caches(path, like=[kv()]).draft_caches is None


def test_numbers_become_those_of_the_live_caches(path: Path) -> None:
    quantized: list[Any] = [QuantizedKVCache(32, 4) for _ in range(2)]
    for cache, dtype in zip(quantized, (mx.float32, mx.bfloat16), strict=True):
        cache.update_and_fetch(*[mx.ones((1, 1, 3, 32), dtype)] * 2)
    save_caches(path, [kv(3), kv(3), quantized[0]], range(3))
    like = [kv(1, mx.bfloat16), KVCache(), quantized[1]]
    loaded = load_caches(path, like=like, cast=True).caches
    dtypes = [cache.keys.dtype for cache in loaded[:2]]
    assert dtypes == [mx.bfloat16, mx.float32]
    kinds = [part.dtype for part in loaded[2].keys]
    assert kinds == [mx.uint32, mx.bfloat16, mx.bfloat16]


def test_caches_of_two_batch_sizes_are_refused(path: Path) -> None:
    other = KVCache()
    other.update_and_fetch(mx.ones((2, 1, 2, 4)), mx.ones((2, 1, 2, 4)))
    save_prompt_cache(str(path), [kv(), other])
    with pytest.raises(CacheFileError, match=r"different batch sizes: \[1, 2\]"):
        load_caches(path)


def test_live_caches_that_are_unknown_or_stand_twice_are_refused(path: Path) -> None:
    save_caches(path, [kv(), kv()], range(3))
    twice = kv()
    with pytest.raises(InvalidRequestError, match="is used for layers 0 and 1"):
        load_caches(path, like=[twice, twice])
    with pytest.raises(UnsupportedCacheError, match="is a object"):
        load_caches(path, like=[kv(), object()])
    with pytest.raises(InvalidRequestError, match="draft_like is given"):
        load_caches(path, draft_like=[kv()])


def test_a_batch_has_no_single_row_of_tokens(path: Path) -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, 1, 2, 4)), mx.ones((2, 1, 2, 4)))
    save_caches(path, [cache], [[1, 2], [3, 4]])
    saved = load_caches(path)
    assert saved.rows == ((1, 2), (3, 4))
    with pytest.raises(InvalidRequestError, match="2 rows of tokens"):
        _ = saved.tokens


# Files with one fault each. The fuzz test adds random faults.


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def assemble(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _bits_flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def _other_version(path: Path) -> None:
    header, data = parts(path)
    header["__metadata__"]["0.mlx_speculation.version"] = "2"
    assemble(path, json.dumps(header).encode(), data)


def _weights(path: Path) -> None:
    mx.save_safetensors(str(path), {"w": mx.ones(3)}, {"format": "mlx"})


def _tensor(entry: str) -> Callable[[Path], None]:
    header = '{"__metadata__": {"1.0": "KVCache", "2.0": ""}, "0.0": %s}'
    return lambda path: assemble(path, (header % entry).encode(), b"\0" * 8)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(path.parent / target)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "cannot be opened"),
    "dangling": (_linked("nowhere"), "cannot be opened"),
    "link to itself": (_linked("caches.safetensors"), "cannot be opened"),
    "link to a folder": (_linked("."), "not a regular file"),
    "device": (_linked("/dev/zero"), "regular file"),
    "pipe": (_fifo, "not a regular file"),
    "empty": (lambda p: p.write_bytes(b""), "it has 0 bytes"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "it has 7 bytes"),
    "text": (lambda p: p.write_text("once upon a time"), "its header should have"),
    "2**60": (lambda p: p.write_bytes((2**60).to_bytes(8, "little")), "should have"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes of data"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes of data"),
    "flipped": (_bits_flipped, "has changed since"),
    "version": (_other_version, "version '2', but this package reads only version '1'"),
    "weights": (_weights, "it holds no caches"),
    "deep": (lambda p: assemble(p, b"[" * 10**6), "nested too deep"),
    "number": (lambda p: assemble(p, b"3"), "is 3 and not a JSON object"),
    "long number": (lambda p: assemble(p, b"9" * 5000), "is not JSON"),
    "NaN": (lambda p: assemble(p, b'{"a": NaN}'), "holds NaN"),
    "twice": (lambda p: assemble(p, b'{"a": 1, "a": 2}'), "has the key 'a' twice"),
    "not UTF-8": (lambda p: assemble(p, b'{"\xff": 1}'), "is not JSON"),
    "huge header": (lambda p: assemble(p, b" " * (2**24 + 1)), "is the limit"),
    "metadata": (lambda p: assemble(p, b'{"__metadata__": {"a": 1}}'), "of strings"),
    "entry": (_tensor("3"), "the entry of '0.0' does not have exactly the keys"),
    "negative": (
        _tensor('{"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}'),
        "are not two whole numbers",
    ),
    "outside": (
        _tensor('{"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}'),
        "begins at byte 8",
    ),
    "float offsets": (
        _tensor('{"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}'),
        "are not two whole numbers",
    ),
    "too few bytes": (
        _tensor('{"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}'),
        "needs 12 bytes",
    ),
    "unknown dtype": (
        _tensor('{"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}'),
        "has dtype 'F4'",
    ),
    "huge and empty": (
        _tensor('{"dtype": "U8", "shape": [0, 65536, 65536], "data_offsets": [0, 0]}'),
        "is empty, and the product of its dimensions",
    ),
    "class": (
        lambda p: mx.save_safetensors(
            str(p), {"0.0": mx.ones(1)}, {"1.0": "os.system", "2.0": ""}
        ),
        "of the class 'os.system'; known are KVCache",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_clear_error(name: str, path: Path) -> None:
    change, says = DAMAGE[name]
    save_caches(path, [kv()], range(3))
    change(path)
    with pytest.raises(CacheFileError, match=says) as caught:
        load_caches(path)
    assert str(path) in str(caught.value)
    assert "Save it again" in str(caught.value)


SOUND: dict[str, Any] = {
    "rows": [[5, 6, 7]],
    "target_caches": 1,
    "draft_seen": [3],
    "window_sizes": {},
}


def _described(path: Path, description: str) -> None:
    """Write a file of two caches with this description and a valid digest."""
    metadata = {
        "mlx_speculation.version": "1",
        "mlx_speculation.description": description,
    }
    caches = kinds.copies([kv(), kv()])
    kinds.check(caches)
    safetensors_writer.write(path, *native_parts(caches, metadata))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": []}, "rows is not a list of one or more lists"),
        ({"rows": [5, 6, 7]}, "lists of token ids"),
        ({"rows": [[5, 6, True]]}, "lists of token ids"),
        ({"rows": [[5, 6, -1]]}, "lists of token ids"),
        ({"rows": [[5, 6, 2**31]]}, "token id 2147483648 is above 2147483647"),
        ({"rows": [[5, 6]], "draft_seen": [2]}, "of the target holds 3 tokens"),
        (
            {"rows": [[5, 6, 7]] * 2, "draft_seen": [3, 3]},
            "the target caches are for a batch",
        ),
        ({"target_caches": 0}, "target_caches is 0, which is not a whole number"),
        ({"target_caches": 1.0}, "target_caches is 1.0, which is not"),
        ({"target_caches": 2}, "has 2 caches, target_caches is 2 and draft_seen is"),
        ({"target_caches": 3}, "has 2 caches, target_caches is 3"),
        ({"draft_seen": None}, "has 2 caches, target_caches is 1"),
        ({"draft_seen": 3}, "draft_seen is 3, which is not a list of whole numbers"),
        ({"draft_seen": [4]}, r"draft_seen is \[4\], but has to be"),
        ({"draft_seen": [2]}, "of the drafter holds 3 tokens in row 0 of .* has 2"),
        ({"window_sizes": [3]}, "window_sizes is a list, which is not an object"),
        ({"window_sizes": {"0": "3"}}, "which is not an object of whole numbers"),
        ({"more": 1}, "its description does not have exactly the keys draft_seen, "),
    ],
)
def test_a_description_that_no_save_makes_is_refused(
    change: dict[str, Any], says: str, path: Path
) -> None:
    _described(path, json.dumps(SOUND))
    assert load_caches(path).draft_seen == (3,)
    _described(path, json.dumps(SOUND | change))
    with pytest.raises(CacheFileError, match=says):
        load_caches(path)


def test_a_digest_cannot_be_left_out(path: Path) -> None:
    save_caches(path, [kv()], range(3))
    header, data = parts(path)
    del header["__metadata__"]["0.mlx_speculation.digest"]
    assemble(path, json.dumps(header).encode(), data)
    with pytest.raises(CacheFileError, match="its metadata keys are"):
        load_caches(path)


def test_tensors_may_not_overlap(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = {"__metadata__": {"1.0": "KVCache", "2.0": ""}, "0.0": entry, "0.1": entry}
    assemble(path, json.dumps(header).encode(), bytes(8))
    with pytest.raises(CacheFileError, match="begins at byte 0 of the data"):
        load_caches(path)


@pytest.mark.slow
def test_very_many_small_parts_cost_no_more_than_their_bytes(path: Path) -> None:
    caches = [ArraysCache(64) for _ in range(400)]
    save_caches(path, caches, [[] for _ in range(4_000)])
    loaded = load_caches(path)
    assert (len(loaded.caches), len(loaded.rows or ())) == (400, 4_000)


def test_a_native_file_may_not_nest_without_end(path: Path) -> None:
    cache: Any = kv()
    for _ in range(9):
        cache = native.CacheList(cache)
    save_prompt_cache(str(path), [cache])
    with pytest.raises(CacheFileError, match="nested more than 8 deep"):
        load_caches(path)
