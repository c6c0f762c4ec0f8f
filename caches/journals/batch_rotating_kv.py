"""Journal of `BatchRotatingKVCache`: the sliding windows of the rows of a batch.

`caches.journals.ring` undoes whole writes. To commit a part of a round, this journal
undoes all writes and then appends to each row the positions that the row keeps. This
copies the window once. An example: the window is 6, the rows have positions 1 .. 9 and
1 .. 3, and a round writes three more to each:

    commit([1, 3])      row 0 holds 5 .. 10, row 1 holds 1 .. 6     _idx 6, padding 0, 0
    commit([0, 1])      row 0 holds 4 .. 9,  row 1 holds 1 .. 4     _idx 6, padding 0, 2

After a commit of a part the buffer has at most as many columns as the window. Before
the window is full, padding that all rows share is dropped, as in `journals.batch_kv`.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from mlx_speculation.caches.journal import Keep
from mlx_speculation.caches.journals.batch_kv import (
    check_no_right_padding,
    moved,
    shared_padding,
)
from mlx_speculation.caches.journals.live import ListenedTo
from mlx_speculation.caches.journals.ring import RingJournal


def _ordered(cache: Any) -> tuple[mx.array, mx.array]:
    """Return keys and values from the oldest position to the newest."""
    if cache.rotated:
        turn = -cache._idx
        return mx.roll(cache.keys, turn, 2), mx.roll(cache.values, turn, 2)
    return cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :]


class PresentedBatchRing(ListenedTo["BatchRotatingJournal"], BatchRotatingKVCache):
    """View of the live batch ring; calls its journal at every write."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Record the state before the write, then write as mlx-lm does."""
        self.journal.note(keys, values)
        shown = super().update_and_fetch(keys, values)
        self.journal.noted()
        return shown

    def make_mask(
        self,
        N: int,  # noqa: N803  mlx-lm's name
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """Return mlx-lm's mask; for several positions, the mask of the ordered ring.

        A write of several positions first puts the ring in order and drops the oldest
        position. mlx-lm's mask ignores the drop, so it hides one position too many of a
        row with padding. In a round no position sees more than `max_size` positions, as
        in rotating_kv.py.
        """
        if window_size is not None and N > 1 and not self.journal.whole:
            window_size = min(window_size, self.max_size)
        ring = self
        if N > 1 and self.rotated:
            ring = object.__new__(PresentedBatchRing)
            turned = {"_idx": self.max_size, "rotated": False}
            ring.__dict__ = {**self.__dict__, **turned}
        return BatchRotatingKVCache.make_mask(ring, N, window_size, return_array)


class BatchRotatingJournal(RingJournal):
    """Journal of one `BatchRotatingKVCache`; see `RingJournal`."""

    names = ("_offset", "offset", "left_padding", "_idx", "rotated")

    def __init__(self, cache: BatchRotatingKVCache, whole: bool = False) -> None:
        super().__init__(cache, whole, PresentedBatchRing)
        self._replaced: dict[str, Any] = {}  # the fields before a commit of a part

    @property
    def rows(self) -> int:
        """Number of sequences in the batch."""
        return int(self._cache.offset.shape[0])

    def prepare(self, keep: Keep) -> None:
        """Refuse to keep a part of a prompt that is padded on the right."""
        if self._writes and keep != self.written:
            check_no_right_padding(self._cache, self._cache._lengths)

    def commit(self, keep: Keep) -> None:
        """Keep the first `keep` positions of each row."""
        if not self._writes or keep == self.written:
            return
        each = [keep] * self.rows if isinstance(keep, int) else list(keep)
        rows = [write.rows for write in self._writes if write.rows is not None]
        keys, values = (
            mx.concatenate(list(parts), axis=2)[..., : max(each), :]
            for parts in zip(*rows, strict=True)
        )
        super().rollback()
        cache = self._cache
        arrays = {"keys": cache.keys, "values": cache.values}
        self._replaced = arrays | self._fields()
        self._append(keys, values, each)

    def rollback(self) -> None:
        """Undo a commit of a part, then every write, the last one first."""
        vars(self._cache).update(self._replaced)
        super().rollback()

    def _rows_to_hold(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        return None if self.whole else (keys, values)

    def _append(self, keys: mx.array, values: mx.array, keep: list[int]) -> None:
        """Append the first `keep[row]` positions to each row, in order."""
        cache, columns = self._cache, 0
        padding = cache.left_padding[...]
        if cache.keys is not None:
            old_keys, old_values = _ordered(cache)
            columns = old_keys.shape[2]
            keys = mx.concatenate([old_keys, keys], axis=2)
            values = mx.concatenate([old_values, values], axis=2)
        width = keys.shape[2] - shared_padding(padding, keep)
        width = min(width, cache.max_size)
        kept = mx.array(keep, dtype=cache.offset.dtype)
        right = width - columns - kept
        cache.keys = moved(keys, right, width)
        cache.values = moved(values, right, width)
        cache.left_padding = mx.maximum(padding + right, 0)
        cache.offset = cache.offset + kept
        cache._idx = cache._offset = width
        cache.rotated = False
        cache.keys = mx.depends(cache.keys, (cache.left_padding, cache.offset))
