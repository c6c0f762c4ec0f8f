"""On a CPU a plain step is submitted layer by layer, while it is built.

There mlx computes on a thread of its own, and `mx.async_eval` takes operations only
until some hundred wait: then it waits itself. What is built behind a whole forward is
therefore hidden by the last operations of that forward, and no longer than these take.
Submitted layer by layer, the thread has the first layers while the others are built.

The operations, their order and their results are the same. Rounds with drafts gain
nothing where two cores compute (docs/log/rounds.md), and steps of a small model lose a
twentieth. A GPU has no such end of its queue; what is submitted early there is said in
`models.round_context`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook, derived
from mlx_speculation.models.observer import first_array
from mlx_speculation.models.round_context import on_cpu, positions_on_cpu

_RANK = 2  # outside of all others: what they return is what is submitted
# Positions of a forward, of all rows; a chunk of a prompt computes longer than it is
# built, and its layers would hold more at once.
MOST_POSITIONS = 64


@functools.cache
def _submitting(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        if 0 < positions_on_cpu() <= MOST_POSITIONS:
            shown = result if isinstance(result, mx.array) else first_array(result)
            if shown is not None:
                mx.async_eval(shown)
        return result

    return derived(kind, {"__call__": call})


def layer_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer of a model but the last, with its hook."""
    if not on_cpu():
        return
    layers: Any = getattr(model, "layers", None)
    found = [each for each in layers or () if isinstance(each, nn.Module)]
    for layer in found[:-1]:
        yield layer, Hook(_RANK, _submitting)
