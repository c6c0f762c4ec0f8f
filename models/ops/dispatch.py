"""Dispatch of operations to the listed rooms.

    models.lanes.install_hooks     register([cpu.OPS, cuda.OPS]), when it is imported
    everybody else                 asks the functions below

Where no listed room serves, the caller goes the stock way.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.device_ops import CompiledForward, DeviceOps, RunBlock

_rooms: tuple[DeviceOps, ...] = ()


def register(rooms: Sequence[DeviceOps]) -> None:
    """List the rooms that may serve, in place of those that were listed."""
    global _rooms
    _rooms = tuple(rooms)


def registered() -> tuple[DeviceOps, ...]:
    """Return the rooms that are listed."""
    return _rooms


def attention_dims() -> frozenset[int]:
    """Return the head dimensions whose attention is not planned by numbers of keys."""
    return frozenset().union(*(room.attention_dims for room in _rooms if room.serves()))


def gated_delta_kernel(q: mx.array, v: mx.array) -> RunBlock | None:
    """Return what runs a block of gated delta steps here; see `DeviceOps`."""
    for room in _rooms:
        run = None if room.gated_delta is None else room.gated_delta(q, v)
        if run is not None:
            return run
    return None


def compiled_steps(model: nn.Module) -> CompiledForward:
    """Return the compiled forward of a draft model, compiled and tried.

    Raises:
        UnsupportedModelError: it cannot be compiled here, or says something else than
            the model.
    """
    for room in _rooms:
        if room.compile_draft is not None:
            return room.compile_draft(model)
    raise UnsupportedModelError(
        "compile_draft is True, and nothing that is installed compiles the steps of a "
        f"draft {type(model).__module__}. Leave compile_draft out."
    )


@contextmanager
def stream_resources(model: nn.Module) -> Iterator[None]:
    """Let rooms hold what serves the streams of a model, inside the block."""
    with ExitStack() as stack:
        for room in _rooms:
            if room.stream_resources is not None:
                stack.enter_context(room.stream_resources(model))
        yield
