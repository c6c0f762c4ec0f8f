"""Batches in a speculation: refusals, operations without copies, width of caches."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlx_speculation.caches import Speculation, position
from mlx_speculation.caches.journal import Journal
from mlx_speculation.caches.journals.arrays import ArraysJournal
from mlx_speculation.caches.journals.batch_kv import BatchKVJournal
from mlx_speculation.caches.journals.batch_rotating_kv import BatchRotatingJournal
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from mlx_speculation.models import ModelHooks
from support.caches.batch_twins import AttentionKind, together
from support.caches.cache_twins import Mixers, Rows, assert_same, read
from support.covering import covering
from support.models.tiny_models import build

KV, RING = AttentionKind(), AttentionKind(window=6)


def write(cache: Any, starts: list[int], width: int, serial: int = 1) -> None:
    serials = tuple(range(serial, serial + width))
    cache.update_and_fetch(*together([Rows(at, serials) for at in starts]))


def merged(kind: AttentionKind, lengths: list[int]) -> Any:
    alone = [kind.single() for _ in lengths]
    for cache, length in zip(alone, lengths, strict=True):
        if length:
            write(cache, [0], length)
    return kind.merge(alone)


@pytest.mark.parametrize("kind", [KV, RING], ids=["kv", "ring"])
@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ([3, -1, 0], r"keep -1 positions of row 1, but 4 were"),
        ([3, 0, 5], r"5 positions of row 2, but 4 were written. Pass a number from 0"),
        ([9, 0, 5], r"commit\(\[9, 0, 5\]\) would keep 9 positions of row 0"),
        ([5, 5, 5], r"commit\(5\) would keep 5 positions, but 4 were"),
        (5, r"commit\(5\) would keep 5 positions, but 4 were"),
        ([1, 2], r"has 2 numbers, but cache 0 takes 3"),
        ([1], r"has 1 numbers, but cache 0 takes 3"),
        ([], r"has 0 numbers, but cache 0 takes 3"),
        (mx.array([1, 2, 3]), r"with a array.*tolist"),
    ],
)
def test_what_no_row_can_keep_is_refused_before_anything_changes(
    kind: AttentionKind, keep: Any, said: str
) -> None:
    cache = merged(kind, [9, 4, 1])
    before = dict(vars(cache))
    fields = read(kind.fields(cache))
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], [9, 4, 1], 4)
        during = read(kind.fields(cache))
        for ask in (speculation.prepare, speculation.commit):
            with pytest.raises(InvalidRequestError, match=said):
                ask(keep)
        assert_same(read(kind.fields(cache)), during, "after a refusal")
        speculation.commit([3, 0, 4])
    speculation.rollback()
    assert_same(read(kind.fields(cache)), fields, "after it was taken back")
    assert vars(cache).keys() == before.keys()


def test_a_list_for_a_cache_of_one_sequence_has_one_number() -> None:
    for keep in ([2], (2,)):
        caches: list[Any] = [KVCache(), CacheList(RotatingKVCache(4))]
        with Speculation(caches) as speculation:
            write(speculation.caches[0], [0], 3)
            write(speculation.caches[1][0], [0], 3)
            with pytest.raises(InvalidRequestError, match=r"has 2 numbers.* takes 1"):
                speculation.commit([1, 2])
            speculation.commit(keep)
        assert (caches[0].offset, caches[1][0].offset) == (2, 2)


@pytest.mark.parametrize("kind", [KV, RING], ids=["kv", "ring"])
def test_a_part_of_a_prompt_that_waits_for_finalize_is_refused(
    kind: AttentionKind,
) -> None:
    cache = kind.batch([0, 0])
    cache.prepare(lengths=[4, 1], right_padding=[0, 3])
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], [0, 0], 4)
        for keep in (3, [4, 1]):
            with pytest.raises(InvalidRequestError, match=r"2 rows.*finalize\(\)"):
                speculation.commit(keep)
        speculation.commit([4, 4])
    cache.finalize()
    assert cache.offset.tolist() == [4, 1]


def test_different_numbers_with_whole_are_refused() -> None:
    cache = merged(KV, [2, 3])
    state: Any = ArraysCache(1)
    for caches in ([cache], [state]):
        with Speculation(caches, whole=True) as speculation:
            if caches[0] is state:
                speculation.caches[0][0] = mx.ones((2, 3))
            else:
                write(speculation.caches[0], [2, 3], 4)
            with pytest.raises(InvalidRequestError, match="whole=True"):
                speculation.commit([4, 0])


def test_a_mixer_off_the_record_refuses_different_numbers_even_with_rerun() -> None:
    cache: Any = ArraysCache(1)
    cache[0] = mx.zeros((2, 3))
    with Speculation([cache], rerun=lambda keep: pytest.fail("ran")) as speculation:
        speculation.caches[0][0] = mx.ones((2, 3))
        with pytest.raises(UnsupportedCacheError, match=r"cannot keep \[1, 0\]"):
            speculation.commit([1, 0])
    assert mx.all(cache[0] == 0)


@pytest.mark.parametrize("keep", [4, [4, 4, 4]])
@pytest.mark.parametrize("kind", [KV, RING], ids=["kv", "ring"])
def test_keeping_all_of_every_row_changes_nothing(
    kind: AttentionKind, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for journal in (BatchKVJournal, BatchRotatingJournal):
        monkeypatch.setattr(journal, "commit", lambda *args: pytest.fail("called"))
    cache = merged(kind, [9, 4, 1])
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], [9, 4, 1], 4)
        written = dict(vars(cache))
        speculation.commit(keep)
    assert all(vars(cache)[name] is value for name, value in written.items())


def test_an_even_part_of_a_batch_kv_cache_copies_nothing() -> None:
    cache = merged(KV, [9, 4, 1])
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], [9, 4, 1], 4)
        buffer, padding = cache.keys, cache.left_padding
        speculation.commit([2, 2, 2])
    assert cache.keys is buffer
    assert cache.left_padding is padding
    assert cache._idx == 11


@pytest.mark.parametrize("kind", [KV, RING], ids=["kv", "ring"])
@pytest.mark.parametrize("commit", [None, 0, [1, 0]])
def test_an_empty_batch_is_empty_again_after_a_rollback(
    kind: AttentionKind, commit: Any
) -> None:
    cache = kind.batch([0, 2])
    speculation = Speculation([cache])
    with speculation:
        write(speculation.caches[0], [0, -2], 3)
        write(speculation.caches[0], [3, 1], 1)
        if commit is not None:
            speculation.commit(commit)
    speculation.rollback()
    assert cache.empty()
    assert cache.values is None
    assert cache._idx == 0
    assert cache.offset.tolist() == [0, -2]
    assert cache.left_padding.tolist() == [0, 2]


@pytest.mark.parametrize("kind", [KV, RING], ids=["kv", "ring"])
def test_every_kind_of_batch_presents_a_journal_of_rows(kind: AttentionKind) -> None:
    cache = merged(kind, [3, 2])
    journals = [BatchKVJournal(cache), BatchRotatingJournal(cache)]
    journal: Any = journals[kind is RING]
    for each in (journal, ArraysJournal(ArraysCache(1))):
        assert isinstance(each, Journal)
    shown = journal.presented
    assert journal.rows == 2
    assert isinstance(shown, type(cache))
    assert shown
    assert not hasattr(shown, "__len__")
    assert not hasattr(shown, "bits")


@pytest.mark.parametrize(
    ("window", "turns"), covering([None, 6, 40, 4000], [False, True])
)
def test_the_width_stays_bounded_over_a_thousand_rounds(
    window: int | None, turns: bool
) -> None:
    """Rounds keep tokens of one row, or of each in turn, and drop common padding."""
    kind = AttentionKind(window=window, step=32)
    lengths, cache = [5, 0, 3], merged(kind, [5, 0, 3])
    widest = 0
    for count in range(1000):
        keep = [1, 0, 0]
        keep[count % 3 if turns else 0] = 1 + count % 2
        if turns and count % 3:
            keep[0] = 0
        with Speculation([cache]) as speculation:
            write(speculation.caches[0], lengths, 3, count)
            speculation.commit(keep)
        lengths = [one + two for one, two in zip(lengths, keep, strict=True)]
        if count % 7 == 0:
            mx.eval(cache.state[:4])
        needed_rows = min(max(lengths), window or max(lengths))
        assert cache._idx <= needed_rows
        assert window is None or cache._idx <= window
        widest = max(widest, cache.keys.shape[2])
    assert cache.offset.tolist() == lengths
    longest = max(lengths)
    assert widest <= (window or longest + 3) + 2 * 32


def test_a_turned_ring_that_loses_its_common_padding_is_in_order_again() -> None:
    """The long row leaves, and the other rows are shorter than the window."""
    cache = merged(RING, [6, 2, 1])
    for step in range(2):
        write(cache, [6 + step, 2 + step, 1 + step], 1)
    assert cache.rotated
    cache.filter(mx.array([1, 2]))
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], [4, 3], 1)
        write(speculation.caches[0], [5, 4], 1)
        speculation.commit([1, 0])
    assert cache._idx == 5
    assert cache.left_padding.tolist() == [0, 2]
    write(cache, [5, 3], 1)
    assert cache.left_padding.tolist() == [0, 2]
    assert cache.extract(1).keys[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert cache.extract(0).keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_has_no_single_position() -> None:
    used = merged(RING, [9, 2])
    with pytest.raises(InvalidRequestError, match=r"batch of 2 .* offset of a cache"):
        position([merged(KV, [0, 0]), CacheList(used, ArraysCache(1))])


@pytest.mark.parametrize("keep", [[3, 0, 5], [0, 0, 1], [5, 4, 5], [2, 2, 2]])
def test_lengths_and_padding_of_a_state_follow_each_row(keep: list[int]) -> None:
    model = build("lfm2")
    recorders = ModelHooks(model)
    mixers = Mixers("lfm2", [model.model.layers[0].conv], 1)
    cache: Any = ArraysCache(1)
    cache.lengths, cache.left_padding = mx.array([9, 8, 7]), mx.array([0, 2, 1])
    x = mx.random.normal((3, 5, 64), key=mx.random.key(3))
    with Speculation([cache]) as speculation:
        mixers(x[:, :2], speculation.caches[0])
        mixers(x[:, 2:], speculation.caches[0])
        speculation.commit(keep)
    recorders.remove()
    assert cache.lengths.tolist() == [9 - keep[0], 8 - keep[1], 7 - keep[2]]
    assert cache.left_padding.tolist() == [-keep[0], 2 - keep[1], 1 - keep[2]]


def test_the_kinds_are_those_of_mlx_lm() -> None:
    assert type(merged(KV, [1])) is BatchKVCache
    assert type(merged(RING, [1])) is BatchRotatingKVCache
