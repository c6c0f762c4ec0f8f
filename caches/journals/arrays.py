"""Journal of `ArraysCache`, the state of recurrent and convolution mixers.

A recurrent state has no rows to cut off. The model writes to a copy of the slot list,
so the live cache keeps references to the old states. The copy also records the inputs
of the mixers. To get the state after an accepted prefix, the mixers run again from the
old state over that prefix. A prefix that ends between two forwards needs no replay.

If the rows of a batch keep different numbers of positions, the mixers run over the
whole batch once for each of these numbers, except 0 and the number of all positions.
Each row takes the result for the number that it keeps.

The hooks of the mixers (`mlx_speculation.models`) call `RecordingArraysCache.record`.
If a slot was written outside of a recorded call, only all positions or none can be
kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.caches.journal import Keep
from mlx_speculation.errors import SpeculationClosedError


class RecordedCall(Protocol):
    """One call of a mixer, with its inputs."""

    @property
    def mixer(self) -> object:
        """The mixer, compared by identity."""
        ...

    @property
    def width(self) -> int:
        """Positions that the call processed."""
        ...

    def replay(self, cache: Any, keep: int) -> None:
        """Run the mixer over the first `keep` positions; read and write `cache`."""
        ...


def copied(cache: ArraysCache) -> ArraysCache:
    """Copy the slots by reference, and `lengths` and `left_padding` by value."""
    twin = ArraysCache(len(cache.cache))
    assign(twin, cache)
    return twin


def assign(target: ArraysCache, source: ArraysCache) -> None:
    """Give `target` the state of `source`."""
    target.cache = list(source.cache)
    # `ArraysCache.advance` changes `lengths` and `left_padding` in place.
    target.lengths = None if source.lengths is None else mx.array(source.lengths)
    padding = source.left_padding
    target.left_padding = None if padding is None else mx.array(padding)


@dataclass(slots=True)
class Forward:
    """One forward of the model: the state before it, and its mixers' calls."""

    before: ArraysCache
    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Positions that the forward processed."""
        return self.calls[0].width


class RecordingArraysCache(ArraysCache):
    """A copy of an `ArraysCache` that also records the inputs of its mixers."""

    def __init__(self, cache: ArraysCache) -> None:
        super().__init__(len(cache.cache))
        assign(self, cache)
        self.forwards: list[Forward] = []
        self.written_unrecorded = False
        self._recording = False

    def __setitem__(self, idx: int, value: mx.array) -> None:
        if not self._recording:
            self.written_unrecorded = True
        super().__setitem__(idx, value)

    @contextmanager
    def record(self, call: RecordedCall) -> Iterator[None]:
        """Record `call`; writes inside the `with` block count as recorded."""
        seen = self.forwards and any(
            earlier.mixer is call.mixer for earlier in self.forwards[-1].calls
        )
        if not self.forwards or seen:  # the next forward begins
            self.forwards.append(Forward(before=copied(self)))
        self.forwards[-1].calls.append(call)
        self._recording = True
        try:
            yield
        finally:
            self._recording = False


def chosen(states: dict[int, ArraysCache], keep: Sequence[int]) -> Any:
    """Return a state in which each row comes from `states[keep[row]]`."""
    first, *others = states
    result: Any = copied(states[first])
    for number in others:
        here = mx.array([kept == number for kept in keep])
        other: Any = states[number]
        for slot, value in enumerate(result.cache):
            result[slot] = _where(here, other[slot], value)
        lengths = _where(here, other.lengths, result.lengths)
        padding = _where(here, other.left_padding, result.left_padding)
        result.lengths, result.left_padding = lengths, padding
    return result


def _where(
    here: mx.array, one: mx.array | None, two: mx.array | None
) -> mx.array | None:
    """Return `one` [batch, ...] in the rows where `here` [batch] holds, else `two`."""
    filled = two if one is None else one
    if filled is None:
        return None
    here = here.reshape(-1, *[1] * (filled.ndim - 1))
    # A slot without a value counts as zeros, as in mlx-lm's merge of rows.
    one = mx.zeros_like(filled) if one is None else one
    return mx.where(here, one, mx.zeros_like(filled) if two is None else two)


class ArraysJournal:
    """Journal of one `ArraysCache`; `whole`: the mixers' inputs are not recorded."""

    live = False

    def __init__(self, cache: ArraysCache, whole: bool = False) -> None:
        self._cache = cache
        self._before = copied(cache)
        self._after: ArraysCache | None = None
        self.presented = copied(cache) if whole else RecordingArraysCache(cache)

    @property
    def rows(self) -> int | None:
        """Number of sequences in the batch; None: no slot is filled yet."""
        shown = self.presented
        filled = any(slot is not None for slot in shown.cache)
        return int(shown.batch_size) if filled else None

    @property
    def written(self) -> int | None:
        """Number of recorded positions; None: the record is incomplete."""
        shown = self.presented
        if not isinstance(shown, RecordingArraysCache) or shown.written_unrecorded:
            return None
        if any(call.width != f.width for f in shown.forwards for call in f.calls):
            return None
        return sum(f.width for f in shown.forwards)

    def prepare(self, keep: Keep) -> None:
        """Build the state after `keep` positions in a copy, without evaluating it."""
        if isinstance(keep, int) or self.written in (None, 0):
            self._after = self._state_after(keep)
        else:
            states = {number: self._state_after(number) for number in set(keep)}
            self._after = chosen(states, keep)

    def _state_after(self, keep: Keep) -> ArraysCache:
        shown = self.presented
        if self.written in (None, 0, keep):  # 0: no writes
            return shown
        assert isinstance(shown, RecordingArraysCache)
        assert isinstance(keep, int)
        after = self._before
        for forward in shown.forwards:
            if keep < forward.width:
                after = copied(forward.before)
                if keep > 0:
                    for call in forward.calls:
                        call.replay(after, keep)
                break
            keep -= forward.width
        return after

    def commit(self, keep: Keep) -> None:
        """Give the live cache the prepared state."""
        if self._after is None:
            raise SpeculationClosedError("commit(keep) needs prepare(keep) before it.")
        assign(self._cache, self._after)

    def rollback(self) -> None:
        """Give the live cache its old state."""
        assign(self._cache, self._before)
