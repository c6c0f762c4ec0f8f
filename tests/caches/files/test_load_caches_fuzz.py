"""A damaged file is refused with a CacheFileError, or loads as valid caches.

Files of every kind and layout are changed at random. A cache that still loads is
written to. The test knows how many rows each write must return, and how wide a mask
must be. The cache must be the same after it is saved and loaded again.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native
from mlx_lm.models.cache import save_prompt_cache
from mlx_lm.models.deepseek_v41 import Compressor, LayerCache

from mlx_speculation.caches import (
    LoadedCaches,
    leaves,
    load_caches,
    save_caches,
)
from mlx_speculation.errors import CacheFileError
from support.caches.file_mutations import files_of_031, mutated
from support.caches.mlx_lm_031 import files
from support.caches.saved_caches import (
    Case,
    Random,
    batch_cases,
    content,
    filled,
    members,
    single_cases,
)

WIDTHS: tuple[list[int], ...] = ([], [3], [5, 1], [2, 1, 1, 1, 1, 1, 1, 1, 1, 1], [12])


Live = tuple[list[Any], list[Any] | None]  # caches of target, drafter


@dataclass(frozen=True, slots=True)
class Base:
    """A valid file, and a function that makes `like` and `draft_like` for it."""

    raw: bytes
    live: Callable[[], Live]


def bases(folder: Path) -> Iterator[Base]:
    """Yield files of every layout and kind, in several states."""
    path = folder / "base.safetensors"
    for i, widths in enumerate(WIDTHS):
        yield from _single(path, i, widths)
        yield from _batch(path, i, widths)
    for old in files_of_031():
        yield Base(old.read_bytes(), partial(_live_031, old.stem.rsplit("_", 1)[1]))


def _live_031(name: str) -> Live:
    return files(native)[name], None


def _single(path: Path, seed: int, widths: list[int]) -> Iterator[Base]:
    cases = single_cases(np.random.default_rng(seed))
    cases += [members(cases[0], members(cases[5], cases[2]))]

    def live() -> tuple[list[Any], list[Any]]:
        rng = np.random.default_rng(seed + 100)
        made = [filled(case, [2, 1], rng) for case in cases]
        return made, [filled(cases[0], [1], rng)]

    rng = np.random.default_rng(seed)
    caches = [filled(case, widths, rng) for case in cases]
    draft = [filled(cases[0], widths, rng)]
    save_caches(
        path, caches, range(sum(widths)), draft_caches=draft, metadata={"a": ""}
    )
    yield Base(path.read_bytes(), live)
    for case, cache in zip(cases, caches, strict=True):
        save_caches(path, [cache], range(sum(widths)))
        yield Base(path.read_bytes(), partial(_empty, case))
        save_prompt_cache(str(path), [cache])
        yield Base(path.read_bytes(), partial(_empty, case))


def _empty(case: Case) -> Live:
    return [case.make()], None


def _batch(path: Path, seed: int, widths: list[int]) -> Iterator[Base]:
    padding = [0, 2, 1]
    cases = batch_cases(np.random.default_rng(seed), padding)

    def made(widths: list[int]) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [filled(case, widths, rng) for case in cases]

    counts = [max(sum(widths) - pad, 0) for pad in padding]
    if widths:
        save_caches(path, made(widths), [list(range(count)) for count in counts])
        yield Base(path.read_bytes(), lambda: (made([2, 1]), None))
    save_prompt_cache(str(path), made(widths), {"a": "b"})
    yield Base(path.read_bytes(), lambda: (made([2, 1]), None))


def attended(cache: Any, shape: tuple[int, ...], values: int, width: int) -> int:
    """Write rows of zeros and attend; return how many rows the cache has returned."""
    batch, heads, dim = shape
    mask = None
    if hasattr(cache, "make_mask"):
        mask = cache.make_mask(width, return_array=True, window_size=None)
    shown = cache.update_and_fetch(
        mx.zeros((batch, heads, width, dim)), mx.zeros((batch, heads, width, values))
    )
    keys, rows = shown
    if isinstance(keys, tuple):
        keys, rows = (
            mx.dequantize(
                packed, scales, biases, group_size=cache.group_size, bits=cache.bits
            )
            for packed, scales, biases in (keys, rows)
        )
    scores = mx.zeros((batch, heads, width, dim)) @ mx.swapaxes(keys, -1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -1e9)
    out = mx.softmax(scores, axis=-1) @ rows
    assert out.shape == (batch, heads, width, values)
    mx.eval(out)
    return int(keys.shape[2])


def _dims(cache: Any) -> tuple[tuple[int, ...], int]:
    """Return batch, heads and dim of the keys, and the dim of the values."""
    if cache.keys is None:
        batch = cache.left_padding.size if hasattr(cache, "left_padding") else 1
        return (batch, 2, 32), 32
    if isinstance(cache.keys, mx.array):
        batch, heads, _, dim = cache.keys.shape
        return (batch, heads, dim), int(cache.values.shape[3])
    (batch, heads, _, dim), group = cache.keys[1].shape, cache.group_size
    return (batch, heads, dim * group), int(cache.values[1].shape[3]) * group


def use(cache: Any) -> None:
    """Write twice to a loaded cache that is no `CacheList`, and check the results."""
    if isinstance(cache, LayerCache):
        _use_layer(cache)
    elif isinstance(cache, native.ArraysCache):
        arrays = [*cache.cache, cache.lengths, cache.left_padding]
        assert {a.shape[0] for a in arrays if a is not None} <= {cache.batch_size}
        mask = cache.make_mask(3)
        assert mask is None or mask.shape == (cache.batch_size, 3)
    else:
        shape, values = _dims(cache)
        size = getattr(cache, "max_size", None)
        for width in (1, 3):
            before = _written(cache)
            if isinstance(cache, native.ChunkedKVCache):
                cache.maybe_trim_front()
            shown = attended(cache, shape, values, width)
            after = _written(cache)
            assert after == before + width
            if size is not None:
                # All rows of this write are returned, even if the ring has fewer slots.
                # Of the earlier rows, at most `size` - 1 are returned.
                assert shown == min(before, size - 1) + width
            else:
                assert shown == after - getattr(cache, "start_position", 0)


def _written(cache: Any) -> int:
    for name in ("_offset", "_idx", "offset"):
        if name != "_idx" or not hasattr(cache, "keep"):
            count = getattr(cache, name, None)
            if count is not None:
                return int(count)
    raise AssertionError(cache)


def _use_layer(cache: Any) -> None:
    window_rows = 0 if cache.window is None else cache.window.shape[1]
    batch, dim = (1, 4) if cache.window is None else cache.window.shape[::2]
    before, offset = min(cache.window_size, cache.offset), cache.offset
    assert window_rows == before
    shown = cache.update_window(mx.zeros((batch, 3, dim)))
    assert shown.shape == (batch, before + 3, dim)
    if cache.pending_kv is None:
        return
    pending, groups = cache.pending_kv.shape[1], cache.compress_kv
    ratio = pending + 1 if groups is None else (offset - pending) // groups.shape[1]
    args: Any = SimpleNamespace(
        compress_ratios=[ratio], hidden_size=dim, head_dim=dim, rms_norm_eps=1e-6
    )
    latent, _ = Compressor(args, 0)(mx.zeros((batch, 3, dim)), offset, cache)
    closed = (0 if groups is None else groups.shape[1]) + (
        0 if latent is None else latent.shape[1]
    )
    mx.eval(cache.pending_kv, cache.pending_gate)
    assert closed == (offset + 3) // ratio


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise if a file takes minutes; a load takes milliseconds."""

    def stop(*_: object) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def judged(path: Path, live: Live) -> tuple[str, str]:
    """Load a file with and without `like`; return both results."""
    like, draft_like = live
    before = content([*like, *(draft_like or ())])
    fitting, alone = "accepted", "accepted"
    saved: LoadedCaches | None = None
    try:
        saved = load_caches(path, like=like, draft_like=draft_like)
    except CacheFileError:
        fitting = "refused"
    assert content([*like, *(draft_like or ())]) == before
    try:
        saved = load_caches(path)
    except CacheFileError:
        alone = "refused"  # some files of mlx-lm need `like`
    if saved is not None:
        sound(saved, path.with_suffix(".again"))
        for _, leaf in leaves([*saved.caches, *(saved.draft_caches or ())]):
            use(leaf)
    return fitting, alone


def sound(saved: LoadedCaches, path: Path) -> None:
    """Save loaded caches and load them again; require that they are the same."""
    if saved.rows is None:
        return
    save_caches(
        path,
        saved.caches,
        saved.rows,
        draft_caches=saved.draft_caches,
        draft_seen=saved.draft_seen,
        metadata=saved.metadata,
    )
    again = load_caches(path)
    assert (again.rows, again.metadata) == (saved.rows, saved.metadata)
    assert content(again.caches) == content(saved.caches)


def fuzz(folder: Path, seed: int, count: int) -> Counter[str]:
    """Load `count` damaged files; return the numbers of accepted and refused ones."""
    originals = list(bases(folder))
    lives = [base.live() for base in originals]
    counts: Counter[str] = Counter()
    path = folder / "mutated.safetensors"
    for index in range(count):
        rng: Random = np.random.default_rng([seed, index])
        at = int(rng.integers(len(originals)))
        raw = mutated(
            originals[at].raw, originals[rng.integers(len(originals))].raw, rng
        )
        path.write_bytes(raw)
        try:
            with no_hang():
                fitting, alone = judged(path, lives[at])
        except BaseException as error:
            error.add_note(f"file {index} of seed {seed}, from base {at}")
            raise
        unchanged = "the same" if raw == originals[at].raw else "changed"
        counts[f"{fitting}, without like {alone}, {unchanged}"] += 1
    return counts


def test_bases_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    refused = 0
    for base in bases(tmp_path):
        path.write_bytes(base.raw)
        fitting, _ = judged(path, base.live())
        refused += fitting == "refused"
    assert refused == 1  # a chunked cache without its offset


def test_500_damaged_files_are_refused_or_sound(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    counts = fuzz(tmp_path, 1, 500)
    record_property("counts", dict(counts))
    assert sum(counts.values()) == 500
    assert sum(n for key, n in counts.items() if key.startswith("accepted")) > 20


@pytest.mark.slow
def test_20000_damaged_files_are_refused_or_sound(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    counts = fuzz(tmp_path, 2, 20_000)
    record_property("counts", dict(counts))
    assert sum(counts.values()) == 20_000
