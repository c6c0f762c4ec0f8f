"""Dispatch of operations to the rooms (see `models.device_ops`)."""

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import cpu, cuda
from mlx_speculation.models.device_ops import CompiledForward, DeviceOps, RunBlock

# The first room that has an operation runs it.
ROOMS: tuple[DeviceOps, ...] = (cuda.OPS, cpu.OPS)


def attention_dims() -> frozenset[int]:
    """Return head dimensions for which attention needs no cuDNN plan per key count."""
    return frozenset().union(*(room.attention_dims for room in ROOMS if room.serves()))


def gated_delta_kernel(q: mx.array, v: mx.array) -> RunBlock | None:
    """Return the function of a room's `DeviceOps.gated_delta`; None: there is none."""
    for room in ROOMS:
        run = None if room.gated_delta is None else room.gated_delta(q, v)
        if run is not None:
            return run
    return None


def compiled_steps(model: nn.Module) -> CompiledForward:
    """Return the compiled forward of a draft, or raise `UnsupportedModelError`."""
    for room in ROOMS:
        if room.compile_draft is not None:
            return room.compile_draft(model)
    raise UnsupportedModelError(
        "compile_draft is True, but nothing that is installed compiles the steps of "
        f"the draft {type(model).__module__}. Leave compile_draft out."
    )
