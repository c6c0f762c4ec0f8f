"""Caches as a model sees them while it is fed a tree instead of a chain.

Rows are written in the order in which they are fed, parents before their children; what
differs is what a row sees, and where it stands:

    offset 7; rows 0 1 2 3, row 3 a second child of row 0     parents  -  0  1  0
    row 3 sees positions 0 to 6, row 0 and itself             depths   0  1  2  1
    with a window of 4 it sees positions 5 and 6 of these: it stands at 8, not at 10

The mask is made here; the rows' positions are for who turns queries and keys. A view
holds nothing: what is written is in the cache, and undone like any rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache
from mlx_speculation.errors import UnsupportedCacheError


class TreeRows(NamedTuple):
    """Rows of a forward that are a tree, or a level of one.

    Attributes:
        seen: bool [rows, columns], which of the newest columns a row sees: those of
            its ancestors and its own. The last columns are of these rows, and before
            them those that a round has written already.
        depths: int32 [rows], how far each row stands behind the first one's position.
        shift: added to the offset that a model reads, where rows of other branches
            have been written since the first row's position.
    """

    seen: mx.array
    depths: mx.array
    shift: int = 0


class TreeView:
    """One cache, to a model that is fed a tree: another mask, all else as it is."""

    def __init__(self, cache: Any, rows: TreeRows) -> None:
        self._cache, self._rows = cache, rows

    @property
    def offset(self) -> int:
        """The position of the first row that is not written."""
        return int(self._cache.offset) + self._rows.shift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(
        self,
        N: int,  # noqa: N803  models may name it
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array:
        """Return what the rows see, bool [rows, columns], in a window too."""
        cache, rows = self._cache, self._rows
        native = cache.make_mask(N, window_size=window_size, return_array=True)
        written, window = int(cache.offset) + N, window_size
        if isinstance(cache, RotatingKVCache | SlidingKVCache):
            written = min(int(cache.offset), cache.max_size - 1) + N
            window = min(window_size or cache.max_size, cache.max_size)
        before = written - rows.seen.shape[1]  # columns of committed rows
        seen = mx.broadcast_to(mx.array(True), (N, before))
        visible = rows.seen
        if window is not None:
            # Row i stands at `before` + depths[i], counted from the first column.
            reach = rows.depths[:, None] - window
            seen = mx.arange(before)[None] > before + reach
            if visible.shape[1] == N:
                visible = visible & (rows.depths[None] > reach)
        mask = mx.concatenate([seen, visible], axis=1)
        # More are shown, where keys are in whole steps.
        shown: int = written if native is None else native.shape[-1]
        return mx.pad(mask, [(0, 0), (0, shown - written)])


def holds_trees(caches: Sequence[Any]) -> bool:
    """Return whether the rows of these caches can be a tree."""
    return next(_without_trees(caches), None) is None


def check_trees(caches: Sequence[Any]) -> None:
    """Refuse caches whose rows cannot be a tree. Touches nothing.

    Raises:
        UnsupportedCacheError: one is of another kind.
    """
    for cache in _without_trees(caches):
        raise UnsupportedCacheError(
            f"A {type(cache).__name__} cannot hold a tree: that takes rows of keys and "
            "values, in a KVCache, QuantizedKVCache, SlidingKVCache or "
            "RotatingKVCache with keep=0. Leave draft_tree out for this model."
        )


def _without_trees(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        rows = isinstance(cache, KVCache | QuantizedKVCache | SlidingKVCache)
        if not rows and not (isinstance(cache, RotatingKVCache) and cache.keep == 0):
            yield cache


def tree_views(caches: Sequence[Any], rows: TreeRows) -> list[TreeView]:
    """Return what a model gets for caches that `check_trees` has passed."""
    return [TreeView(cache, rows) for cache in caches]


def move_rows(caches: Sequence[Any], written: int, rows: Sequence[int]) -> None:
    """Let the first of the rows that a round wrote be these, in this order.

    Rows of a tree's accepted path then stand one behind the other, and what comes
    behind them is to be dropped. Rows of before the round stay.

    Args:
        caches: live ones, of kinds that `check_trees` passes.
        written: how many rows the round wrote to each, in one forward.
        rows: which of them, from 0, each one larger than the one before.
    """
    kept = next((i for i, row in enumerate(rows) if row != i), len(rows))
    if kept == len(rows):
        return
    result: dict[int, mx.array] = {}  # by where the round began, the rows
    for cache in caches:
        start = _end(cache) - written
        if start not in result:
            result[start] = mx.array([start + row for row in rows[kept:]])
        place = slice(start + kept, start + len(rows))
        _move(cache.keys, result[start], place)
        _move(cache.values, result[start], place)


def _end(cache: Any) -> int:
    """Return behind which row of its buffers a cache ends."""
    if isinstance(cache, SlidingKVCache):
        return cache._end
    ring: Any = cache
    return int(ring._idx if isinstance(cache, RotatingKVCache) else cache.offset)


def _move(buffers: Any, rows: mx.array, place: slice) -> None:
    for buffer in [buffers] if isinstance(buffers, mx.array) else buffers:
        buffer[..., place, :] = buffer[..., rows, :]
