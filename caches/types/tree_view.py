"""Caches as a model sees them while it is fed a tree instead of a chain.

Rows are written in the order in which they are fed, parents before children. Of the fed
rows, each sees only its ancestors and itself, and its depth gives its position:

    offset 7; rows 0 to 3; row 3 is a second child of row 0   parents  -  0  1  0
    row 3 sees positions 0 to 6, row 0 and itself             depths   0  1  2  1
    with a window of 4 it sees positions 5 and 6, row 0 and itself: its position is 8

This module makes the mask; the model rotates queries and keys by the rows' positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache
from mlx_speculation.errors import UnsupportedCacheError


class TreeRows(NamedTuple):
    """Rows of a forward that are a tree, or one level of a tree."""

    # bool [rows, columns]: True for a row's own column and those of its ancestors. The
    # last columns belong to these rows. The columns before them belong to rows that the
    # round has already written.
    seen: mx.array
    depths: mx.array  # int32 [rows], each row's position minus that of row 0
    # Added to the cache's offset to get row 0's position; negative if the round has
    # already written rows of other branches.
    shift: int = 0


class TreeView:
    """A view of one cache, with a tree's offset and mask; it has no rows of its own."""

    def __init__(self, cache: Any, rows: TreeRows) -> None:
        self._cache, self._rows = cache, rows

    @property
    def offset(self) -> int:
        """The position of the next row."""
        return int(self._cache.offset) + self._rows.shift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(
        self,
        N: int,  # noqa: N803  some models pass it by name
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array:
        """Return the mask of the rows, bool [rows, columns]; it honors a window."""
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
            # A window counts positions. Counted from column 0, the position of row i
            # is `before` + depths[i]. The rows are a whole tree here: only heads write
            # a tree level by level, and heads with windows draft none.
            reach = rows.depths[:, None] - window
            seen = mx.arange(before)[None] > before + reach
            visible = visible & (rows.depths[None] > reach)
        mask = mx.concatenate([seen, visible], axis=1)
        # If the cache pads its keys, there are more columns than written rows.
        shown: int = written if native is None else native.shape[-1]
        return mx.pad(mask, [(0, 0), (0, shown - written)])


def holds_trees(caches: Sequence[Any]) -> bool:
    """Return whether the rows of these caches can be a tree."""
    return next(_without_trees(caches), None) is None


def check_trees(caches: Sequence[Any]) -> None:
    """Raise UnsupportedCacheError if a cache is of a kind that holds no trees."""
    for cache in _without_trees(caches):
        raise UnsupportedCacheError(
            f"A {type(cache).__name__} cannot hold a draft tree; a KVCache, "
            "QuantizedKVCache, SlidingKVCache or RotatingKVCache with keep=0 can. "
            "Leave draft_tree out for this model."
        )


def _without_trees(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        rows = isinstance(cache, KVCache | QuantizedKVCache | SlidingKVCache)
        if not rows and not (isinstance(cache, RotatingKVCache) and cache.keep == 0):
            yield cache


def tree_views(caches: Sequence[Any], rows: TreeRows) -> list[TreeView]:
    """Return views, to pass to a model, of caches that `check_trees` allows."""
    return [TreeView(cache, rows) for cache in caches]


def move_rows(caches: Sequence[Any], written: int, rows: Sequence[int]) -> None:
    """Move some rows of a round to the places of the round's first rows.

    The caches are those that `check_trees` allows. The round wrote `written` rows to
    each, in one forward. `rows` are indices among the written rows, in rising order.
    The caller then drops the rows after the moved ones.
    """
    kept = next((i for i, row in enumerate(rows) if row != i), len(rows))
    if kept == len(rows):
        return
    result: dict[int, mx.array] = {}  # indices to move, by `start`
    for cache in caches:
        start = _end(cache) - written
        if start not in result:
            result[start] = mx.array([start + row for row in rows[kept:]])
        place = slice(start + kept, start + len(rows))
        _move(cache.keys, result[start], place)
        _move(cache.values, result[start], place)


def _end(cache: Any) -> int:
    """Return the index after a cache's last row in its buffers."""
    if isinstance(cache, SlidingKVCache):
        return cache._end
    ring: Any = cache
    return int(ring._idx if isinstance(cache, RotatingKVCache) else cache.offset)


def _move(buffers: Any, rows: mx.array, place: slice) -> None:
    for buffer in [buffers] if isinstance(buffers, mx.array) else buffers:
        buffer[..., place, :] = buffer[..., rows, :]
