"""mlx-vlm's interface of recurrent caches, over mlx-lm's `ArraysCache`.

mlx-vlm's layers hand a cache the operation that makes a state, where mlx-lm's assign
the state. What is asked for here writes to mlx-lm's class, whose transaction and
snapshots are known; states after fewer rows are noted where a round may keep a part:

    update_window     a short convolution: the state after n rows is a view of its input
    update_recurrent  a scan: the operation returns the state after each row

A layer that assigns its states leaves no notes; a part of its rows is then kept by
running the model again.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.caches import RecordingArraysCache

# What stands for the operation that fills a slot: compared by identity.
_OPERATIONS = tuple(object() for _ in range(8))


@dataclass(frozen=True, slots=True)
class SlotCall:
    """One operation on one slot, see `RecordedCall`."""

    mixer: object
    width: int  # rows
    slot: int
    state_after: Callable[[int], mx.array]  # of a number of rows below `width`

    def replay(self, cache: Any, keep: int) -> None:
        """Give a cache the state after the first `keep` rows."""
        cache[self.slot] = self.state_after(keep)


class RecurrentSlots:
    """The states of one layer, as mlx-vlm's layers read and write them.

    It is made for one forward, so that what a model notes on it is of that forward.

    Args:
        cache: mlx-lm's cache, or what a transaction presents in its place.
    """

    is_speculating = False  # the transaction is ours
    history_capacity = 0
    metadata_revision = 0

    def __init__(self, cache: ArraysCache) -> None:
        self._cache = cache

    def __getitem__(self, slot: int) -> Any:
        return self._cache[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self._cache[slot] = value

    @property
    def cache(self) -> list[Any]:
        """The slots."""
        result: list[Any] = self._cache.cache
        return result

    @property
    def lengths(self) -> Any:
        """Rows left of each sequence of a batch; None: one sequence."""
        return self._cache.lengths

    @property
    def left_padding(self) -> Any:
        """Padding of each sequence of a batch; None: there is none."""
        return self._cache.left_padding

    @property
    def batch_size(self) -> int:
        """The number of sequences."""
        return int(self._cache.batch_size)

    def advance(self, rows: int) -> None:
        """Count rows that were processed."""
        self._cache.advance(rows)

    def make_mask(self, rows: int) -> Any:
        """Return a mask of `rows` rows; None: all are seen."""
        return self._cache.make_mask(rows)

    def update_recurrent(
        self,
        slot: int,
        length: int,
        update: Callable[[Any, int | None], tuple[Any, ...]],
    ) -> tuple[Any, Any]:
        """Run a state transition over `length` rows.

        Args:
            slot: of the state.
            length: rows.
            update: takes the state, and after how many rows states are to be returned;
                returns output, last state and those states [batch, n, ...].
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
        assert lengths is None, "one sequence has no lengths"
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
    """Return the caches as mlx-vlm's layers read them."""
    return [
        RecurrentSlots(cache) if isinstance(cache, ArraysCache) else cache
        for cache in caches
    ]
