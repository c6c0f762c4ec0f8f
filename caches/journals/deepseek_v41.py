"""Journal of DeepSeek V4.1's `LayerCache`: a window, compressed groups, an open group.

The layer's compressor turns each group of `ratio` rows into one; the rows of a group
that is not full are pending. Every write makes new arrays. So the journal keeps only
references to the state before a write. After a prefix of a write the layer holds:

    field                       after the prefix
    window                      the old window and the first rows of the write
    compress_kv, index_k        a slice of the new arrays: the groups full by then
    pending_kv, pending_gate    the rows of the group that was open then

Rows that were pending after a prefix can be gone after the whole write, since their
group has become full. So the journal records the compressor's call and runs it again
over the prefix, as `ArraysJournal` does with mixers. The compressor's hook
(`mlx_speculation.models`) calls `RecordingLayerCache.record`. `written` is None if a
call was not recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.journals.arrays import RecordedCall
from mlx_speculation.caches.journals.live import LiveJournal, sharing
from mlx_speculation.errors import SpeculationClosedError

_COMPRESSED = ("compress_kv", "index_k", "pending_kv", "pending_gate")


def copied(cache: LayerCache) -> LayerCache:
    """Copy all fields by reference."""
    twin = object.__new__(LayerCache)
    assign(twin, cache)
    return twin


def assign(target: LayerCache, source: LayerCache) -> None:
    """Give `target` the state of `source`, in one step."""
    vars(target).update(vars(source))


def _rows(array: mx.array | None) -> int:
    return 0 if array is None else array.shape[1]


@dataclass(slots=True)
class LayerWrite:
    """One forward: the state before it, the new rows, the compressor's call."""

    before: LayerCache
    rows: mx.array  # [batch, n, dim]
    call: RecordedCall | None = None

    @property
    def width(self) -> int:
        """Positions that the forward processed."""
        return self.rows.shape[1]

    def explains(self, after: LayerCache) -> bool:
        """Return whether recorded calls account for all changes up to `after`."""
        return self.call is not None or all(
            getattr(self.before, name) is getattr(after, name) for name in _COMPRESSED
        )

    def prefix(self, after: LayerCache, keep: int) -> LayerCache:
        """Return the state after `keep` positions; `after` is the state after all."""
        state: Any = copied(self.before)
        if keep == 0:
            return state  # type: ignore[no-any-return]
        state.update_window(self.rows[:, :keep])
        if self.call is not None:
            self.call.replay(state, keep)
            groups = self._groups_closed(after, keep)
            for name in ("compress_kv", "index_k"):
                grown, old = getattr(after, name), getattr(self.before, name)
                if groups and grown is not None:
                    setattr(state, name, grown[:, : _rows(old) + groups])
        return state  # type: ignore[no-any-return]

    def _groups_closed(self, after: LayerCache, keep: int) -> int:
        pending = _rows(self.before.pending_kv)
        closed = _rows(after.compress_kv) - _rows(self.before.compress_kv)
        if closed == 0:
            return 0
        ratio = (pending + self.width - _rows(after.pending_kv)) // closed
        return (pending + keep) // ratio


class RecordingLayerCache(LayerCache):
    """A view of the live cache that records each write in its own slot `writes`."""

    __slots__ = ("writes",)
    writes: list[LayerWrite]

    def update_window(self, kv: mx.array) -> mx.array:
        """Record the state before a write of kv [batch, n, dim], then write."""
        self.writes.append(LayerWrite(copied(self), kv))
        return super().update_window(kv)

    @contextmanager
    def record(self, call: RecordedCall) -> Iterator[None]:
        """Record the compressor's call for the last write of the window."""
        if self.writes:
            self.writes[-1].call = call
        yield


class LayerJournal(LiveJournal):
    """Journal of one `LayerCache`; `whole`: nothing is recorded, a commit keeps all."""

    def __init__(self, cache: LayerCache, whole: bool = False) -> None:
        self._cache = cache
        self._before = copied(cache)
        self._after: LayerCache | None = None
        self._writes: list[LayerWrite] | None = None
        self.presented = cache
        if not whole:
            self.presented = sharing(cache, RecordingLayerCache)
            self._writes = self.presented.writes = []

    @property
    def written(self) -> int | None:
        """Positions written; None if a call of the compressor was not recorded."""
        total = self._cache.offset - self._before.offset
        writes = self._writes
        if writes is None:
            return total
        states = [self._before, *(write.before for write in writes), self._cache]
        first = all(
            getattr(states[0], name) is getattr(states[1], name) for name in _COMPRESSED
        )
        pairs = zip(writes, states[2:], strict=True)
        known = first and all(write.explains(after) for write, after in pairs)
        return total if known else None

    def prepare(self, keep: int) -> None:
        """Build the state after `keep` positions in a copy, without evaluating it."""
        self._after = copied(self._cache)
        writes = self._writes or []
        for index, write in enumerate(writes):
            if keep < write.width:
                last = index + 1 == len(writes)
                after = self._cache if last else writes[index + 1].before
                self._after = write.prefix(after, keep)
                return
            keep -= write.width

    def commit(self, keep: int) -> None:
        """Give the live cache the prepared state."""
        if self._after is None:
            raise SpeculationClosedError("commit(keep) needs prepare(keep) before it.")
        assign(self._cache, self._after)

    def rollback(self) -> None:
        """Give the live cache its old state."""
        assign(self._cache, self._before)
