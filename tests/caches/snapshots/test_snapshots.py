"""A snapshot keeps the content of caches, whatever happens to them afterwards.

Hypothesis draws native writes, rounds, trims, and returns to older snapshots. Every
snapshot, also if cut and joined, must equal a native twin that was fed only its tokens.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models import lfm2
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
from mlx_lm.models.lfm2 import ShortConv

from mlx_speculation.caches import (
    Snapshot,
    Speculation,
    merge,
    restore,
    snapshot,
    split,
    with_slack,
)
from mlx_speculation.caches.types.leaves import flat
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import (
    ArraysKind,
    Kind,
    KVKind,
    ListKind,
    Mixers,
    RingKind,
    Rows,
    SlidingKind,
    assert_same,
    read,
    tagged,
)
from support.caches.rare_cache_twins import (
    ChunkedKind,
    ConcatenateKind,
    LayerKind,
    QuantizedKind,
    attentions,
)
from support.models.tiny_models import TINY_MODELS, build


@dataclass(eq=False)
class Taken:
    """A snapshot of [0, stop), and the writes of the tokens that it holds."""

    snapshot: Snapshot
    writes: list[Rows] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    kind: Kind
    cuts: bool

    @initialize()
    def begin(self) -> None:
        self.cache = self.kind.make()
        self.writes: list[Rows] = []
        self.taken: list[Taken] = []
        self.serial = 0

    @property
    def position(self) -> int:
        return sum(rows.width for rows in self.writes)

    def rows(self, width: int, after: int = 0) -> Rows:
        self.serial += width
        serials = tuple(range(self.serial - width, self.serial))
        return Rows(self.position + after, serials)

    @rule(width=st.sampled_from([1, 1, 1, 2, 3, 6]))
    def write(self, width: int) -> None:
        rows = self.rows(width)
        self.kind.forward(self.cache, rows)
        self.writes.append(rows)

    @rule(width=st.integers(1, 5), keep=st.integers(0, 5))
    def round(self, width: int, keep: int) -> None:
        rows, keep = self.rows(width), min(keep, width)
        whole = isinstance(self.cache, LayerCache)  # its compressor is not recorded
        keep = (width if keep else 0) if whole else keep
        with Speculation([self.cache], whole=whole) as speculation:
            self.kind.forward(speculation.caches[0], rows)
            speculation.commit(keep)
        self.writes += [rows.head(keep)][:keep]

    @precondition(lambda self: self.cuts and self.position > 1)
    @rule(data=st.data(), width=st.integers(0, 4))
    def trim_and_write(self, data: st.DataObject, width: int) -> None:
        # At least one row stays: trimmed to 0 rows, a cache keeps its buffers, and its
        # new twin has none.
        rows = data.draw(st.integers(1, min(6, self.position - 1)))
        for leaf in flat([self.cache]):
            if isinstance(leaf, ConcatenateKVCache):  # its trim leaves rows visible
                stop = leaf.offset - rows
                leaf.state = [x[..., :stop, :] for x in cast(Any, leaf.state)]
            else:
                leaf.trim(rows)
        self.writes = _cut(self.writes, self.position - rows)
        if width:
            self.write(width)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Take a snapshot at once, in two parts, or as an older one and the rest."""
        stop = self.position
        start = data.draw(st.integers(0, stop))
        older = [
            one for one in self.taken if one.writes == self.writes[: len(one.writes)]
        ]
        taken = snapshot([self.cache], 0, stop)
        if older and self.serial % 2:
            parent = data.draw(st.sampled_from(older)).snapshot
            taken = merge(parent, snapshot([self.cache], parent.stop, stop))
        elif self.cuts and self.serial % 3:
            taken = merge(
                snapshot([self.cache], 0, start), snapshot([self.cache], start, stop)
            )
        self.taken.append(Taken(taken, list(self.writes)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), how=st.sampled_from(["part", "whole", "copy", "drop"]))
    def change(self, data: st.DataObject, how: str) -> None:
        """Cut and join, copy, or drop a snapshot; "part" also keeps the first part."""
        one = data.draw(st.sampled_from(self.taken))
        at = data.draw(st.integers(0, one.snapshot.stop))
        if how == "drop":
            self.taken.remove(one)
        elif how == "copy":
            one.snapshot = one.snapshot.copied()
        elif how == "whole":
            head, tail = split(one.snapshot.ranges, at)
            one.snapshot = merge(merge(head, tail), one.snapshot.states)
        elif self.cuts:
            head, tail = split(one.snapshot, at)
            self.taken.append(Taken(head, _cut(one.writes, at)))
            one.snapshot = merge(head, tail)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), fresh=st.booleans())
    def go_back(self, data: st.DataObject, fresh: bool) -> None:
        """Restore a snapshot to the live cache, or to a new one."""
        one = data.draw(st.sampled_from(self.taken))
        if fresh:
            self.cache = self.kind.make()
        restore(one.snapshot, [self.cache])
        self.writes = list(one.writes)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.check(data.draw(st.sampled_from(self.taken)))

    def check(self, one: Taken) -> None:
        """Require that the snapshot equals its twin, and continues like it."""
        restored, twin = self.kind.make(), self.kind.make()
        restore(one.snapshot, [restored])
        for rows in one.writes:
            self.kind.forward(twin, rows)
        self.compare(restored, twin)
        for width in (1, 3, 1):
            rows = Rows(one.snapshot.stop, tuple(range(800, 800 + width)))
            views = [self.kind.forward(cache, rows) for cache in (restored, twin)]
            if not isinstance(self.kind, RingKind | ListKind):  # order can differ
                assert_equal(views, "the view")
        self.compare(restored, twin)

    def compare(self, restored: Any, twin: Any) -> None:
        views = [self.kind.content(cache, 3) for cache in (restored, twin)]
        assert_equal(views, "the cache and its twin")

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        twin = self.kind.make()
        for rows in self.writes:
            self.kind.forward(twin, rows)
        self.compare(self.cache, twin)
        for one in self.taken:
            self.check(one)


def assert_equal(views: list[Any], what: str) -> None:
    actual, expected = read(views)
    assert_same(actual, expected, what)


def _cut(writes: list[Rows], stop: int) -> list[Rows]:
    kept = []
    for rows in writes:
        if rows.position < stop:
            kept.append(rows.head(stop - rows.position))
    return kept


def conv() -> Mixers:
    args = lfm2.ModelArgs.from_dict(TINY_MODELS["lfm2"].args | {"hidden_size": 8})
    module = ShortConv(args, 0)
    mixers = Mixers("lfm2", [module], 1, hidden=8)
    _OWNERS.append(ModelHooks(module))
    return mixers


_OWNERS: list[ModelHooks] = []
KINDS: dict[str, tuple[Callable[[], Kind], bool]] = {
    "kv": (lambda: KVKind(4), True),
    "quantized": (lambda: QuantizedKind(4, bits=4), True),
    "concatenate": (lambda: ConcatenateKind(), True),
    "ring": (lambda: RingKind(7), False),
    "ring with keep": (lambda: RingKind(7, keep=2), False),
    "sliding": (lambda: SlidingKind(7, slack=3), False),
    "chunked": (lambda: ChunkedKind(8, step=4), False),
    "arrays": (lambda: ArraysKind(conv(), lengths=2000, padding=3), False),
    "layer": (lambda: LayerKind(attentions()[0], 8), False),
    "list of kv": (lambda: ListKind((KVKind(4), KVKind(256))), True),
    "list": (lambda: ListKind((KVKind(4), ArraysKind(conv()), RingKind(5))), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_equals_a_twin_that_saw_only_its_tokens(name: str) -> None:
    make, cuts = KINDS[name]

    class OfKind(Machine):
        kind = make()

    OfKind.cuts = cuts
    profile = settings.default
    assert profile is not None
    examples = profile.max_examples // 6
    run_state_machine_as_test(
        OfKind, settings=settings(max_examples=examples, stateful_step_count=25)
    )
    while _OWNERS:
        _OWNERS.pop().remove()


def filled(rows: int = 1000) -> KVCache:
    """Return a cache of `rows` rows, with room for more in its buffers."""
    cache, block = KVCache(), mx.ones((1, 4, rows, 64))
    mx.eval(cache.update_and_fetch(block, block))
    return cache


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_bytes_reported_are_bytes_held_for_a_model(name: str) -> None:
    model = build(name)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.arange(40)[None], cache=caches))
    taken = snapshot(caches).copied()
    del caches
    gc.collect()
    reported, before = taken.nbytes, mx.get_active_memory()
    del taken
    gc.collect()
    assert before - mx.get_active_memory() == reported > 0


def test_a_ring_is_held_without_what_its_window_no_longer_needs() -> None:
    cache = RotatingKVCache(max_size=16)
    block = mx.ones((1, 4, 100, 64))
    mx.eval(cache.update_and_fetch(block, block))
    assert snapshot([cache]).nbytes == 2 * 4 * 16 * 64 * 4


HYBRIDS: dict[str, Callable[[], Any]] = {
    "RotatingKVCache": lambda: RotatingKVCache(max_size=4),
    "ChunkedKVCache": lambda: ChunkedKVCache(8),
}


def pair(name: str, rows: int = 6) -> list[Any]:
    caches: list[Any] = [KVCache(), HYBRIDS[name]()]
    for cache in caches:
        block = tagged(Rows(0, tuple(range(rows))))
        cache.update_and_fetch(*block)
    return caches


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_is_cut_only_where_it_was_taken(name: str) -> None:
    caches = pair(name)
    with pytest.raises(UnsupportedCacheError, match=f"1 is a {name}.*only at 6.*at 4"):
        snapshot(caches, 0, 4)
    taken = snapshot(caches)
    with pytest.raises(UnsupportedCacheError, match=f"1 is a {name}.*only at 6.*at 4"):
        split(taken, 4)
    head, tail = split(taken, 6)
    assert tail.start == tail.stop == 6
    restore(merge(head, tail), pair(name))
    restore(merge(*split(taken, 0)), pair(name))


def test_rows_without_a_state_are_not_restored() -> None:
    taken = snapshot(pair("RotatingKVCache"))
    target = pair("RotatingKVCache", rows=3)
    before = [dict(vars(cache)) for cache in target]
    with pytest.raises(UnsupportedCacheError, match="1 is a RotatingKVCache, but this"):
        restore(taken.ranges, target)
    head, _ = split(taken.ranges, 2)
    with pytest.raises(UnsupportedCacheError, match=r"snapshot of \[0, 2\)"):
        restore(head, target)
    assert [vars(cache) for cache in target] == before


def test_a_snapshot_goes_on_from_caches_that_hold_what_is_before_it() -> None:
    caches = [KVCache()]
    caches[0].update_and_fetch(*tagged(Rows(0, (0, 1, 2, 3, 4))))
    head, tail = split(snapshot(caches), 3)
    target = [KVCache()]
    with pytest.raises(InvalidRequestError, match=r"hold 0 tokens.*begins at 3"):
        restore(tail, target)
    restore(head, target)
    restore(tail, target)
    keys = np.array(target[0].keys_and_values()[0])
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]


def test_what_does_not_fit_together_is_refused() -> None:
    taken = snapshot(pair("RotatingKVCache"))
    with pytest.raises(
        InvalidRequestError, match="ends at 6 and the child begins at 0"
    ):
        merge(taken, taken)
    with pytest.raises(InvalidRequestError, match=r"2 leaf caches|1 leaf caches"):
        restore(taken, [KVCache()])
    with pytest.raises(InvalidRequestError, match="layer 1 a RotatingKVCache with"):
        restore(taken, [KVCache(), RotatingKVCache(max_size=5)])
    with pytest.raises(InvalidRequestError, match="layer 0 a KVCache with"):
        restore(taken, [QuantizedKVCache(), RotatingKVCache(max_size=4)])
    with pytest.raises(
        InvalidRequestError, match=r"at 7, but the snapshot holds \[0, 6"
    ):
        split(taken, 7)
    with pytest.raises(InvalidRequestError, match=r"\[0, 7\) is not in the caches"):
        snapshot(pair("RotatingKVCache"), 0, 7)
    with pytest.raises(InvalidRequestError, match=r"\[4, 3\) is not in the caches"):
        snapshot([filled(10)], 4, 3)
    with pytest.raises(InvalidRequestError, match=r"Layer 1 holds 5 .*another layer 9"):
        snapshot([filled(9), filled(5)])
    with pytest.raises(InvalidRequestError, match="No cache knows"):
        snapshot([ArraysCache(2)])


@pytest.mark.parametrize("unknown", [object(), None])
def test_other_kinds_are_refused_with_their_place(unknown: Any) -> None:
    name = type(unknown).__name__
    caches = [KVCache(), cast(Any, CacheList)(unknown)]
    with pytest.raises(UnsupportedCacheError, match=rf"1\.0 is a {name}, which"):
        snapshot(caches)
    with pytest.raises(UnsupportedCacheError, match=r"layer 0 is a"):
        restore(snapshot([filled(3)]), [unknown])


def test_one_object_at_two_places_is_refused() -> None:
    cache = filled(3)
    with pytest.raises(InvalidRequestError, match="is used for layers 0 and 1"):
        snapshot([cache, cache])


def test_a_layer_that_the_model_does_not_use_stays_empty() -> None:
    taken = snapshot([filled(9), KVCache()])
    target = [filled(4), filled(4)]
    restore(merge(*split(taken, 5)), target)
    assert [cache.offset for cache in target] == [9, 0]
    assert target[1].empty()


MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba", "recurrent_gemma", "falcon_h1")


@pytest.mark.parametrize("slack", [False, True])
@pytest.mark.parametrize("name", [name for name in MODELS if name in TINY_MODELS])
@pytest.mark.parametrize("length", [5, 16, 37])
def test_a_restored_model_goes_on_bit_for_bit(
    name: str, length: int, slack: bool
) -> None:
    sliding = with_slack if slack else list
    model = build(name)
    prompt = [(37 * i * i + 11 * i) % 256 for i in range(length)]
    stayed, other = (sliding(make_prompt_cache(model)) for _ in range(2))
    mx.eval(model(mx.array([prompt]), cache=stayed))
    taken = snapshot(stayed, 0, length)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=other))
    restore(taken, other)
    token = mx.array([[7]])
    for width in (1, 1, 4, 1, 2):
        tokens = mx.repeat(token, width, axis=1)
        logits = [model(tokens, cache=caches) for caches in (stayed, other)]
        assert_equal(logits, f"{name} after {length}")
        token = mx.argmax(logits[0][:, -1:], axis=-1)
    third = sliding(make_prompt_cache(model))
    restore(taken, third)
    mx.eval(model(mx.array([[7]]), cache=third))
