"""Hook classes of mixers and their parts, which record notes of calls.

Notes are arguments and results of what a mixer calls, in one call of the mixer. Parts
find the notes in a context variable. Outside of a recorded call there are no notes.

Nothing in mlx-lm is patched. If a method of a mixer calls a scan by a global name, the
hooked class has a copy of the method with other globals, in which the name is a
function that records the call. A scan that other code replaced before the hook was made
is not recorded.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.device_ops import Block
from mlx_speculation.models.instance_hooks import derived, made_again
from mlx_speculation.models.recurrent.replay import (
    Notes,
    Scan,
    ScanCall,
    Watch,
    first_of,
)
from mlx_speculation.models.recurrent.row_by_row import run_by_row
from mlx_speculation.models.round_context import rows_in_exact_mode
from mlx_speculation.models.source_digests import is_known

Call = Callable[..., Any]

_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Inside the block, record calls of this thread in `notes`."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def _note(key: Any, value: Any) -> None:
    notes = _notes.get()
    if notes is not None:
        notes.setdefault(key, []).append(value)


@functools.cache
def noting_input(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` that notes the first array argument of each call."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _note(id(self), first_of(mx.array, (*args, *kwargs.values())))
        return kind.__call__(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


@functools.cache
def noting_output(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` that notes the result of each call."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        _note(id(self), result)
        return result

    return derived(kind, {"__call__": call})


def watched(kind: type[nn.Module], watch: Watch, scan: Call | None) -> dict[str, Call]:
    """Return methods for a subclass of `kind`, by name.

    They record calls of the methods and of the scan that `watch` names. With `scan`
    None, no scan is recorded.
    """
    methods = {name: _noting_method(kind, name) for name in watch.methods}
    if watch.scan is not None and scan is not None:
        methods[watch.scan.called_in] = _noting_scan(kind, watch.scan, scan)
    return methods


def scan_of(kind: type[nn.Module], watch: Watch) -> Call | None:
    """Return the scan that `kind` calls now; None: no scan, or an unknown one."""
    if watch.scan is None:
        return None
    result = vars(sys.modules[kind.__module__]).get(watch.scan.name)
    if getattr(result, "__module__", None) != watch.scan.module or not is_known(result):
        return None
    return cast(Call, result)


def _noting_method(kind: type[nn.Module], name: str) -> Call:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _note(name, first_of(mx.array, (*args, *kwargs.values())))
        return getattr(kind, name)(self, *args, **kwargs)

    return method


def _noting_scan(kind: type[nn.Module], scan: Scan, known: Call) -> Call:
    original: FunctionType = getattr(kind, scan.called_in)

    def scanned(*args: Any, **kwargs: Any) -> Any:
        chunk: Block | None
        rows, chunk = rows_in_exact_mode(), None
        if rows:
            chunk = run_by_row(scan, known, args, kwargs, rows)
        elif scan.in_chunks is not None:
            chunk = scan.in_chunks(*args, **kwargs)
        _note(scan.name, ScanCall(known, args, kwargs, chunk))
        if chunk is None:
            return known(*args, **kwargs)
        return chunk.y, chunk.after(chunk.y.shape[scan.axis])

    return made_again(original, {scan.name: scanned})
