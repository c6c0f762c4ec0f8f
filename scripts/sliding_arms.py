"""The caches that benchmark_sliding.py compares, as one round writes to them.

Every arm holds the window before a round, takes `width` rows, shows the last
window - 1 rows and the new ones, and keeps `keep` of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_speculation.caches import SlidingKVCache, Speculation

Rows = tuple[mx.array, mx.array]  # keys and values, [1, kv heads, rows, dim]
Use = Callable[[mx.array, mx.array], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one round attends over.

    Attributes:
        window: the sliding window.
        width: rows of a round.
        slack: of the sliding cache, and as much more room for the plain one.
        heads: of the queries.
        kv_heads: of the keys and values.
        dim: of a head.
    """

    window: int
    width: int
    slack: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def keep(self) -> int:
        """Rows that a round keeps: about half of the drafts are rejected."""
        return (self.width + 1) // 2

    def mask(self) -> mx.array | None:
        """Return the mask over what a round of a full window shows, evaluated."""
        if self.width == 1:
            return None
        mask: mx.array = create_causal_mask(
            self.width, self.window - 1, window_size=self.window
        )
        mx.eval(mask)
        return mask

    def rows(self, count: int, seed: int) -> Rows:
        """Return random keys and values, evaluated."""
        shape = (1, self.kv_heads, count, self.dim)
        one, other = mx.random.split(mx.random.key(seed))
        rows = mx.random.normal(shape, key=one), mx.random.normal(shape, key=other)
        mx.eval(rows)
        return rows

    def queries(self, seed: int) -> mx.array:
        """Return random queries, evaluated."""
        shape = (1, self.heads, self.width, self.dim)
        queries = mx.random.normal(shape, key=mx.random.key(seed))
        mx.eval(queries)
        return queries


class Arm(Protocol):
    """One way to hold a window."""

    def round(self, rows: Rows, keep: int, use: Use) -> None:
        """Write the rows, let `use` evaluate with what is shown, keep some."""
        ...

    def reset(self) -> None:
        """Get ready for the next round, untimed."""
        ...


class PlainArm:
    """A `KVCache` with window - 1 rows and room for the slack.

    With `grows` it appends until there is no more room, and then begins again: like
    any text, its rows go where none was written lately. Without, it always has the
    same length, so that the same number of rows is attended over.
    """

    def __init__(self, shape: Shape, start: Rows, *, grows: bool) -> None:
        self.cache = KVCache()
        self.cache.step = room = shape.window + shape.slack
        self.cache.update_and_fetch(*start)
        self._length = self.cache.offset = shape.window - 1
        self._longest = room - shape.width if grows else self._length
        mx.eval(self.cache.state)

    def round(self, rows: Rows, keep: int, use: Use) -> None:
        """Append, and trim what is not kept."""
        with Speculation([self.cache]) as speculation:
            use(*speculation.caches[0].update_and_fetch(*rows))
            speculation.commit(keep)

    def reset(self) -> None:
        """Be as short as at first, where it is to be or the room is used up."""
        if self.cache.offset > self._longest:
            self.cache.offset = self._length


@dataclass(slots=True)
class CacheArm:
    """A cache with a journal of ours: the sliding one, or the native ring."""

    cache: Any
    start: Rows

    def __post_init__(self) -> None:
        self.cache.update_and_fetch(*self.start)
        mx.eval(self.cache.state)

    def round(self, rows: Rows, keep: int, use: Use) -> None:
        """Write and commit, as a generation does."""
        with Speculation([self.cache]) as speculation:
            use(*speculation.caches[0].update_and_fetch(*rows))
            speculation.commit(keep)

    def reset(self) -> None:
        """Both stay full by themselves."""


class MovingArm:
    """The sliding cache in a round that finds it full; the round is undone."""

    def __init__(self, shape: Shape, start: Rows) -> None:
        self.cache = SlidingKVCache(shape.window, shape.slack)
        self.cache.update_and_fetch(*start)
        rows = shape.rows(shape.width, seed=3)
        while self._fits(rows):
            pass
        mx.eval(self.cache.state)

    def _fits(self, rows: Rows) -> bool:
        """Write the rows where there is room for them, and say whether there was."""
        before = self.cache.keys
        with Speculation([self.cache]) as speculation:
            speculation.caches[0].update_and_fetch(*rows)
            fits = self.cache.keys is before
            speculation.commit(rows[0].shape[2] if fits else 0)
        return fits

    def round(self, rows: Rows, keep: int, use: Use) -> None:
        """Write into new buffers; leaving without a commit restores the old ones."""
        with Speculation([self.cache]) as speculation:
            use(*speculation.caches[0].update_and_fetch(*rows))

    def reset(self) -> None:
        """Rolled back already."""


@dataclass(slots=True)
class ConcatenatingArm:
    """Two arrays that are put together anew in every round."""

    window: int
    start: Rows
    arrays: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = self.start

    def round(self, rows: Rows, keep: int, use: Use) -> None:
        """Concatenate the whole window and the rows; slice off what is not kept."""
        held = zip(self.arrays, rows, strict=True)
        keys, values = (
            mx.concatenate([old[..., 1 - self.window :, :], new], axis=2)
            if self.window > 1
            else new
            for old, new in held
        )
        use(keys, values)
        cut = keys.shape[2] - rows[0].shape[2] + keep
        self.arrays = keys[..., :cut, :], values[..., :cut, :]

    def reset(self) -> None:
        """It stays full by itself."""


def make_arms(shape: Shape, *, grows: bool = False) -> dict[str, Arm]:
    """Return all arms, each holding the same window; `grows` is the plain one's."""
    start = shape.rows(shape.window, seed=2)
    return {
        "plain": PlainArm(shape, start, grows=grows),
        "sliding": CacheArm(SlidingKVCache(shape.window, shape.slack), start),
        "moving": MovingArm(shape, start),
        "native": CacheArm(RotatingKVCache(max_size=shape.window), start),
        "concatenating": ConcatenatingArm(shape.window, start),
    }
