"""Replay: the state after a prefix, from notes of what the mixer called.

A mixer that runs again over its inputs reads the weights of its projections again.
These are most of the weights that a decode step reads. But the states follow from less:

    state of                     follows from                       cost
    a causal convolution         the rows that went into it         a copy of K - 1 rows
    a scan (gated delta, SSD,    the arguments of the scan          one scan
      lightning attention)
    a scan of all rows at once   its intermediate results           one product
    RG-LRU                       its output, which has all states   a copy of one row
    the last raw key and value   all raw keys and values            a copy of one row
    the last token ids           the ids                            a copy of n ids

Everything here is lazy, and reads no weights except the decay and the bias of a scan.
If notes are incomplete, the mixer runs again over its inputs.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.models.device_ops import Block

# One value for each inner call, by the id of a part, or the name of a method or scan.
Notes = dict[Any, list[Any]]

_ran_again: ContextVar[list[nn.Module] | None] = ContextVar("ran_again", default=None)

CACHE = object()  # replaces the cache in recorded arguments, to avoid a cycle


@contextmanager
def noting_reruns() -> Iterator[list[nn.Module]]:
    """Yield a list, to which each mixer that runs again inside the block is added."""
    ran: list[nn.Module] = []
    token = _ran_again.set(ran)
    try:
        yield ran
    finally:
        _ran_again.reset(token)


@dataclass(frozen=True, slots=True)
class Scan:
    """A function that makes the next state from a state and an input per position."""

    module: str
    name: str
    slot: int  # of the state in the cache
    # Name of the argument with the state; the result's second item is the next state
    state: str
    rows: Mapping[str, int]  # argument with positions -> the axis of the positions
    called_in: str = "__call__"  # the method of the mixer that calls it
    # Computes all rows together, from the scan's arguments; returns None if it cannot
    in_chunks: Callable[..., Block | None] | None = None

    @property
    def axis(self) -> int:
        """The axis of positions in the first argument of `rows`, and in the result."""
        return next(iter(self.rows.values()))


@dataclass(frozen=True, slots=True)
class Watch:
    """Calls to record: paths of parts, names of methods, a scan."""

    inputs: tuple[str, ...] = ()  # parts whose first array argument is recorded
    outputs: tuple[str, ...] = ()  # parts whose result is recorded
    methods: tuple[str, ...] = ()  # methods whose first array argument is recorded
    scan: Scan | None = None


class Recipe(Protocol):
    """One way to compute the state after a prefix from notes."""

    @property
    def watch(self) -> Watch:
        """The calls to record."""
        ...

    @property
    def runs_again(self) -> bool:
        """Return whether the mixer can run again instead of a replay.

        It cannot if it also writes to another cache.
        """
        ...

    def replay(self, call: "MixerCall", cache: ArraysCache, keep: int) -> None:
        """Change `cache` from the state before the call to that after `keep` rows."""
        ...


def first_of(kind: type, values: tuple[Any, ...]) -> Any:
    """Return the first value of a kind; None: there is none."""
    return next((value for value in values if isinstance(value, kind)), None)


def part_of(mixer: nn.Module, path: str) -> Any:
    """Return the part of a mixer at a dotted path; None: it has no such part."""
    part: Any = mixer
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


@dataclass(frozen=True, slots=True)
class MixerCall:
    """One call of a mixer: its arguments without the cache, and its notes."""

    mixer: nn.Module
    width: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recipe: Recipe | None = None
    notes: Notes = field(default_factory=dict)

    @property
    def inputs(self) -> mx.array:
        """The first array that the mixer was given."""
        result: mx.array = first_of(mx.array, (*self.args, *self.kwargs.values()))
        return result

    @property
    def complete(self) -> bool:
        """Return whether the notes have all calls that the recipe watches."""
        if self.recipe is None:
            return False
        watch = self.recipe.watch
        paths = (*watch.inputs, *watch.outputs)
        counts: dict[Any, int] = {id(part_of(self.mixer, path)): 1 for path in paths}
        counts |= dict.fromkeys(watch.methods, 2)  # called with keys, and with values
        if watch.scan is not None:
            counts[watch.scan.name] = 1
        return all(len(self.notes.get(key, ())) == n for key, n in counts.items())

    def note(self, path: str) -> Any:
        """Return the note of the part at a path."""
        return self.notes[id(part_of(self.mixer, path))][0]

    def replay(self, cache: Any, keep: int) -> None:
        """Change `cache` from the state before the call to the state after `keep` rows.

        With incomplete notes, the mixer runs again over the first `keep` positions. So
        it does for a padded cache, if the recipe `runs_again`.
        """
        recipe = self.recipe if self.complete else None
        if recipe is None or (recipe.runs_again and _is_padded(cache)):
            self._run_again(cache, keep)
        else:
            recipe.replay(self, cache, keep)

    def _run_again(self, cache: Any, keep: int) -> None:
        ran = _ran_again.get()
        if ran is not None:
            ran.append(self.mixer)

        def cut(value: Any) -> Any:
            if value is CACHE:
                return cache
            if not isinstance(value, mx.array) or value.ndim < 2:
                return value
            return value[:, :keep] if value.shape[1] == self.width else value

        lengths = getattr(cache, "lengths", None)
        if lengths is not None:  # beyond `keep`, a scan would read past its input
            cache.lengths = mx.minimum(lengths, keep)
        self.mixer(
            *(cut(value) for value in self.args),
            **{name: cut(value) for name, value in self.kwargs.items()},
        )
        if lengths is not None:
            cache.lengths = lengths + (cache.lengths - mx.minimum(lengths, keep))


def _is_padded(cache: ArraysCache) -> bool:
    return cache.lengths is not None or cache.left_padding is not None


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


@dataclass(frozen=True, slots=True)
class ScanCall:
    """One call of a scan."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    chunk: Block | None = None  # made in place of the scan; None: the scan ran

    def arguments(self) -> dict[str, Any]:
        """Return the passed arguments by name."""
        bound = _signature(self.function).bind(*self.args, **self.kwargs)
        return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class ConvsAndScan:
    """Causal convolutions, each with a slot, and a scan; or convolutions alone.

    Example: K = 4 and a block of 5 rows. The convolution's input has 3 + 5 rows, and
    the first 3 are the old state. The state after `keep` = 2 rows is rows [2, 5).
    """

    convs: Mapping[str, int] = field(default_factory=dict)  # path -> slot
    scan: Scan | None = None
    runs_again: bool = True

    @property
    def watch(self) -> Watch:
        """The inputs of the convolutions, and the scan's arguments."""
        return Watch(inputs=tuple(self.convs), scan=self.scan)

    def replay(self, call: MixerCall, cache: ArraysCache, keep: int) -> None:
        """Cut the convolutions' rows, and run the scan over its first `keep` rows."""
        for path, slot in self.convs.items():
            rows = call.note(path)
            old = rows.shape[1] - call.width
            cache[slot] = mx.contiguous(rows[:, keep : keep + old])
        if self.scan is not None:
            self._scan(self.scan, call.notes[self.scan.name][0], cache, keep)

    def _scan(self, scan: Scan, noted: ScanCall, cache: ArraysCache, keep: int) -> None:
        if noted.chunk is not None:
            cache[scan.slot] = noted.chunk.after(keep)
            return
        arguments = noted.arguments()
        for name, axis in scan.rows.items():
            arguments[name] = _head(arguments[name], keep, axis)
        arguments[scan.state] = cache[scan.slot]
        cache[scan.slot] = noted.function(**arguments)[1]


def _head(rows: mx.array, keep: int, axis: int) -> mx.array:
    return rows[(slice(None),) * axis + (slice(keep),)]


@dataclass(frozen=True, slots=True)
class RgLru:
    """RG-LRU after a convolution. RG-LRU's output is the state after each position."""

    runs_again: bool = True

    @property
    def watch(self) -> Watch:
        """The input of the convolution, and the result of the recurrence."""
        return Watch(inputs=("conv_1d",), outputs=("rg_lru",))

    def replay(self, call: MixerCall, cache: ArraysCache, keep: int) -> None:
        """Cut the convolution's rows, and take one row of the recurrence's output."""
        rows = call.note("conv_1d")[:, :keep]
        states, _ = call.note("rg_lru")
        old = call.mixer.conv_1d.weight.shape[1] - 1
        if cache[0] is None:
            rows = mx.pad(rows, [(0, 0), (old, 0), (0, 0)])
        else:
            rows = mx.concatenate([cache[0], rows], axis=1)
        cache[0] = mx.contiguous(rows[:, -old:])
        cache[1] = mx.contiguous(states[:, keep - 1])


@dataclass(frozen=True, slots=True)
class LastKeyAndValue:
    """An attention that mixes each raw key and value with the previous one.

    The attention also writes keys and values to another cache, so it cannot run again.
    """

    method: str
    runs_again: bool = False

    @property
    def watch(self) -> Watch:
        """The method that is called with the raw keys, then with the raw values."""
        return Watch(methods=(self.method,))

    def replay(self, call: MixerCall, cache: ArraysCache, keep: int) -> None:
        """Take row `keep` - 1 of the keys and of the values."""
        for slot, rows in enumerate(call.notes[self.method]):
            cache[slot] = mx.contiguous(rows[:, :, keep - 1 : keep])


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The last n - 1 token ids, for embeddings of n-grams."""

    runs_again: bool = True

    @property
    def watch(self) -> Watch:
        """No calls: the ids are the mixer's input."""
        return Watch()

    def replay(self, call: MixerCall, cache: ArraysCache, keep: int) -> None:
        """Append the kept ids to the old ones, and take the last n - 1."""
        ids = call.inputs[:, :keep].astype(mx.int64)
        if cache[0] is not None:
            ids = mx.concatenate([cache[0], ids], axis=-1)
        kept = call.mixer.n - 1
        cache[0] = ids[:, max(0, ids.shape[1] - kept) :]
