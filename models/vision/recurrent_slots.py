"""mlx-vlm's interface of recurrent caches, over mlx-lm's `ArraysCache`.

mlx-lm's layers assign states to a cache, but mlx-vlm's layers pass the cache an
operation that makes a state. `RecurrentSlots` runs the operation and writes to mlx-lm's
class, which this library can roll back. In a round it also records the states after
fewer rows, for a commit of only the first rows:

    update_window     a short convolution: its input contains the state after each row
    update_recurrent  a scan: the operation returns the state after each row

Nothing is recorded for a layer that assigns its states. A model with such a layer runs
again for a commit of only the first rows.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.caches import RecordingArraysCache

# Stand for the operations that fill the slots; compared by identity.
_OPERATIONS = tuple(object() for _ in range(8))


@dataclass(frozen=True, slots=True)
class SlotCall:
    """One operation on one slot (an entry of the cache), see `RecordedCall`."""

    mixer: object
    width: int  # the number of rows
    slot: int
    state_after: Callable[[int], mx.array]  # takes a number of rows below `width`

    def replay(self, cache: Any, keep: int) -> None:
        """Write the state after the first `keep` rows to a cache."""
        cache[self.slot] = self.state_after(keep)


class RecurrentSlots:
    """The states of one layer, as mlx-vlm's layers read and write them.

    Each forward makes a new object, so that attributes set by a model do not outlive
    the forward. `cache` is mlx-lm's, or the one that a `Speculation` puts in its place.
    """

    is_speculating = False  # this library rolls back, not mlx-vlm
    history_capacity = 0
    metadata_revision = 0

    def __init__(self, cache: ArraysCache) -> None:
        self._cache = cache

    def __getitem__(self, slot: int) -> Any:
        return self._cache[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self._cache[slot] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no cache yet
            raise AttributeError(name)
        return getattr(self._cache, name)  # lengths, padding, masks

    def update_recurrent(
        self,
        slot: int,
        length: int,
        update: Callable[[Any, int | None], tuple[Any, ...]],
    ) -> tuple[Any, Any]:
        """Run a state transition over `length` rows.

        `update` takes the state in the slot, and a number n or None. It returns the
        output, the last state and, unless n is None, the state after each of the first
        n rows, [batch, n, ...].
        """
        steps = length - 1 if self._notes and length > 1 else None
        output, state, *rest = update(self._cache[slot], steps)
        states: Any = rest[0] if rest else None
        self._write(slot, state, length, lambda keep: states[:, keep - 1])
        return output, state

    def update_window(
        self, slot: int, source: mx.array, width: int, *, lengths: Any = None
    ) -> mx.array:
        """Keep the last `width` rows of `source` [batch, width + rows, ...]."""
        assert lengths is None, "`lengths` is for batches"
        rows = source.shape[1] - width

        def after(keep: int) -> mx.array:
            return mx.contiguous(source[:, keep : keep + width])

        state = after(rows)
        self._write(slot, state, rows, after)
        return state

    @property
    def _notes(self) -> bool:
        return isinstance(self._cache, RecordingArraysCache)

    def _write(
        self,
        slot: int,
        state: mx.array,
        rows: int,
        state_after: Callable[[int], mx.array],
    ) -> None:
        cache: Any = self._cache
        call = SlotCall(_OPERATIONS[slot], rows, slot, state_after)
        noted = isinstance(cache, RecordingArraysCache)
        with cache.record(call) if noted else nullcontext():
            cache[slot] = state


def with_slots(caches: list[Any]) -> list[Any]:
    """Return the caches with mlx-vlm's interface."""
    return [
        RecurrentSlots(cache) if isinstance(cache, ArraysCache) else cache
        for cache in caches
    ]
