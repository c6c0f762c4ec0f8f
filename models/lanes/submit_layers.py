"""Forwards that are submitted in parts, while the rest of each graph is built.

A round cannot be built before the results of the previous one were read, so a GPU idles
while the graph of the forward is built. If the forward is submitted after every few
layers, the first layers run meanwhile. Each submission costs time, so the best number
of layers is measured (`mlx-speculation calibrate`).

On a CPU `mx.async_eval` returns when at most about a hundred operations are left to
run: of a whole forward, most have run by then. So plain steps are submitted layer by
layer (`plain_step`): the first layers run while the others are built. Rounds with
drafts gained nothing from this with two cores (docs/log/rounds.md). Results are the
same for any number of layers.
"""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook, derived
from mlx_speculation.models.observer import first_array
from mlx_speculation.models.round_context import cuda_serves, on_cpu, parts_of_forward

_RANK = 2  # outermost, so it submits the result of all other hooks
PART_SIZES = (0, 2, 4, 8, 16)  # layers that a round can submit at once; 0: all


def usual_part() -> int:
    """Return how many layers a round submits at once if `calibrate` has not run.

    On a CPU and with CUDA it is all of them (0). On CUDA, small and quantized models
    lose as much by smaller parts as large models gain (docs/log/cuda_kernels.md). On
    Metal it is 8 layers: other projects report a gain from parts of a few layers.
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
    """Yield each layer of a model except the last, with its hook."""
    layers: Any = getattr(model, "layers", None)
    modules = [each for each in layers or () if isinstance(each, nn.Module)]
    for layer in modules[:-1]:
        yield layer, Hook(_RANK, _submitting)
