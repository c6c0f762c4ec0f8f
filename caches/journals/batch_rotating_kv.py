"""Journal of `BatchRotatingKVCache`: the window of every sequence of a batch.

How a write is undone (W is `max_size`, `_offset` counts positions for all rows):

    a write of                  what mlx-lm does                      undone by
    2 positions or more         new arrays: W-1 oldest kept + new     the old arrays
    1, no slot is left          new arrays: more slots, up to W       the old arrays
    1, _offset < W              an unused slot is filled              the indices
    1, more than W held         new arrays: cut to W, then a slot     the old arrays
    1, W held                   the oldest position is overwritten    the saved one

A part, even or ragged, is kept by undoing all and appending what is kept to each row:
with W = 6 and rows that held 9 and 3 positions, of which three more are written,

    commit([1, 3])      row 0 shows 5 .. 10, row 1 shows 1 .. 6     _idx 6, padding 0, 0
    commit([0, 1])      row 0 shows 4 .. 9,  row 1 shows 1 .. 4     _idx 6, padding 0, 2

So a row that keeps nothing gets back what others made room for, and no more than W
positions are ever held after a commit of a part: padding does not grow. Below W it is
bounded as in `caches.journals.batch_kv`. The price is one copy of the window; full
acceptance costs nothing. Positions that single writes overwrite are saved in blocks, as
in `caches.journals.rotating_kv`.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from mlx_speculation.caches.journal import Keep
from mlx_speculation.caches.journals.batch_kv import (
    check_no_right_padding,
    loose,
    moved,
    removable,
    set_loose,
)
from mlx_speculation.caches.journals.rotating_kv import (
    SAVED_ROWS,
    copied_slots,
    put_back,
)
from mlx_speculation.caches.journals.write_listener import ListenedTo, listened_to_by


@dataclass(slots=True)
class SavedSlots:
    """Slots of a full ring, copied before single writes overwrite them.

    `keys` and `values` are the arrays of the cache: single writes that a journal
    notes bring the new ones here. With any others the copy is stale. The references
    are weak, since a second one would make the next write copy the window.
    """

    keys: "weakref.ref[mx.array]"
    values: "weakref.ref[mx.array]"
    first_slot: int
    first_offset: int
    slots: mx.array  # [batch, heads, slots, key dim + value dim]

    def slot(self, index: int) -> mx.array:
        """Return what was saved of slot `index`, one position."""
        index -= self.first_slot
        return self.slots[..., index : index + 1, :]

    def holds(self, cache: Any, slot: int) -> bool:
        """Whether what is now in `slot` is among the saved ones."""
        index = slot - self.first_slot
        return (
            self.keys() is cache.keys
            and self.values() is cache.values
            and 0 <= index < self.slots.shape[2]
            and cache._offset - self.first_offset == index
        )


_saved: "weakref.WeakKeyDictionary[Any, SavedSlots]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class State:
    """All fields of the cache that a write replaces, besides the arrays."""

    offset: mx.array
    left_padding: mx.array
    index: int
    count: int
    rotated: bool

    @classmethod
    def of(cls, cache: Any) -> "State":
        """Note the fields; writes change `left_padding` in place, so it is copied."""
        padding = cache.left_padding[...]
        return cls(cache.offset, padding, cache._idx, cache._offset, cache.rotated)

    def restore(self, cache: Any) -> None:
        """Give the fields back."""
        cache.offset, cache.left_padding = self.offset, self.left_padding
        cache._idx, cache._offset = self.index, self.count
        cache.rotated = self.rotated


@dataclass(frozen=True, slots=True)
class Write:
    """One write: what was written, unless all is kept, and the cache before it."""

    width: int
    rows: tuple[mx.array, mx.array] | None
    before: State
    arrays: tuple[mx.array | None, mx.array | None] | None = None
    overwritten: tuple[int, SavedSlots] | None = None  # slot, where it is saved


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a commit of a part took the place of."""

    before: State
    arrays: tuple[mx.array | None, mx.array | None]
    loose: int


def _slot_about_to_go(cache: Any) -> tuple[int, SavedSlots]:
    """Return the slot that the next single write takes, with its content saved."""
    slot = 0 if cache._idx == cache.max_size else cache._idx
    saved = _saved.get(cache)
    if saved is None or not saved.holds(cache, slot):
        stop = min(slot + SAVED_ROWS, cache.max_size)
        slots = copied_slots(cache, slot, stop)
        arrays = weakref.ref(cache.keys), weakref.ref(cache.values)
        saved = SavedSlots(*arrays, slot, cache._offset, slots)
        _saved[cache] = saved
    return slot, saved


def _ordered(cache: Any) -> tuple[mx.array, mx.array]:
    """Return keys and values from the oldest position to the newest."""
    if cache.rotated:
        turn = -cache._idx
        return mx.roll(cache.keys, turn, 2), mx.roll(cache.values, turn, 2)
    return cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :]


class PresentedBatchRing(ListenedTo["BatchRotatingJournal"], BatchRotatingKVCache):
    """The live batch ring; its journal is called on every write."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Note the state before the write, then write as the native ring does.

        Args:
            keys: [batch, heads, positions, key dim].
            values: [batch, heads, positions, value dim].
        """
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
        """Return the native mask of the ring in order, where several are written.

        The native one forgets that such a write first turns a ring and drops the
        oldest position: it hides one position too many of a row with padding. In a
        round no position sees more than `max_size`, as in rotating.py.
        """
        if window_size is not None and N > 1 and not self.journal.whole:
            window_size = min(window_size, self.max_size)
        ring = self
        if N > 1 and self.rotated:
            ring = object.__new__(PresentedBatchRing)
            turned = {"_idx": self.max_size, "rotated": False}
            ring.__dict__ = {**self.__dict__, **turned}
        return BatchRotatingKVCache.make_mask(ring, N, window_size, return_array)


class BatchRotatingJournal:
    """Journal of one `BatchRotatingKVCache`.

    Args:
        cache: the live cache.
        whole: nothing but all or nothing will be kept, so what is written is not held.
    """

    live = True

    def __init__(self, cache: BatchRotatingKVCache, *, whole: bool = False) -> None:
        self._cache: Any = cache
        self.whole = whole
        self._writes: list[Write] = []
        self._replaced: Replaced | None = None
        self._presented = listened_to_by(self, PresentedBatchRing, cache)

    @property
    def presented(self) -> BatchRotatingKVCache:
        """The live ring, seen through `PresentedBatchRing`."""
        shown: BatchRotatingKVCache = self._presented
        return shown

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return int(self._cache.offset.shape[0])

    @property
    def written(self) -> int:
        """Positions appended to every row since the journal was opened."""
        return sum(write.width for write in self._writes)

    def note(self, keys: mx.array, values: mx.array) -> None:
        """Record the state before a write of these keys and values."""
        cache, width = self._cache, keys.shape[2]
        arrays, overwritten = None, None
        held = 0 if cache.keys is None else cache.keys.shape[2]
        grows = held <= cache._offset and held < cache.max_size
        if width > 1 or grows or held > cache.max_size:
            arrays = (cache.keys, cache.values)
            _saved.pop(cache, None)  # stale now, and it holds old slots
        elif cache.rotated or cache._idx == cache.max_size:
            overwritten = _slot_about_to_go(cache)
        rows = None if self.whole else (keys, values)
        write = Write(width, rows, State.of(cache), arrays, overwritten)
        self._writes.append(write)

    def noted(self) -> None:
        """Tell the saved slots of the arrays that a single write has made."""
        saved = _saved.get(self._cache)
        if saved is not None and self._writes[-1].overwritten is not None:
            saved.keys = weakref.ref(self._cache.keys)
            saved.values = weakref.ref(self._cache.values)

    def prepare(self, keep: Keep) -> None:
        """Refuse a part of a prompt that is padded on the right."""
        if self._writes and keep != self.written:
            check_no_right_padding(self._cache, self._cache._lengths)

    def commit(self, keep: Keep) -> None:
        """Undo every write, and append to each row what it keeps."""
        if keep == 0:
            self.rollback()
        elif self._writes and keep != self.written:
            each = [keep] * self.rows if isinstance(keep, int) else list(keep)
            rows = [write.rows for write in self._writes if write.rows is not None]
            keys, values = (
                mx.concatenate(list(parts), axis=2)[..., : max(each), :]
                for parts in zip(*rows, strict=True)
            )
            self._undo_all()
            arrays = (self._cache.keys, self._cache.values)
            before = State.of(self._cache)
            self._replaced = Replaced(before, arrays, loose(self._cache))
            self._append(keys, values, each)

    def rollback(self) -> None:
        """Take a commit of a part back, or undo every write, the last one first."""
        if self._replaced is not None:
            self._cache.keys, self._cache.values = self._replaced.arrays
            self._replaced.before.restore(self._cache)
            set_loose(self._cache, self._replaced.loose)
        self._undo_all()

    def _append(self, keys: mx.array, values: mx.array, keep: list[int]) -> None:
        """Append the first `keep[row]` positions to each row, in order."""
        cache, held = self._cache, 0
        padding = cache.left_padding[...]
        if cache.keys is not None:
            old_keys, old_values = _ordered(cache)
            held = old_keys.shape[2]
            keys = mx.concatenate([old_keys, keys], axis=2)
            values = mx.concatenate([old_values, values], axis=2)
        width = keys.shape[2] - removable(cache, padding, keep)
        width = min(width, cache.max_size)
        kept = mx.array(keep, dtype=cache.offset.dtype)
        right = width - held - kept
        cache.keys = moved(keys, right, width)
        cache.values = moved(values, right, width)
        cache.left_padding = mx.maximum(padding + right, 0)
        cache.offset = cache.offset + kept
        cache._idx = cache._offset = width
        cache.rotated = False
        cache.keys = mx.depends(cache.keys, (cache.left_padding, cache.offset))

    def _undo_all(self) -> None:
        while self._writes:
            self._undo_last()

    def _undo_last(self) -> None:
        cache, write = self._cache, self._writes[-1]
        if write.arrays is not None:
            cache.keys, cache.values = write.arrays
        elif write.overwritten is not None:
            slot, saved = write.overwritten
            put_back(cache, slot, saved.slot(slot))
        write.before.restore(cache)
        self._writes.pop()  # last: an interrupted undo is done again
