"""Context of a forward in this thread: a round's or another, and its operations.

A round's forward is over a few rows, and is not the one that reads a prompt: some
layers have a better way for it, and some of these ways are for one device.
"""

import functools
import platform
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import mlx.core as mx

from mlx_speculation.blas import blas_in_use
from mlx_speculation.models.instance_hooks import lock, round_hooks

Device = Literal["cuda", "x86"]

_in_round: ContextVar[bool] = ContextVar("in_round", default=False)
_device: ContextVar[Device | None] = ContextVar("device", default=None)
_forward: ContextVar["Forward"] = ContextVar("forward")
# Layers of a part of the forward that is built, and how many were built. By counts and
# not by time, so that all ranks of a sharded model submit alike.
_parts: ContextVar[list[int] | None] = ContextVar("parts", default=None)
_exact_rows: ContextVar[int] = ContextVar("exact_rows", default=0)

# Positions of a plain step that is submitted in parts on a CPU, of all rows; a chunk of
# a prompt computes longer than it is built, and its layers would hold more at once.
MOST_POSITIONS = 64


class Forward:
    """State that layers of one forward leave for each other.

    Attributes:
        kept: by the id of a layer that is likely to be called, what it will be fed, its
            product with that, and what to call if it was not asked for.
        masks: by what was asked for, a mask and the one that was made of it.
        tokens: how many it is fed, of all rows together.
    """

    __slots__ = ("kept", "masks", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.kept: dict[int, tuple[mx.array, mx.array, Callable[[], None]]] = {}
        self.masks: dict[tuple[int, ...], tuple[Any, mx.array]] = {}

    def take(self, layer: int, x: mx.array) -> mx.array | None:
        """Return the product of a layer with this very array, if it is kept."""
        kept = self.kept.get(layer)
        if kept is None or kept[0] is not x:
            return None
        del self.kept[layer]
        return kept[1]


in_round = _in_round.get
forward_of_round = _forward.get
parts_of_forward = _parts.get  # None: it is submitted as a whole
device_of_round = _device.get  # found once for all layers of a forward
# How many rows of a forward in exact mode are no padding; 0: it is not one.
rows_in_exact_mode = _exact_rows.get


def on_cpu() -> bool:
    """Return whether what is computed here and now is computed by a processor."""
    result: bool = mx.default_device().type == mx.DeviceType.cpu
    return result


def cuda_serves() -> bool:
    """Return whether what is computed here and now is computed with CUDA."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and mx.cuda.is_available()


@functools.cache
def _openblas() -> bool:
    return blas_in_use().startswith("OpenBLAS")


def rows_differ(dtype: mx.Dtype) -> bool:
    """Return whether rows of a product differ here from single rows by rounding."""
    cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return cpu and dtype == mx.float32 and _openblas()


def x86_serves() -> bool:
    """Return whether rows differ on a processor for which mlx has no vector code."""
    return platform.machine() in ("x86_64", "AMD64") and rows_differ(mx.float32)


def _device_here() -> Device | None:
    if cuda_serves():
        return "cuda"
    return "x86" if x86_serves() else None


class rows_of_a_round:  # noqa: N801 - used like the function that it stands for
    """Let layers take their ways for a few rows, in this thread, inside the block.

    No generator makes it, since every step of a draft goes through it.

    Args:
        tokens: how many the forward is fed; some ways are for few.
        part: layers of it that are submitted at once; 0: all of them.
    """

    __slots__ = ("_before", "_device", "_forward", "_part", "_parts", "_token")

    def __init__(self, tokens: int = 1, part: int = 0) -> None:
        self._forward, self._part = Forward(tokens), part

    def __enter__(self) -> None:
        here = _device_here()
        with lock:
            if not round_hooks.on:
                round_hooks.turn(on=True)
            round_hooks.forwards += 1
        self._token, self._device = _in_round.set(True), _device.set(here)
        self._before = _forward.set(self._forward)
        self._parts = _parts.set([self._part, 0] if self._part else None)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            for _, _, not_taken in self._forward.kept.values() if kind is None else ():
                not_taken()
        finally:
            _parts.reset(self._parts)
            _forward.reset(self._before)
            _in_round.reset(self._token)
            _device.reset(self._device)
            with lock:
                round_hooks.forwards -= 1


class plain_step:  # noqa: N801 - used like the function that it stands for
    """Build a plain step, or a part of a prompt, in this thread, inside the block.

    No generator makes it, since every plain step goes through it.

    Args:
        positions: how many are fed, of all rows together.
    """

    __slots__ = ("_positions", "_token")

    def __init__(self, positions: int) -> None:
        self._positions = positions

    def __enter__(self) -> None:
        if round_hooks.on:  # the lock is for the first plain step behind a round
            with lock:
                if not round_hooks.forwards:
                    round_hooks.turn(on=False)
        # On a GPU a batch's step keeps what its rows are submitted by.
        parts = _parts.get()
        if on_cpu():
            parts = [1, 0] if 0 < self._positions <= MOST_POSITIONS else None
        self._token = _parts.set(parts)

    def __exit__(self, *error: Any) -> None:
        _parts.reset(self._token)


class fixed_shape_forward:  # noqa: N801 - like `rows_of_a_round`
    """Build a forward of exact mode, in this thread, inside the block.

    Plain steps, rounds and prompts are built alike: by mlx's own operations, without
    what serves one device, with one formula for any number of rows that count.

    Args:
        rows: how many of the rows are no padding, from 1.
    """

    __slots__ = ("_plain", "_round", "_rows", "_token")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._plain = plain_step(0)

    def __enter__(self) -> None:
        self._plain.__enter__()
        self._token = _exact_rows.set(self._rows)
        self._round = _in_round.set(True)  # one form of latent attention for all

    def __exit__(self, *error: Any) -> None:
        _in_round.reset(self._round)
        _exact_rows.reset(self._token)
        self._plain.__exit__(*error)
