"""Base of the journals of rings: records each write, and can undo the last one.

A ring is a `RotatingKVCache` or `BatchRotatingKVCache`. The kind of write decides how
it is undone. W is `max_size`:

    a write of                  what mlx-lm does                      undone by
    2 positions or more         new arrays: the last W-1 + the new    the old arrays
    1, all of < W slots used    new arrays: more slots, up to W       the old arrays
    1, a slot is unused         an unused slot is filled              the indices
    1, more than W held         new arrays: W slots, one overwritten  the old arrays
    1, W held                   the oldest position is overwritten    the saved one

A position has to be copied before a write overwrites it, but a lazy slice of it would
make the write copy the whole window. So `SAVED_ROWS` positions are saved at once: then
only one write in `SAVED_ROWS` copies the window.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.journals.live import LiveJournal, listened_to_by

SAVED_ROWS = 64


@dataclass(slots=True)
class SavedSlots:
    """Slots of a full ring, copied before single writes overwrite them.

    `keys` and `values` refer to the cache's arrays. Each recorded single write renews
    both references. If the cache has other arrays, the copy is stale. The references
    are weak, since a strong one would make the next write copy the window.
    """

    keys: "weakref.ref[mx.array]"
    values: "weakref.ref[mx.array]"
    first_slot: int  # the first of the saved slots
    first_count: int  # positions ever written when the slots were saved
    slots: mx.array  # [batch, heads, slots, key dim + value dim]

    def slot(self, index: int) -> mx.array:
        """Return the saved position of slot `index`."""
        index -= self.first_slot
        return self.slots[..., index : index + 1, :]

    def holds(self, cache: Any, slot: int, count: int) -> bool:
        """Return whether `slot` is saved as it is after `count` written positions."""
        index = slot - self.first_slot
        return (
            self.keys() is cache.keys
            and self.values() is cache.values
            and 0 <= index < self.slots.shape[2]
            and count - self.first_count == index
        )


_saved: "weakref.WeakKeyDictionary[Any, SavedSlots]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Write:
    """One write and the cache before it."""

    width: int  # positions written
    # The written keys and values; None: not needed to keep a part of the write.
    rows: tuple[mx.array, mx.array] | None
    fields: dict[str, Any]  # the ring's other fields before the write
    # The cache's keys and values before the write, if the write makes new arrays.
    arrays: tuple[mx.array | None, mx.array | None] | None
    # The slot that the write overwrites, and the saved slots with its old content.
    overwritten: tuple[int, SavedSlots] | None


class RingJournal(LiveJournal):
    """Record of the writes to one ring; the model gets a view of class `presented`."""

    # The fields that a write replaces, besides the arrays; the first counts the
    # positions that were ever written.
    names: tuple[str, ...]

    def __init__(self, cache: Any, whole: bool, presented: type) -> None:
        self._cache = cache
        self.whole = whole
        self._writes: list[Write] = []
        self.presented = listened_to_by(self, presented, cache)

    @property
    def count(self) -> int:
        """Number of positions ever written to the ring, the same for all rows."""
        return int(getattr(self._cache, self.names[0]))

    @property
    def written(self) -> int:
        """Positions appended since the journal was opened."""
        return sum(write.width for write in self._writes)

    def note(self, keys: mx.array, values: mx.array) -> None:
        """Record the state before a write of these keys and values."""
        cache, width = self._cache, keys.shape[2]
        arrays, overwritten = None, None
        columns = 0 if cache.keys is None else cache.keys.shape[2]
        grows = columns <= self.count and columns < cache.max_size
        if width > 1 or grows or columns > cache.max_size:
            arrays = cache.keys, cache.values
            _saved.pop(cache, None)  # the write makes them stale
        elif self.count >= cache.max_size:
            overwritten = self._slot_about_to_go()
        rows = self._rows_to_hold(keys, values)
        write = Write(width, rows, self._fields(), arrays, overwritten)
        self._writes.append(write)

    def noted(self) -> None:
        """Update the saved slots' references to the arrays after a single write."""
        saved = _saved.get(self._cache)
        if saved is not None and self._writes[-1].overwritten is not None:
            saved.keys = weakref.ref(self._cache.keys)
            saved.values = weakref.ref(self._cache.values)

    def rollback(self) -> None:
        """Undo every write, the last one first."""
        while self._writes:
            self._undo_last()

    def _fields(self) -> dict[str, Any]:
        fields = {name: getattr(self._cache, name) for name in self.names}
        if "left_padding" in fields:  # writes change this array in place
            fields["left_padding"] = fields["left_padding"][...]
        return fields

    def _rows_to_hold(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        """Return the arrays needed to keep a part of a write; None: none needed."""
        return None

    def _slot_about_to_go(self) -> tuple[int, SavedSlots]:
        """Return the slot that the next single write overwrites, and its saved copy."""
        cache, count = self._cache, self.count
        first = getattr(cache, "keep", 0)  # earlier slots are never overwritten
        slot = first if cache._idx == cache.max_size else cache._idx
        saved = _saved.get(cache)
        if saved is None or not saved.holds(cache, slot, count):
            slots = _copied(cache, slot, min(slot + SAVED_ROWS, cache.max_size))
            arrays = weakref.ref(cache.keys), weakref.ref(cache.values)
            saved = _saved[cache] = SavedSlots(*arrays, slot, count, slots)
        return slot, saved

    def _undo_last(self) -> None:
        cache, write = self._cache, self._writes[-1]
        if write.arrays is not None:
            cache.keys, cache.values = write.arrays
        elif write.overwritten is not None:
            slot, saved = write.overwritten
            key_dim, row = cache.keys.shape[-1], saved.slot(slot)
            cache.keys[..., slot : slot + 1, :] = row[..., :key_dim]
            cache.values[..., slot : slot + 1, :] = row[..., key_dim:]
        vars(cache).update(write.fields)
        self._forget_undone_slots()
        self._writes.pop()  # after the undo, so that an interrupted one is repeated

    def _forget_undone_slots(self) -> None:
        """Drop the saved slots if writes from before the save were undone."""
        saved = _saved.get(self._cache)
        # The next writes can put other positions into these slots.
        if saved is not None and self.count < saved.first_count:
            del _saved[self._cache]


def _copied(cache: Any, start: int, stop: int) -> mx.array:
    """Copy slots without waiting: [batch, heads, stop - start, key dim + value dim]."""
    slots = mx.concatenate(
        [cache.keys[..., start:stop, :], cache.values[..., start:stop, :]], axis=-1
    )
    mx.async_eval(slots)
    return slots
