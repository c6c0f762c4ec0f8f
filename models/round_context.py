"""Context of this thread's forward: whether it belongs to a round, and its device.

Some layers have a faster implementation for the few rows of a round, and some
implementations are for one device only.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import mlx.core as mx

from mlx_speculation.blas import blas_in_use

Device = Literal["cuda", "x86"]

_in_round: ContextVar[bool] = ContextVar("in_round", default=False)
_device: ContextVar[Device | None] = ContextVar("device", default=None)
_forward: ContextVar["Forward"] = ContextVar("forward")
# [layers per part, layers built] of the forward being built. Parts are measured in
# layers, not in time: all ranks of a sharded model have to submit the same parts.
_parts: ContextVar[list[int] | None] = ContextVar("parts", default=None)
_exact_rows: ContextVar[int] = ContextVar("exact_rows", default=0)

# On a CPU a plain step of at most this many positions, counted over all rows, is
# submitted in parts. More positions take longer to compute than to build, and their
# parts would hold more memory at once.
MOST_POSITIONS = 64


class Forward:
    """State that layers of one forward share.

    Attributes:
        kept: by the id of a layer, its expected input, its product with that input, and
            a function to call if no layer takes the product.
        masks: by key, a mask and the padded mask that was made from it.
    """

    __slots__ = ("kept", "masks")

    def __init__(self) -> None:
        self.kept: dict[int, tuple[mx.array, mx.array, Callable[[], None]]] = {}
        self.masks: dict[tuple[int, ...], tuple[Any, mx.array]] = {}

    def take(self, layer: int, x: mx.array) -> mx.array | None:
        """Take the kept product of a layer with this array object; None: not kept."""
        kept = self.kept.get(layer)
        if kept is None or kept[0] is not x:
            return None
        del self.kept[layer]
        return kept[1]


in_round = _in_round.get
forward_of_round = _forward.get
parts_of_forward = _parts.get  # None: the forward is submitted as a whole
device_of_round = _device.get  # determined once for all layers of a forward
# The number of positions that are no padding; 0: this is no forward of exact mode.
rows_in_exact_mode = _exact_rows.get


def on_cpu() -> bool:
    """Return whether this thread's default device is the CPU."""
    result: bool = mx.default_device().type == mx.DeviceType.cpu
    return result


def cuda_serves() -> bool:
    """Return whether this thread's default device is a GPU with CUDA."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and mx.cuda.is_available()


@functools.cache
def _openblas() -> bool:
    return blas_in_use().startswith("OpenBLAS")


def rows_differ(dtype: mx.Dtype) -> bool:
    """Return whether a product's row can round differently than if computed alone."""
    cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return cpu and dtype == mx.float32 and _openblas()


def x86_serves() -> bool:
    """Return whether this is an x86 CPU where float32 `rows_differ`.

    If so, layers replace operations of mlx that have no vector code.
    """
    return platform.machine() in ("x86_64", "AMD64") and rows_differ(mx.float32)


def _device_here() -> Device | None:
    if cuda_serves():
        return "cuda"
    return "x86" if x86_serves() else None


@contextmanager
def rows_of_a_round(part: int = 0) -> Iterator[None]:
    """Inside the block, layers of this thread use implementations for few rows.

    `part` layers are submitted at once; 0: all of them.
    """
    forward = Forward()
    token, device = _in_round.set(True), _device.set(_device_here())
    before, parts = _forward.set(forward), _parts.set([part, 0] if part else None)
    try:
        yield
        for _, _, not_taken in forward.kept.values():
            not_taken()
    finally:
        _parts.reset(parts)
        _forward.reset(before)
        _in_round.reset(token)
        _device.reset(device)


@contextmanager
def plain_step(positions: int) -> Iterator[None]:
    """Inside the block, this thread builds a plain step or a part of a prompt.

    `positions` is the number of fed positions, of all rows together.
    """
    # On a GPU a batch's step keeps the parts of the enclosing `rows_of_a_round`.
    parts = _parts.get()
    if mx.default_device().type == mx.DeviceType.cpu:
        parts = [1, 0] if positions <= MOST_POSITIONS else None
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


@contextmanager
def fixed_shape_forward(rows: int) -> Iterator[None]:
    """Inside the block, this thread builds a forward of exact mode.

    Its layers use mlx's own operations, not those for one device, and the same formulas
    for any number of positions. `rows`, at least 1, is the number of positions that are
    no padding.
    """
    # `in_round` makes latent attention treat several positions as it treats one
    exact, inside = _exact_rows.set(rows), _in_round.set(True)
    try:
        yield
    finally:
        _in_round.reset(inside)
        _exact_rows.reset(exact)
