"""Compares caches with their twins: native caches that are fed only the kept tokens.

Key and value of a row both contain its position and its serial number (`tagged`). So a
test notices a row in the wrong place, and a rejected row in the place of a kept one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from mlx_lm.models.cache import _BaseCache as BaseCache
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches import SlidingKVCache, leaves

_EMBEDDINGS = mx.random.normal((97, 64), key=mx.random.key(5))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one write: their first position, and the serial number of each."""

    position: int
    serials: tuple[int, ...]

    @property
    def width(self) -> int:
        return len(self.serials)

    def head(self, count: int) -> "Rows":
        return Rows(self.position, self.serials[:count])

    def singly(self) -> list["Rows"]:
        return [Rows(self.position + i, (s,)) for i, s in enumerate(self.serials)]


def tagged(rows: Rows) -> tuple[mx.array, mx.array]:
    """Return keys (position, serial), and wider values: negated keys and a zero."""
    pairs = [[float(p), float(s)] for p, s in enumerate(rows.serials, rows.position)]
    return (
        mx.array([[pairs]]),
        mx.array([[[[-position, -serial, 0.0] for position, serial in pairs]]]),
    )


def detached(value: Any) -> Any:
    """Copy a native cache; later writes to the original do not change the copy."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    if isinstance(value, (BaseCache, LayerCache, SlidingKVCache)):
        twin = object.__new__(type(value))
        twin.__dict__ = {name: detached(item) for name, item in vars(value).items()}
        return twin
    return value


@dataclass(frozen=True, slots=True)
class Visible:
    """The rows of a cache that each of the next `width` queries would see."""

    keys: mx.array  # [rows, 2]
    values: mx.array  # [rows, 3]
    mask: Any  # of the cache, before the write
    width: int

    def rows(self) -> list[Any]:
        """Return the visible rows of each query, oldest first, as numpy arrays."""
        keys, mask = np.array(self.keys), _read(self.mask)
        np.testing.assert_array_equal(np.array(self.values)[:, :2], -keys)
        order = np.argsort(keys[:, 0], kind="stable")
        return [
            keys[order][_allowed(mask, query, self.width, len(keys))[order]]
            for query in range(self.width)
        ]


def _allowed(mask: Any, query: int, width: int, rows: int) -> Any:
    if mask is None:
        return np.ones(rows, bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(rows) <= rows - width + query
    return mask[query] if mask.ndim == 2 else mask


def read(value: Any) -> Any:
    """Turn the arrays in `value` into numpy arrays, with one evaluation."""
    mx.eval(list(_arrays(value)))
    return _read(value)


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, Visible):
        yield from _arrays((value.keys, value.values, value.mask))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)


def _read(value: Any) -> Any:
    if isinstance(value, mx.array):
        bits = value.dtype == mx.bfloat16  # numpy has no bfloat16
        return np.array(value.view(mx.uint16) if bits else value)
    if isinstance(value, Visible):
        return value.rows()
    if isinstance(value, (list, tuple)):
        return [_read(item) for item in value]
    return value


class Held:
    """The content of caches, to check that nothing is written to them.

    With `values`, the values of arrays are recorded too, which evaluates the arrays.
    """

    def __init__(self, caches: Sequence[Any], *, values: bool) -> None:
        self._leaves = [leaf for _, leaf in leaves(caches)]
        self._attributes = [_shallow(vars(leaf)) for leaf in self._leaves]
        self._values = self._read() if values else None

    def assert_unchanged(self, what: str) -> None:
        """Require that every attribute is the same object, with the same values."""
        for leaf, before in zip(self._leaves, self._attributes, strict=True):
            after = _shallow(vars(leaf))
            assert after.keys() == before.keys(), what
            for name, value in before.items():
                assert _identical(after[name], value), f"{what}: {name}"
        if self._values is not None:
            assert_same(self._read(), self._values, what)

    def _read(self) -> Any:
        return read([list(vars(leaf).values()) for leaf in self._leaves])


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in attributes.items()
    }


def _identical(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_identical, one, other))
    return one is other or (isinstance(one, int) and one == other)


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Require that two results of `read` are equal bit for bit."""
    if isinstance(expected, list):
        assert isinstance(actual, list), what
        assert len(actual) == len(expected), what
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{what}, item {index}")
    elif isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray), f"{what}: {actual!r}"
        same = actual.shape == expected.shape and actual.dtype == expected.dtype
        # Comparing bytes takes less time than assert_array_equal.
        if not same or actual.tobytes() != expected.tobytes():
            np.testing.assert_array_equal(actual, expected, what, strict=True)
    else:
        assert actual == expected, f"{what}: {actual!r} instead of {expected!r}"


class Kind(Protocol):
    """One kind of cache, as a model writes to it and sees it."""

    @property
    def any_width(self) -> bool:
        """Return whether the content is independent of how writes are grouped."""
        ...

    def make(self) -> Any: ...

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        """Write as a model does; return the view: a copy of what the model sees."""
        ...

    def content(self, cache: Any, probe: int) -> list[Any]:
        """Return all that later forwards of `probe` rows depend on."""
        ...


def _attend(cache: Any, rows: Rows, window: int | None = None) -> list[Any]:
    before = cache.offset
    mask = cache.make_mask(rows.width, return_array=False, window_size=window)
    shown = cache.update_and_fetch(*tagged(rows))
    return [before, detached(mask), detached(shown), cache.offset]


def _next(cache: Any, width: int) -> Rows:
    return Rows(cache.offset, tuple(range(10**6, 10**6 + width)))


@dataclass(frozen=True, slots=True)
class KVKind:
    """A `KVCache`; a small `step` makes its buffer grow often."""

    step: int
    any_width: bool = True

    def make(self) -> KVCache:
        cache = KVCache()
        cache.step = self.step
        return cache

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        return _attend(cache, rows)

    def content(self, cache: Any, probe: int) -> list[Any]:
        kept = [cache.empty(), cache.size()]
        if not cache.empty():
            kept.append(detached(cache.keys_and_values()))
        return [*kept, _attend(detached(cache), _next(cache, probe))]


@dataclass(frozen=True, slots=True)
class RingKind:
    """A `RotatingKVCache`; its content is what it returns for a next write."""

    window: int
    keep: int = 0
    narrow: int | None = None  # model window, smaller than the ring
    any_width: bool = True

    def make(self) -> RotatingKVCache:
        return RotatingKVCache(max_size=self.window, keep=self.keep)

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        index, wraps = cache._idx, cache.offset + rows.width > cache.max_size
        shown = _attend(cache, rows, self.narrow)
        if self.keep and rows.width > 1 and wraps:
            # A round's mask is not mlx-lm's: tests/caches/journals/test_rotating_kv.py
            del shown[1]
        return [index, *shown, cache._idx]

    def content(self, cache: Any, probe: int) -> list[Any]:
        kept = [cache.empty(), cache.offset, cache.max_size, cache.keep]
        return kept + [self._visible(cache, width) for width in {1, probe}]

    def _visible(self, cache: Any, width: int) -> Visible:
        copy = detached(cache)
        mask = copy.make_mask(width, window_size=self.narrow)
        keys, values = copy.update_and_fetch(*tagged(_next(copy, width)))
        return Visible(keys[0, 0], values[0, 0], mask, width)


@dataclass(frozen=True, slots=True)
class SlidingKind:
    window: int
    slack: int
    any_width: bool = True

    def make(self) -> SlidingKVCache:
        return SlidingKVCache(self.window, self.slack)

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        return _attend(cache, rows)

    def content(self, cache: Any, probe: int) -> list[Any]:
        seen = [_attend(detached(cache), _next(cache, n)) for n in (1, probe)]
        return [cache.empty(), cache.max_size, *seen]


@dataclass(frozen=True, slots=True)
class Mixers:
    """Real mixers of one layer that share one `ArraysCache`."""

    name: str
    modules: Sequence[nn.Module]
    slots: int
    hidden: int = 64

    def __call__(self, x: mx.array, cache: Any) -> list[mx.array]:
        if self.name == "rwkv7":
            time, channel = self.modules
            y, first = time(x, None, cache)
            return [y, first, channel(x + y, cache)]
        (mixer,) = self.modules
        if self.name == "mamba":
            return [mixer(x, cache)]
        return [mixer(x, mask=cache.make_mask(x.shape[1]), cache=cache)]


@dataclass(frozen=True, slots=True)
class ArraysKind:
    mixers: Mixers
    lengths: int | None = None
    padding: int | None = None
    any_width: bool = False

    def make(self) -> Any:
        cache: Any = ArraysCache(self.mixers.slots)
        if self.lengths is not None:
            cache.lengths = mx.array([self.lengths])
        if self.padding is not None:
            cache.left_padding = mx.array([self.padding])
        return cache

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        ids = mx.array([serial % 97 for serial in rows.serials])
        x = _EMBEDDINGS[ids, : self.mixers.hidden][None]
        mask = cache.make_mask(rows.width)
        return [mask, self.mixers(x, cache), self.content(cache, 1)]

    def content(self, cache: Any, probe: int) -> list[Any]:
        extent = [detached(cache.left_padding), detached(cache.lengths)]
        return [cache.empty(), list(cache.cache), *extent]


@dataclass(frozen=True, slots=True)
class ListKind:
    """A `CacheList` of other kinds, or with `layers` a plain list of them."""

    members: tuple[Kind, ...]
    any_width: bool = False
    layers: bool = False

    def make(self) -> Any:
        caches = [member.make() for member in self.members]
        return caches if self.layers else CacheList(*caches)

    def forward(self, cache: Any, rows: Rows) -> list[Any]:
        return [member.forward(leaf, rows) for member, leaf in self._pairs(cache)]

    def content(self, cache: Any, probe: int) -> list[Any]:
        return [member.content(leaf, probe) for member, leaf in self._pairs(cache)]

    def _pairs(self, cache: Any) -> list[tuple[Kind, Any]]:
        members = cache if self.layers else cache.caches
        return list(zip(self.members, members, strict=True))


def ring_kinds(
    windows: st.SearchStrategy[int], keeps: st.SearchStrategy[int]
) -> st.SearchStrategy[RingKind]:
    """Draw rings whose `keep` fits their window.

    With `keep > 0` there is no model window: mlx-lm's mask for a model window would
    depend on how the ring was filled, so there would be no reference.
    """

    def build(window: int, keep: int, narrow: int | None) -> RingKind:
        keep = min(keep, window - 1)
        return RingKind(window, keep, None if keep or not narrow else narrow)

    return windows.flatmap(
        lambda window: st.builds(
            build, st.just(window), keeps, st.none() | st.integers(1, window)
        )
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: its forwards, its ending, and its comparisons."""

    widths: tuple[int, ...]  # rows of each forward
    keep: int  # rows to keep, of all forwards together
    ending: str  # a key of `ENDINGS`
    watch: str  # compare the views "before" or "after" the ending, or "never"
    check: bool  # compare the caches after the round
    probe: int  # rows that the comparison of caches writes
    singly: bool  # feed the kept rows to the twin one by one
    isolated: bool  # write nothing to the live caches before the commit


# Endings of a round: whether the rows that `Plan.keep` counts stay in the cache.
ENDINGS = {
    "commit": True,
    "prepare, commit": True,
    "prepare all, commit": True,
    "whole": True,
    "commit, roll back": False,
    "prepare, leave": False,
    "leave": False,
    "roll back": False,
    "raise": False,
    "native": True,
}
_DRAWN = ("commit", "commit", "commit", *ENDINGS)


@st.composite
def plans(
    draw: st.DrawFn, widths: st.SearchStrategy[list[int]], rarely: bool = False
) -> Plan:
    """Draw a round; 1 in 3 is watched and 1 in 3 checked, with `rarely` 1 in 6 each."""
    drawn = tuple(draw(widths))
    every = 6 if rarely else 3
    bits = draw(st.integers(0, 24 * every - 1))
    return Plan(
        widths=drawn,
        keep=draw(st.integers(0, sum(drawn))),
        ending=draw(st.sampled_from(_DRAWN)),
        watch={0: "before", every: "after"}.get(bits % (2 * every), "never"),
        check=bits // 2 % every == 0,
        probe=draw(st.integers(1, 6)),
        singly=bits % 4 < 2,
        isolated=bits >= 16 * every,
    )
