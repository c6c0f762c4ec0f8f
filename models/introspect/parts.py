"""Parts of a model: embedding, decoder layers, final norm and head.

Parts are found by the calls of one forward (`trace`), not by their names:

    layers       `model.layers`. Each is called once, in order, with the result of the
                 layer before it; the final norm is called with the last result
    norm         the last call, after the layers, of a module whose parameters are
                 vectors of the hidden size. It counts as not found unless a module
                 around it returns its result, or a module turns its result into logits.
                 If no module with such parameters is called, the norm is the trunk's
                 operations after the last layer, such as a norm without weights
    trunk        the outermost module, except the model, that returns the result of the
                 final norm. If the norm is no module: the module that runs the layers.
                 In both cases, all operations after the norm are the head
    embedding    the module that is called with the token ids only, before the layers
    output       the module that is called with the result of the trunk and returns as
                 many numbers as there are logits: a linear layer, or the embedding
                 (tied)

A part that is not found with certainty is `missing`. One case is not detected: an array
that is changed in place between two layers. No architecture of mlx-lm 0.32.2 does that
(tests/models/introspect/test_hidden_states.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model that were found."""

    model: nn.Module
    dim: int = 0  # the size of a hidden state; 0: no final norm was found
    # The final norm; None: it has no weights, or was not found
    norm: nn.Module | None = None
    # How often a forward calls the norm; the last call is the final norm
    norm_calls: int = 0
    # The module that returns the head's input; None: the head is inside of the module
    # that runs the layers
    trunk: nn.Module | None = None
    layers: tuple[nn.Module, ...] = ()
    # The first layer, if its input is one hidden state per position
    entry: nn.Module | None = None
    embedding: nn.Module | None = None
    # The module that turns the hidden state into logits; None: a bare array does so, or
    # the module was not found
    output: nn.Module | None = None
    tied: bool = False  # whether `output` is the embedding
    # Whether the result of `output` is the logits, without scale and soft cap
    bare: bool = False
    # Name of a part that was not found -> the reason
    missing: Mapping[str, str] = field(default_factory=dict)

    def require(self, *names: str) -> None:
        """Raise `UnsupportedModelError` unless these parts were found.

        `names` are some of "layers", "norm", "embedding" and "entry".
        """
        for name in names:
            if name in self.missing:
                raise UnsupportedModelError(
                    f"{type(self.model).__module__} does not expose its {name}: "
                    f"{self.missing[name]} Use a drafter that does not need it."
                )
