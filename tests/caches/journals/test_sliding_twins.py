"""A sliding cache under speculation gives the same view as a native ring.

Its twin is a `RotatingKVCache` that saw only the kept tokens. In each forward, every
query must see the same rows as in a native copy that gets the same writes.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
)
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches import SlidingKVCache, Speculation
from support.caches.cache_twins import (
    ENDINGS,
    Held,
    Plan,
    Rows,
    Visible,
    assert_same,
    detached,
    plans,
    read,
    tagged,
)
from support.caches.twin_rounds import Counting, played

ROUNDS = 1_200
WIDTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
PREFILLS = st.lists(st.integers(1, 20), max_size=2)


class StopError(Exception):
    """Error of a forward that fails."""


def twin(cache: Any) -> Any:
    return detached(cache)


def forward(cache: Any, rows: Rows, narrow: int | None) -> Visible:
    """Write as a model does; return what each row sees."""
    mask = cache.make_mask(rows.width, window_size=narrow)
    keys, values = cache.update_and_fetch(*tagged(rows))
    assert cache.offset == rows.position + rows.width
    if isinstance(cache, SlidingKVCache):
        again = read(list(cache.keys_and_values()))
        assert_same(again, read([keys, values]), "keys_and_values")
        assert_in_order(keys, cache, rows.width)
        assert mask is None or rows.width > 1 or narrow
    return Visible(keys[0, 0], values[0, 0], mask, rows.width)


def assert_in_order(keys: mx.array, cache: SlidingKVCache, width: int) -> None:
    """Require exactly the last `max_size` - 1 rows and the new ones, in order."""
    rows = min(cache.offset, cache.max_size - 1 + width)
    expected = np.arange(cache.offset - rows, cache.offset)
    np.testing.assert_array_equal(np.array(keys)[0, 0, :, 0], expected)


class Beside(Counting):
    ready = False

    @initialize(
        window=st.integers(1, 12),
        narrow=st.integers(-5, 13),
        slack=st.integers(1, 20),
        step=st.sampled_from([1, 4, 256]),
        prefill=PREFILLS,
        converted=st.booleans(),
    )
    def begin(
        self,
        window: int,
        narrow: int,
        slack: int,
        step: int,
        prefill: list[int],
        converted: bool,
    ) -> None:
        """Fill the cache and its twin; `narrow` is a smaller window of the model."""
        # No larger window: a round cuts it to the ring's, see test_rotating_kv.py.
        self.narrow = narrow if 1 <= narrow <= window else None
        self.native = RotatingKVCache(max_size=window)
        self.cache = SlidingKVCache(window, slack)
        self.serial = 0
        for width in prefill:
            rows = self.rows(width)
            forward(self.native, rows, self.narrow)
            forward(self.cache, rows, self.narrow)
        if converted:
            self.cache = SlidingKVCache.from_native(self.native, slack)
        self.cache.step = step
        self.ready = True

    def rows(self, width: int, after: int = 0) -> Rows:
        self.serial += width
        serials = tuple(range(self.serial - width, self.serial))
        return Rows(self.native.offset + after, serials)

    @rule(plan=plans(WIDTHS))
    def round(self, plan: Plan) -> None:
        type(self).rounds += 1
        self.ready = False
        written, keep = self.speculate(plan)
        if ENDINGS[plan.ending]:
            self.feed_native(written, keep, singly=plan.singly)
        if plan.check:
            self.check(plan.probe)
        self.ready = True

    def speculate(self, plan: Plan) -> tuple[list[Rows], int]:
        """Play the round on the sliding cache; return what it wrote and kept."""
        total, keep = sum(plan.widths), plan.keep
        if plan.ending == "native":
            return self.write(self.cache, plan), total
        if plan.ending == "whole":
            keep = total if keep else 0
        written: list[Rows] = []
        caches, whole = [self.cache], plan.ending == "whole"
        unchanged = (
            Held(caches, values=plan.watch != "never") if plan.isolated else None
        )
        speculation = Speculation(caches, whole=whole, isolated=plan.isolated)
        with suppress(StopError), speculation as round_:
            written = self.write(round_.caches[0], plan)
            assert round_.written == total
            if plan.ending == "raise":
                raise StopError
            if plan.ending.startswith("prepare"):
                round_.prepare(total if "all" in plan.ending else keep)
            if unchanged is not None:
                unchanged.assert_unchanged("the live cache before the commit")
            if "commit" in plan.ending or plan.ending == "whole":
                round_.commit(keep)
            if "roll back" in plan.ending:
                round_.rollback()
        return written, keep

    def write(self, cache: Any, plan: Plan) -> list[Rows]:
        """Write the rows of a plan, also to a native copy if the plan watches views."""
        beside = twin(self.native) if plan.watch != "never" else None
        written: list[Rows] = []
        for width in plan.widths:
            rows = self.rows(width, after=sum(rows.width for rows in written))
            shown = forward(cache, rows, self.narrow)
            if beside is not None:
                views = read([shown, forward(beside, rows, self.narrow)])
                assert_same(views[0], views[1], "the view of a forward")
            written.append(rows)
        return written

    def feed_native(self, written: list[Rows], keep: int, *, singly: bool) -> None:
        for rows in written:
            kept = rows.head(min(keep, rows.width))
            keep -= kept.width
            for write in kept.singly() if singly else [kept][: kept.width]:
                forward(self.native, write, self.narrow)

    def check(self, probe: int) -> None:
        caches = (self.cache, self.cache.to_native(), self.native)
        actual, converted, expected = read([self.content(c, probe) for c in caches])
        assert_same(actual, expected, "the cache and its twin")
        assert_same(converted, expected, "the ring of to_native() and the twin")

    def content(self, cache: Any, probe: int) -> list[Any]:
        """Return the counters, and the views of three writes: 1, `probe` and 1 rows."""
        result: list[Any] = [cache.offset, cache.size(), cache.max_size, cache.keep]
        copied = twin(cache)
        for width in (1, probe, 1):
            serials = tuple(range(10**6, 10**6 + width))
            rows = Rows(copied.offset, serials)
            result.append(forward(copied, rows, self.narrow))
        return result

    def teardown(self) -> None:
        if self.ready:
            self.check(1)
            self.check(3)


def test_a_sliding_cache_equals_a_native_ring(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("rounds", played(Beside, ROUNDS, 25))
