"""A speculation refuses wrong uses, and ends in every way without loss of rows."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches import Speculation, leaves, position, states
from mlx_speculation.caches.journal import Journal
from mlx_speculation.caches.journals.arrays import ArraysJournal
from mlx_speculation.caches.registry import KNOWN, open_journals, presented
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.errors import (
    InvalidRequestError,
    SpeculationClosedError,
    UnsupportedCacheError,
)
from support.caches.cache_twins import Rows, assert_same, detached, read, tagged
from support.models.tiny_models import build

PROMPT = mx.array([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84]])
BLOCK = mx.array([[200, 100, 50, 25]])


class DerivedCache(KVCache):
    """A user's kind of cache."""


def write(caches: list[Any], width: int) -> None:
    """Append tagged rows to every KV or rotating cache."""
    for cache in caches:
        rows = Rows(cache.offset, tuple(range(width)))
        cache.update_and_fetch(*tagged(rows))


def written_pair() -> list[Any]:
    """Return a KV cache and a wrapped ring of four, after six rows each."""
    caches = [KVCache(), RotatingKVCache(max_size=4)]
    write(caches, 6)
    return caches


def image(caches: list[Any]) -> Any:
    """Return what caches hold: slots, counts, and the rows before the offset."""
    return read([_leaf_contents(leaf) for _, leaf in leaves(caches)])


def _leaf_contents(cache: Any) -> list[Any]:
    if isinstance(cache, ArraysCache):
        return [cache.cache, detached(cache.lengths), detached(cache.left_padding)]
    rows = None if cache.empty() else detached(cache.keys_and_values())
    return [cache.offset, getattr(cache, "_idx", None), rows]


@pytest.mark.parametrize(
    "unknown",
    [
        DerivedCache(),  # type: ignore[no-untyped-call]
        object(),
        None,
    ],
    ids=lambda cache: type(cache).__name__,
)
@pytest.mark.parametrize("inside_a_list", [False, True])
def test_an_unknown_kind_is_refused_before_anything_is_touched(
    unknown: Any, inside_a_list: bool
) -> None:
    known = written_pair()
    attributes = [dict(vars(cache)) for cache in known]
    last = CacheList(KVCache(), unknown) if inside_a_list else unknown
    place = "2.1" if inside_a_list else "2"
    with pytest.raises(UnsupportedCacheError) as refusal:
        Speculation([*known, last])
    assert f"layer {place} is a {type(unknown).__name__}," in str(refusal.value)
    assert all(kind.__name__ in str(refusal.value) for kind in KNOWN)
    for cache, before in zip(known, attributes, strict=True):
        assert all(vars(cache)[name] is value for name, value in before.items())


def test_a_refusal_is_also_a_type_error() -> None:
    with pytest.raises(TypeError):
        Speculation([object()])


def test_one_object_at_two_places_is_refused_with_both_places() -> None:
    cache = KVCache()
    with pytest.raises(InvalidRequestError, match=r"layers 0 and 1\.1"):
        Speculation([cache, CacheList(KVCache(), cache)])
    with pytest.raises(InvalidRequestError, match="layers 1 and 2"):
        Speculation([KVCache(), cache, cache])


@pytest.mark.parametrize("caches", [[], [CacheList()]])
def test_caches_without_a_leaf_are_refused(caches: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"the {len(caches)} items"):
        Speculation(caches)


def test_leaves_are_named_by_their_place() -> None:
    kv, ring, arrays = KVCache(), RotatingKVCache(4), ArraysCache(1)
    named_leaves = list(leaves([kv, CacheList(arrays, CacheList(ring))]))
    assert [place for place, _ in named_leaves] == ["0", "1.0", "1.1.0"]
    assert [leaf for _, leaf in named_leaves] == [kv, arrays, ring]


def test_the_position_is_the_largest_offset_and_unknown_to_recurrent_states() -> None:
    unused, used = KVCache(), KVCache()
    write([used], 5)
    assert position([unused, used, ArraysCache(1)]) == 5
    assert position([ArraysCache(1), CacheList(ArraysCache(2))]) is None


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_speculation_knows_where_it_starts(alike: bool, isolated: bool) -> None:
    caches: list[Any] = [KVCache(), KVCache()] if alike else [KVCache(), ArraysCache(2)]
    assert Speculation(caches, isolated=isolated).start == 0
    write(caches[:1], 6)  # a layer that the model does not use stays at 0
    assert Speculation(caches, isolated=isolated).start == 6
    assert Speculation([ArraysCache(2)]).start is None


def test_a_list_that_somebody_empties_is_rolled_back_all_the_same() -> None:
    caches: list[Any] = [KVCache(), KVCache()]
    write(caches, 6)
    before = image(caches)
    with Speculation(caches) as speculation:
        shown = speculation.caches
        write(shown, 2)
        shown.clear()
    assert_same(image(caches), before, "an emptied list")


def test_states_hold_every_array() -> None:
    caches = [*written_pair(), ArraysCache(1)]
    caches[2][0] = mx.ones(3)
    mx.eval(states(caches))
    kept = [state for state in states(caches) if state]
    assert kept[0][0] is caches[0].keys
    assert kept[1][1] is caches[1].values
    assert kept[2][0][0] is caches[2][0]


USES: dict[str, Callable[[Speculation], object]] = {
    "caches": lambda speculation: speculation.caches,
    "commit": lambda speculation: speculation.commit(1),
    "prepare": lambda speculation: speculation.prepare(1),
    "with": lambda speculation: speculation.__enter__(),
}
ENDS: dict[str, Callable[[Speculation], object]] = {
    "commit": lambda speculation: speculation.commit(2),
    "commit nothing": lambda speculation: speculation.commit(0),
    "rollback": lambda speculation: speculation.rollback(),
    "leave": lambda speculation: speculation.__exit__(None, None, None),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("end", ENDS)
def test_a_closed_speculation_shows_how_to_use_one(use: str, end: str) -> None:
    caches = written_pair()
    speculation = Speculation(caches)
    write(speculation.caches, 2)
    ENDS[end](speculation)
    before = image(caches)
    with pytest.raises(SpeculationClosedError) as refusal:
        USES[use](speculation)
    assert str(refusal.value).startswith(f"{use} was used on a speculation")
    assert "with Speculation(caches) as speculation:" in str(refusal.value)
    assert_same(image(caches), before, "a use after the end")


@pytest.mark.parametrize("keep", [-1, 4, 99])
@pytest.mark.parametrize("ask", ["prepare", "commit"])
@pytest.mark.parametrize("kinds", ["KV alone", "KV and a ring"])
def test_a_prefix_out_of_range_is_refused_with_both_values(
    keep: int, ask: str, kinds: str
) -> None:
    caches = written_pair()[: 1 if kinds == "KV alone" else 2]
    with Speculation(caches) as speculation:
        write(speculation.caches, 3)
        after = image(caches)
        with pytest.raises(InvalidRequestError) as refusal:
            getattr(speculation, ask)(keep)
        assert f"commit({keep})" in str(refusal.value)
        assert "positions, but 3 were written" in str(refusal.value)
        assert_same(image(caches), after, "a refused commit")
        speculation.commit(3)
    assert_same(image(caches), after, "a commit after a refusal")


@pytest.mark.parametrize("option", ["whole", "isolated", "key_steps"])
def test_a_fixed_shape_goes_with_no_other_way_to_write(option: str) -> None:
    caches = [KVCache(), KVCache()]
    write(caches, 6)
    before = image(caches)
    options: Any = {option: True}
    with pytest.raises(InvalidRequestError, match="shape was passed"):
        Speculation(caches, shape=FixedShape(4), **options)
    assert_same(image(caches), before, "a refused speculation")


def test_keeping_something_of_nothing_written_is_refused() -> None:
    with Speculation(written_pair()) as speculation:
        assert speculation.written == 0
        with pytest.raises(InvalidRequestError, match="but 0 were written"):
            speculation.commit(1)
        speculation.commit(0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("alike", [False, True])
def test_layers_out_of_step_are_refused_with_both_counts(
    first: int, keep: int, alike: bool
) -> None:
    caches: list[Any] = [KVCache(), KVCache()] if alike else written_pair()
    before = image(caches)
    with Speculation(caches) as speculation:
        write(speculation.caches, 2)
        write([speculation.caches[first]], 1)
        with pytest.raises(InvalidRequestError, match="3 positions and another 2"):
            speculation.commit(keep)
    assert_same(image(caches), before, "layers out of step")


def test_members_of_a_list_out_of_step_are_refused() -> None:
    caches = [CacheList(KVCache(), KVCache())]
    with Speculation(caches) as speculation:
        members = speculation.caches[0].caches
        write(list(members), 2)
        write([members[1]], 1)
        with pytest.raises(InvalidRequestError, match="3 positions and another 2"):
            speculation.commit(3)
    assert all(leaf.empty() for _, leaf in leaves(caches))


def test_a_layer_that_the_model_does_not_use_stays_as_it_was() -> None:
    caches: list[Any] = [KVCache(), KVCache(), RotatingKVCache(4), ArraysCache(1)]
    unused = image(caches[1:])
    with Speculation(caches) as speculation:
        write(speculation.caches[:1], 3)
        speculation.commit(2)
    assert caches[0].offset == 2
    assert_same(image(caches[1:]), unused, "layers that were not used")


def test_a_part_of_a_whole_round_is_refused() -> None:
    caches = written_pair()
    before = image(caches)
    with Speculation(caches, whole=True) as speculation:
        write(speculation.caches, 3)
        with pytest.raises(InvalidRequestError, match=r"the 3 written .* whole=True"):
            speculation.commit(2)
    assert_same(image(caches), before, "a whole round")


@pytest.mark.parametrize("width", [1, 3])
def test_a_failed_write_is_rolled_back(width: int) -> None:
    caches = written_pair()
    before = image(caches)
    keys, values = tagged(Rows(6, tuple(range(width))))

    def forward(shown: list[Any]) -> None:
        shown[0].update_and_fetch(keys, values)
        shown[1].update_and_fetch(keys, values[..., :2])

    with pytest.raises(ValueError, match="shape"), Speculation(caches) as speculation:
        forward(speculation.caches)
    assert_same(image(caches), before, "a failed write")


ALL_KINDS: list[Callable[[], Any]] = [
    KVCache,
    lambda: RotatingKVCache(max_size=4, keep=1),
    lambda: ArraysCache(2),
    QuantizedKVCache,
    ConcatenateKVCache,
    lambda: ChunkedKVCache(4),
    lambda: LayerCache(4),
    lambda: CacheList(KVCache(), ArraysCache(1), RotatingKVCache(max_size=4)),
]


@pytest.mark.parametrize("make", ALL_KINDS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_model_receives_passes_for_the_native_cache(
    make: Callable[[], Any], whole: bool
) -> None:
    cache = make()
    native = [leaf for _, leaf in leaves([cache])]
    journals = open_journals(native, whole=whole)
    assert all(isinstance(journal, Journal) for journal in journals)
    shown = presented([cache], iter(journals))[0]
    members = list(shown.caches) if isinstance(shown, CacheList) else [shown]
    assert isinstance(shown, type(cache))
    for member, leaf in zip(members, native, strict=True):
        assert isinstance(member, type(leaf))
        for name in ("update_and_fetch", "make_mask", "offset", "keys_and_values"):
            assert hasattr(member, name) == hasattr(leaf, name)
    for each in (shown, *members):
        assert each
        assert not hasattr(each, "__len__")
        assert hasattr(each, "bits") == isinstance(each, QuantizedKVCache)
        assert each.empty()


def test_opening_a_speculation_changes_no_attribute() -> None:
    caches = [*written_pair(), ArraysCache(2)]
    before = [dict(vars(cache)) for cache in caches]
    Speculation(caches)
    assert [dict(vars(cache)) for cache in caches] == before


def test_lengths_and_padding_change_with_a_commit_only() -> None:
    cache: Any = ArraysCache(1, left_padding=[7])
    cache.lengths = mx.array([9])
    with Speculation([cache], whole=True) as speculation:
        speculation.caches[0].advance(4)
    assert (cache.lengths.item(), cache.left_padding.item()) == (9, 7)
    with Speculation([cache], whole=True) as speculation:
        speculation.caches[0].advance(4)
        speculation.commit(4)
        assert (cache.lengths.item(), cache.left_padding.item()) == (5, 3)
    speculation.rollback()
    assert (cache.lengths.item(), cache.left_padding.item()) == (9, 7)


def test_a_commit_of_arrays_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(SpeculationClosedError, match=r"prepare\(keep\)"):
        ArraysJournal(ArraysCache(1)).commit(1)


# Whole models: a hybrid one and one with rings that have wrapped.


def prefilled(name: str) -> tuple[nn.Module, list[Any]]:
    """Build a tiny model whose caches hold `PROMPT` twice in a row."""
    model = build(name)
    caches = make_prompt_cache(model)
    model(mx.concatenate([PROMPT, PROMPT], axis=1), cache=caches)
    mx.eval(states(caches))
    return model, caches


def test_a_part_of_an_unrecorded_mixer_is_refused_and_changes_nothing() -> None:
    model, caches = prefilled("qwen3_5")
    before = image(caches)
    with Speculation(caches) as speculation:
        model(BLOCK, cache=speculation.caches)
        assert speculation.written == 4
        with pytest.raises(UnsupportedCacheError, match="cannot keep 2 of 4"):
            speculation.commit(2)
        with pytest.raises(UnsupportedCacheError, match="rerun="):
            speculation.prepare(3)
    assert_same(image(caches), before, "a refused part")


@pytest.mark.parametrize("keep", [0, 4])
def test_all_or_nothing_of_an_unrecorded_mixer_is_kept_without_running_again(
    keep: int,
) -> None:
    model, caches = prefilled("qwen3_5")
    twin = detached(caches)
    if keep:
        model(BLOCK, cache=twin)
    with Speculation(caches) as speculation:
        model(BLOCK, cache=speculation.caches)
        speculation.commit(keep)
    assert not speculation.reran
    assert_same(image(caches), image(twin), "all or nothing of a round")


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "recurrent_gemma"])
@pytest.mark.parametrize("keep", [1, 3])
def test_running_again_equals_plain_decoding(name: str, keep: int) -> None:
    model, caches = prefilled(name)
    twin = detached(caches)
    model(BLOCK[:, :keep], cache=twin)
    rerun_counts: list[int] = []

    def rerun(count: int) -> None:
        rerun_counts.append(count)
        model(BLOCK[:, :count], cache=caches)

    with Speculation(caches, rerun=rerun) as speculation:
        model(BLOCK, cache=speculation.caches)
        # If no layer counts positions, only the caller knows whether `keep` is a part.
        if speculation.written is not None:
            speculation.prepare(keep)
        speculation.commit(keep)
    assert rerun_counts == [keep]
    assert speculation.reran
    assert_same(image(caches), image(twin), "a part, run again")


def test_an_exception_while_running_again_leaves_all_rolled_back() -> None:
    model, caches = prefilled("qwen3_5")
    before = image(caches)

    def rerun(keep: int) -> None:
        raise KeyboardInterrupt

    speculation = Speculation(caches, rerun=rerun)
    with pytest.raises(KeyboardInterrupt), speculation:
        commit_two(model, speculation)
    assert_same(image(caches), before, "a failed second run")
    assert speculation.reran


def commit_two(model: nn.Module, speculation: Speculation) -> None:
    model(BLOCK, cache=speculation.caches)
    speculation.commit(2)
