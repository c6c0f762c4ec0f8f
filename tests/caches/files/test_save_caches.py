"""Caches of every kind and in every state are the same after saving and loading."""

import linecache
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
)

from mlx_speculation.caches import load_caches, save_caches
from mlx_speculation.caches.files import safetensors_writer
from mlx_speculation.errors import (
    CacheFileError,
    InvalidRequestError,
    UnsupportedCacheError,
)
from support.caches.saved_caches import (
    Case,
    batch_cases,
    content,
    drawn_case,
    filled,
    single_cases,
)
from support.processes.interrupts import raised_at

WIDTHS = st.lists(st.integers(1, 6) | st.just(1), max_size=6)
KINDS = [case.name for case in single_cases(np.random.default_rng(0))]


def continued(case: Case, cache: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    widths = [int(width) for width in rng.integers(1, 4, size=4)]
    return [case.write(cache, width, rng) for width in (1, *widths)]


def path_in(folder: Path) -> Path:
    return folder / "caches.safetensors"


def tokens_of(widths: list[int]) -> list[int]:
    return list(range(100, 100 + sum(widths)))


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), widths=WIDTHS, draft=st.booleans())
def test_caches_of_any_kinds_continue_as_the_saved_ones(
    folder: Path, seed: int, widths: list[int], draft: bool
) -> None:
    rng = np.random.default_rng(seed)
    cases = [drawn_case(rng) for _ in range(rng.integers(1, 5))]
    split = len(cases) // 2 if draft else 0
    caches = [filled(case, widths, rng) for case in cases]
    tokens = tokens_of(widths)
    save_caches(
        path_in(folder),
        caches[split:],
        tokens,
        draft_caches=caches[:split] or None,
        metadata={"model": "a \N{SNOWMAN}"},
    )
    saved = load_caches(path_in(folder))
    assert saved.tokens == tuple(tokens)
    assert saved.metadata == {"model": "a \N{SNOWMAN}"}
    assert saved.draft_seen == ((len(tokens),) if split else None)
    assert saved.layout == "mlx-lm 0.32"
    loaded_caches = [*(saved.draft_caches or []), *saved.caches]
    assert [type(cache) for cache in loaded_caches] == [type(cache) for cache in caches]
    for case, cache, loaded in zip(cases, caches, loaded_caches, strict=True):
        assert continued(case, loaded, seed) == continued(case, cache, seed)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=WIDTHS.filter(bool),
    padding=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    rolled=st.booleans(),
)
def test_batches_continue_as_the_saved_ones(
    folder: Path, seed: int, widths: list[int], padding: list[int], rolled: bool
) -> None:
    rng = np.random.default_rng(seed)
    total = sum(widths)
    padding = [min(pad, total) for pad in padding]
    right = [int(rng.integers(total - pad + 1)) * rolled for pad in padding]
    cases = batch_cases(rng, padding)
    caches = [filled(case, widths, rng) for case in cases]
    caches[0].prepare(right_padding=right)
    caches[1]._lengths = caches[1].offset - mx.array(right)
    for cache in caches:
        cache.finalize()
    tokens = [list(range(total - p - r)) for p, r in zip(padding, right, strict=True)]
    save_caches(path_in(folder), caches, tokens)
    saved = load_caches(path_in(folder), like=[case.make() for case in cases])
    assert saved.rows == tuple(map(tuple, tokens))
    for case, cache, loaded in zip(cases, caches, saved.caches, strict=True):
        assert continued(case, loaded, seed) == continued(case, cache, seed)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), widths=WIDTHS, data=st.data())
def test_a_trimmed_cache_continues_as_the_saved_one(
    folder: Path, seed: int, widths: list[int], data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    cases = [c for c in single_cases(rng) if c.name != "ConcatenateKVCache"]
    case = data.draw(st.sampled_from(cases))
    cache = filled(case, widths, rng)
    cut = data.draw(st.integers(0, sum(widths)))
    cut = cache.trim(cut) if cache.is_trimmable() else 0
    tokens = tokens_of(widths)
    save_caches(path_in(folder), [cache], tokens[: len(tokens) - cut])
    (loaded,) = load_caches(path_in(folder)).caches
    assert continued(case, loaded, seed) == continued(case, cache, seed)


def kv(rows: int, dtype: mx.Dtype = mx.float32) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, rows, 4), dtype), mx.ones((1, 2, rows, 3)))
    return cache


def test_the_largest_token_id_is_saved(tmp_path: Path) -> None:
    save_caches(tmp_path / "large", [kv(1)], [2**31 - 1])
    assert load_caches(tmp_path / "large").tokens == (2**31 - 1,)


def test_only_rows_up_to_the_offset_are_saved(tmp_path: Path) -> None:
    save_caches(tmp_path / "short", [kv(5)], range(5))
    (loaded,) = load_caches(tmp_path / "short").caches
    assert loaded.keys.shape == (1, 2, 5, 4)
    assert content([kv(5)]) != content([loaded])  # mlx-lm allocates 256 rows


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), widths=WIDTHS.filter(bool))
def test_mlx_lm_loads_the_file_and_continues_as_the_saved_caches(
    folder: Path, seed: int, widths: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    # mlx-lm does not load `LayerCache`, or `_lengths` of batch rings.
    lost = ("LayerCache", "BatchRotatingKVCache")
    cases = [case for case in single_cases(rng) if case.name not in lost]
    caches = [filled(case, widths, rng) for case in cases]
    draft = [filled(cases[0], widths, rng)]
    save_caches(path_in(folder), caches, tokens_of(widths), draft_caches=draft)
    loaded_caches, texts = load_prompt_cache(str(path_in(folder)), return_metadata=True)
    assert texts["mlx_speculation"]["version"] == "1"
    assert (
        len(loaded_caches) == len(cases) + 1
    )  # the drafter's caches come last, as in mlx-lm's files
    for case, cache, loaded in zip(cases, caches, loaded_caches, strict=False):
        assert continued(case, loaded, seed) == continued(case, cache, seed)


def test_a_user_may_not_take_the_keys_of_the_extension(tmp_path: Path) -> None:
    for key in ("mlx_speculation", "mlx_speculation.digest"):
        with pytest.raises(InvalidRequestError, match="are reserved"):
            save_caches(path_in(tmp_path), [kv(1)], [1], metadata={key: "a"})
    metadata = {"mlx_speculations": "a", "b.c": "", "": "d"}
    save_caches(path_in(tmp_path), [kv(1)], [1], metadata=metadata)
    assert load_caches(path_in(tmp_path)).metadata == metadata


def test_a_drafter_may_hold_fewer_tokens(tmp_path: Path) -> None:
    save_caches(tmp_path / "one", [kv(5)], range(5), draft_caches=[kv(3)])
    assert load_caches(tmp_path / "one").draft_seen == (3,)
    state = ArraysCache(1)
    state[0] = mx.ones((1, 2))
    save_caches(tmp_path / "two", [kv(5)], range(5), draft_caches=[state], draft_seen=4)
    assert load_caches(tmp_path / "two").draft_seen == (4,)


def _of_a_subclass() -> Any:
    cls: Any = type("MyCache", (KVCache,), {})
    return cls()


def _trimmed_concatenation() -> Any:
    cache = ConcatenateKVCache()
    cache.update_and_fetch(mx.ones((1, 1, 5, 4)), mx.ones((1, 1, 5, 4)))
    cache.trim(2)
    return cache


def _in_prefill() -> Any:
    cache = BatchKVCache([0, 0])
    cache.update_and_fetch(mx.ones((2, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    cache.prepare(right_padding=[1, 0])
    return cache


def _in_ring_prefill() -> Any:
    cache = BatchRotatingKVCache(8, [0, 0])
    cache.prepare(right_padding=[1, 0], lengths=[2, 3])
    cache.update_and_fetch(mx.ones((2, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    return cache


def _wrongly_trimmed_ring() -> Any:
    cache = RotatingKVCache(4)
    for _ in range(7):
        cache.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
    cache.trim(3)
    return cache


@pytest.mark.parametrize(
    ("make", "tokens", "error", "says"),
    [
        (lambda: [], 0, InvalidRequestError, "no cache among the 0 items"),
        (lambda: [object()], 0, UnsupportedCacheError, "layer 0 is a object"),
        (lambda: [_of_a_subclass()], 0, UnsupportedCacheError, "is a MyCache"),
        (lambda: [kv(5)], 4, InvalidRequestError, "holds 5 tokens in row 0 of .* 4"),
        (
            lambda: [kv(5), kv(4)],
            5,
            InvalidRequestError,
            "holds 4 tokens in row 0 of the batch, but that row has 5",
        ),
        (lambda: [CacheList()], 0, InvalidRequestError, "no cache among the 1 items"),
        (lambda: [_trimmed_concatenation()], 3, InvalidRequestError, "do not fit"),
        (lambda: [_in_prefill()], 3, InvalidRequestError, r"call of finalize\(\)"),
        (lambda: [_in_ring_prefill()], 3, InvalidRequestError, r"call of finalize\(\)"),
        (lambda: [_wrongly_trimmed_ring()], 4, InvalidRequestError, "do not fit"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(
    make: Callable[[], list[Any]],
    tokens: int,
    error: type[Exception],
    says: str,
    tmp_path: Path,
) -> None:
    path = path_in(tmp_path)
    path.write_text("old")
    with pytest.raises(error, match=says):
        save_caches(path, make(), range(tokens))
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("tokens", [[-1], [2**31], [1.5], [True], ["a"], [None]])
def test_what_is_no_token_is_refused(tokens: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is not a token id"):
        save_caches(path_in(tmp_path), [kv(1)], tokens)


@pytest.mark.parametrize("seen", [6, -1, [5, 5]])
def test_a_drafter_ahead_of_the_tokens_is_refused(seen: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"draft_seen is .* one number per"):
        save_caches(
            path_in(tmp_path), [kv(5)], range(5), draft_caches=[kv(5)], draft_seen=seen
        )


def removes_the_temporary_file(frame: FrameType) -> bool:
    """Return whether a frame is at the line in `finally` that removes the file."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return "unlink(missing_ok" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "no space")])
def test_a_failure_at_any_step_of_writing_leaves_the_old_file_or_the_new_one(
    error: BaseException, tmp_path: Path
) -> None:
    path, seen = path_in(tmp_path), set()
    save_caches(path, [kv(2)], range(2))
    old = path.read_bytes()
    line = 1
    while caught := raised_at(
        line,
        error,
        (safetensors_writer.__file__,),
        lambda: save_caches(path, [kv(5)], range(5)),
        removes_the_temporary_file,
    ):
        assert isinstance(caught, (type(error), CacheFileError))
        assert [*tmp_path.iterdir()] == [path]
        replaced = path.read_bytes() != old
        seen.add(replaced)
        assert load_caches(path).tokens == tuple(range(5 if replaced else 2))
        save_caches(path, [kv(2)], range(2))
        line += 1
    assert line > 30
    assert seen == {False, True}  # True: the error came after the rename


def test_a_failing_disk_is_one_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder", tmp_path / "a\0b"):
        with pytest.raises(CacheFileError, match="cannot be written"):
            save_caches(path, [kv(1)], [1])
    assert not [*tmp_path.iterdir()]


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    save_caches(tmp_path / "link", [kv(1)], [1])
    assert (tmp_path / "precious").read_text() == "precious"
    assert load_caches(tmp_path / "link").tokens == (1,)


def test_permissions_of_an_old_file_stay(tmp_path: Path) -> None:
    path = path_in(tmp_path)
    path.touch()
    path.chmod(0o640)
    save_caches(path, [kv(1)], [1])
    assert path.stat().st_mode & 0o777 == 0o640
