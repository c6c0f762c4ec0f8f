"""Journal of `RotatingKVCache`, before and after the window has wrapped.

How the ring writes decides how a write is undone (W is `max_size`):

    a write of                  what mlx-lm does                      undone by
    2 rows or more              new arrays: W-1 oldest kept + rows    the old arrays
    1 row, no slot is left      new arrays: more slots, up to W       the old arrays
    1 row, offset < W           an unused slot is filled              the indices
    1 row, more than W held     new arrays: cut to W, then a slot     the old arrays
    1 row, W held               the oldest row is overwritten         the saved row

A row that is written alone sees the last W rows, whatever window the model asks for.
Several rows would see more where it asks for a larger one (plamo3 asks for W + 1). In
a round each of them stands for a row written alone, so the mask is cut to W there. With
`keep` above 0 a row written alone sees the first `keep` rows and the last W - keep,
and several rows would lose sight of the first ones, so in a round they get a mask of
ours. A prompt, of which all is kept, gets the native mask.

A prefix of a write of several rows is kept by slicing off its tail: what mlx-lm
evicted before the write is then still not needed, because at least W-1 older rows
and the first kept one remain. `RotatingKVCache.trim` is not used: after a wrap it
leaves rejected rows visible.

The overwritten row has to be copied before the write, and a slice that is not yet
evaluated would make the write copy the whole window. So rows are saved in blocks of
`SAVED_ROWS` before their turn: one window copy in that many writes.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches.journals.write_listener import ListenedTo, listened_to_by

SAVED_ROWS = 64


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows of a full ring, copied before single-row writes overwrite them.

    `keys` and `values` are the very array objects of the cache: writes of one row
    keep the objects, every other change replaces them, and the copy is then stale.
    """

    keys: mx.array
    values: mx.array
    first_slot: int
    first_offset: int
    rows: mx.array  # [batch, heads, rows, key dim + value dim]

    def row(self, slot: int) -> mx.array:
        """Return the saved row of `slot`, [batch, heads, 1, key dim + value dim]."""
        index = slot - self.first_slot
        return self.rows[..., index : index + 1, :]

    def holds(self, cache: RotatingKVCache, slot: int) -> bool:
        """Whether the row now in `slot` is among the saved ones."""
        index = slot - self.first_slot
        return (
            self.keys is cache.keys
            and self.values is cache.values
            and 0 <= index < self.rows.shape[2]
            and cache.offset - self.first_offset == index
        )


@dataclass(frozen=True, slots=True)
class Write:
    """One write and the state of the cache before it."""

    width: int
    offset: int
    index: int
    arrays: tuple[mx.array | None, mx.array | None] | None = None
    overwritten: "tuple[int, SavedRows] | None" = None  # slot, where its row is saved


_saved: "weakref.WeakKeyDictionary[RotatingKVCache, SavedRows]" = (
    weakref.WeakKeyDictionary()
)


def copied_slots(cache: Any, start: int, stop: int) -> mx.array:
    """Copy slots, [batch, heads, stop - start, key dim + value dim], and wait for none.

    Args:
        cache: a ring of one sequence or of a batch.
        start: the first slot.
        stop: the slot after the last.
    """
    slots = mx.concatenate(
        [cache.keys[..., start:stop, :], cache.values[..., start:stop, :]], axis=-1
    )
    mx.async_eval(slots)
    return slots


def put_back(cache: Any, slot: int, row: mx.array) -> None:
    """Write one row of `copied_slots` to the slot that it is of."""
    key_dim = cache.keys.shape[-1]
    cache.keys[..., slot : slot + 1, :] = row[..., :key_dim]
    cache.values[..., slot : slot + 1, :] = row[..., key_dim:]


def _row_about_to_go(cache: Any) -> tuple[int, SavedRows]:
    """Return the slot that the next single-row write takes, with its row saved."""
    slot = cache.keep if cache._idx == cache.max_size else cache._idx
    saved = _saved.get(cache)
    if saved is None or not saved.holds(cache, slot):
        stop = min(slot + SAVED_ROWS, cache.max_size)
        rows = copied_slots(cache, slot, stop)
        saved = SavedRows(cache.keys, cache.values, slot, cache.offset, rows)
        _saved[cache] = saved
    return slot, saved


def _forget_undone_rows(cache: Any) -> None:
    """Drop a block of saved rows of which some may have been undone since.

    It holds rows from before `first_offset`; below that, others take their slots.
    """
    saved = _saved.get(cache)
    if saved is not None and cache.offset < saved.first_offset:
        del _saved[cache]


class PresentedRing(ListenedTo["RotatingJournal"], RotatingKVCache):
    """The live ring; its journal is called on every write, and no row sees too much."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Note the state before the write, then write as the native ring does.

        Args:
            keys: [batch, heads, rows, key dim].
            values: [batch, heads, rows, value dim].
        """
        self.journal.note(keys.shape[2])
        return super().update_and_fetch(keys, values)

    def make_mask(
        self,
        N: int,  # noqa: N803  models may name it
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """Return the native mask; in a round, one by which rows see as if alone."""
        if self.journal.whole:
            return super().make_mask(N, window_size, return_array)
        if window_size is not None:
            window_size = min(window_size, self.max_size)
        wraps = self.offset + N > self.max_size
        if self.keep and N > 1 and wraps and window_size in (None, self.max_size):
            return _mask_with_first_rows(self, N)
        return super().make_mask(N, window_size, return_array)


def _mask_with_first_rows(cache: Any, count: int) -> mx.array:
    """Return what `count` rows see: the first `keep` rows, and the last of the others.

    Returns:
        bool [count, columns], for the columns that a write of several rows leaves.
    """
    held = min(cache.max_size - 1, cache.offset)
    columns = mx.arange(held + count)[None]
    rows = mx.arange(held, held + count)[:, None]
    recent = rows < columns + cache.max_size - cache.keep
    seen: mx.array = (rows >= columns) & (recent | (columns < cache.keep))
    return seen


class RotatingJournal:
    """Journal of one `RotatingKVCache` with any `keep`.

    Args:
        cache: the live ring.
        whole: all that is written will be kept, or nothing.
    """

    live = True

    def __init__(self, cache: RotatingKVCache, *, whole: bool = False) -> None:
        self._cache = cache
        self.whole = whole
        self._writes: list[Write] = []
        self._presented = listened_to_by(self, PresentedRing, cache)

    @property
    def presented(self) -> RotatingKVCache:
        """The live ring, seen through `PresentedRing`."""
        shown: RotatingKVCache = self._presented
        return shown

    @property
    def written(self) -> int:
        """Rows appended since the journal was opened."""
        return sum(write.width for write in self._writes)

    def note(self, width: int) -> None:
        """Record the state before a write of `width` rows."""
        cache = self._cache
        arrays, overwritten = None, None
        held = 0 if cache.keys is None else cache.keys.shape[2]
        grows = held <= cache.offset < cache.max_size
        if width > 1 or grows or held > cache.max_size:
            arrays = (cache.keys, cache.values)
            _saved.pop(cache, None)  # stale now, and it holds the old arrays
        elif cache.offset >= cache.max_size:
            overwritten = _row_about_to_go(cache)
        self._writes.append(Write(width, cache.offset, cache._idx, arrays, overwritten))

    def prepare(self, keep: int) -> None:
        """Nothing can fail."""

    def commit(self, keep: int) -> None:
        """Undo whole writes from the end, then slice the tail of the last one."""
        excess = self.written - keep
        while excess > 0 and excess >= self._writes[-1].width:
            excess -= self._writes[-1].width
            self._undo_last()
        if excess > 0:
            self._slice_tail(excess)

    def rollback(self) -> None:
        """Undo every write, the last one first."""
        while self._writes:
            self._undo_last()

    def _undo_last(self) -> None:
        cache: Any = self._cache
        write = self._writes[-1]
        if write.arrays is not None:
            cache.keys, cache.values = write.arrays
        elif write.overwritten is not None:
            slot, saved = write.overwritten
            put_back(cache, slot, saved.row(slot))
        cache.offset, cache._idx = write.offset, write.index
        _forget_undone_rows(cache)
        self._writes.pop()  # last: an interrupted undo is done again

    def _slice_tail(self, rows: int) -> None:
        cache: Any = self._cache
        stop = cache._idx - rows
        cache.keys = cache.keys[..., :stop, :]
        cache.values = cache.values[..., :stop, :]
        cache._idx = stop
        cache.offset -= rows
