"""Some rows of an output layer, as a layer."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import plain_class


def sliced(layer: nn.Module, ids: mx.array) -> nn.Module:
    """Return a linear layer of some of another one's rows, which are copied.

    Args:
        layer: a linear layer or an embedding, quantized or not.
        ids: uint32 [n], the rows.

    Raises:
        TypeError: it is something else.
    """
    kind = plain_class(layer)
    own: Any = layer
    found: Any
    names = ["weight", "bias"]
    if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        found = nn.QuantizedLinear(64, 1, group_size=64, bits=4)
        found.group_size, found.bits, found.mode = own.group_size, own.bits, own.mode
        names += ["scales", "biases"]
    elif kind in (nn.Linear, nn.Embedding):
        found = nn.Linear(1, 1)
    else:
        raise TypeError(f"its output layer is a {kind.__name__}")
    for name in names:
        rows = own.get(name)
        if rows is None:
            found.pop(name, None)
        else:
            found[name] = rows[ids]
    mx.eval(found.parameters())
    made: nn.Module = found
    return made
