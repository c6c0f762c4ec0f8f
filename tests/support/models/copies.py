"""Classes, attributes and parameters of the modules of a model."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.models.instance_hooks import plain_class


def hooked(model: nn.Module) -> list[str]:
    return [p for p, m in model.named_modules() if type(m) is not plain_class(m)]


def classes(model: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in model.named_modules()}


def attributes(model: nn.Module) -> dict[str, tuple[set[str], set[str]]]:
    """Return the names of the parts and of the attributes of every module."""
    return {
        path: (set(module.keys()), set(vars(module)))
        for path, module in model.named_modules()
    }


def parameters(model: nn.Module) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def contents(model: nn.Module) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of the parameters, by their paths."""

    def content(array: Any) -> tuple[str, list[int], bytes]:
        return str(array.dtype), list(array.shape), bytes(memoryview(array))

    return {path: content(array) for path, array in parameters(model).items()}
