"""Forwards that are submitted in parts, while the rest of their graph is built.

A GPU that gets a round's forward as a whole waits for all of its graph, since a round
cannot be built before the last one was read. Submitted after every few layers, the
first ones run meanwhile; each submission has a price of its own, so the number of
layers is measured by `calibrate` (`SpeculativeGenerator.calibrate`).

On a CPU mlx computes on a thread of its own, and `mx.async_eval` takes operations only
until some hundred wait: then it waits itself. A plain step is therefore submitted layer
by layer there; rounds gain nothing where two cores compute (docs/log/rounds.md).

The operations, their order and their results are the same for any number.
"""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook, derived
from mlx_speculation.models.observer import first_array
from mlx_speculation.models.round_context import cuda_serves, on_cpu, parts_of_forward

_RANK = 2  # outside of all others: what they return is what is submitted
PART_SIZES = (0, 2, 4, 8, 16)  # layers of a round's forward at once; 0: all of them


def usual_part() -> int:
    """Return after how many layers a round's forward is submitted, unless measured.

    With CUDA all of it at once, as small and quantized models lose what large ones gain
    (docs/log/cuda_kernels.md). On Metal 8, as others report a gain of 8 ms from every
    few layers and no number, and a command buffer has its price.
    """
    return 0 if on_cpu() or cuda_serves() else 8


@functools.cache
def _submitting(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        parts = parts_of_forward()
        if parts is None:
            return result
        parts[1] += 1
        if parts[1] % parts[0] == 0:
            shown = result if isinstance(result, mx.array) else first_array(result)
            if shown is not None:
                mx.async_eval(shown)
        return result

    return derived(kind, {"__call__": call})


def layer_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer of a model but the last, with its hook."""
    layers: Any = getattr(model, "layers", None)
    modules = [each for each in layers or () if isinstance(each, nn.Module)]
    for layer in modules[:-1]:
        yield layer, Hook(_RANK, _submitting)
