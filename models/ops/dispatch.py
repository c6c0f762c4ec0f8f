"""Dispatch of operations to the registered rooms.

`models.lanes.install_hooks` calls `register` when it is imported; other modules call
the functions below. If no registered room serves, callers use the functions of mlx and
mlx-lm.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.device_ops import CompiledForward, DeviceOps, RunBlock

_rooms: tuple[DeviceOps, ...] = ()


def register(rooms: Sequence[DeviceOps]) -> None:
    """Replace the registered rooms by these."""
    global _rooms
    _rooms = tuple(rooms)


def registered() -> tuple[DeviceOps, ...]:
    """Return the registered rooms."""
    return _rooms


def attention_dims() -> frozenset[int]:
    """Return head dimensions for which attention needs no plan by number of keys."""
    return frozenset().union(*(room.attention_dims for room in _rooms if room.serves()))


def gated_delta_kernel(q: mx.array, v: mx.array) -> RunBlock | None:
    """Return a room's function for a block of gated delta steps; None: there is none.

    See `DeviceOps.gated_delta`.
    """
    for room in _rooms:
        run = None if room.gated_delta is None else room.gated_delta(q, v)
        if run is not None:
            return run
    return None


def compiled_steps(model: nn.Module) -> CompiledForward:
    """Return the compiled forward of a draft model, compiled and tried.

    Raises:
        UnsupportedModelError: it cannot be compiled here, or has other logits than the
            model.
    """
    for room in _rooms:
        if room.compile_draft is not None:
            return room.compile_draft(model)
    raise UnsupportedModelError(
        "compile_draft is True, and nothing that is installed compiles the steps of a "
        f"draft {type(model).__module__}. Leave compile_draft out."
    )
