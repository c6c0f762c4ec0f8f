"""A model as mlx-lm alone has it: the same arrays, and no hook of ours.

What is on a model for our generators may serve whoever calls it: linear layers that
have their weights transposed, say. Arms of mlx-lm's functions get a copy without.
"""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters, without hooks."""
    shared: dict[int, Any] = {}
    for module in model.modules():  # ranks do not multiply
        held = vars(module).values()
        shared |= {id(v): v for v in held if isinstance(v, mx.distributed.Group)}
    parameters: Any = tree_flatten(model.parameters())
    shared |= {id(array): array for _, array in parameters}
    return copy.deepcopy(model, shared)
