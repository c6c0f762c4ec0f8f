"""Parts of a model: embedding, decoder layers, final norm and head.

They are found by what one forward does (`trace`), not by their names, so that text
models in wrappers and future families are covered:

    layers       `model.layers`, each called once, in order, each one given what the
                 one before returned, and the final norm what the last one returned
    norm         the last call after the layers of a module whose parameters are
                 vectors of the hidden size; its result is what a module around it
                 returns, or what the head is given. Where there is none: a norm
                 without weights, from the last layer to the end of the trunk
    trunk        the outermost module, short of the model, that returns what the final
                 norm returned (without one: the module that runs the layers); all that
                 is done to it later is the head
    embedding    what is given the token ids and nothing else, before the layers
    output       what is given the result of the trunk and returns as many numbers as
                 there are logits: a linear layer, or the embedding (tied)

What is not found without doubt is missing, and who needs it gets an error that says
why. One thing is not seen: an array that is changed in place between two layers,
which no architecture of mlx-lm 0.32.2 does
(tests/models/introspect/test_hidden_states.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model, as far as they were found."""

    model: nn.Module
    dim: int = 0  # the size of a hidden state; 0: no final norm was found
    # The final norm; None: it has no weights, or was not found
    norm: nn.Module | None = None
    # How often a forward calls it; the last call is the one that counts
    norm_calls: int = 0
    # The module that returns what the head is given; None: the head is inside of the
    # module that runs the layers
    trunk: nn.Module | None = None
    layers: tuple[nn.Module, ...] = ()
    # The first layer, if it is given one hidden state per position
    entry: nn.Module | None = None
    embedding: nn.Module | None = None
    # The module whose product with the hidden state the logits are; None: no module,
    # but a bare array
    output: nn.Module | None = None
    tied: bool = False  # whether that is the embedding
    bare: bool = False  # whether nothing is done to its result: no scale, no soft cap
    # What was not found -> why
    missing: Mapping[str, str] = field(default_factory=dict)

    def require(self, *names: str) -> None:
        """Raise unless all of them were found.

        Args:
            names: of "layers", "norm", "embedding" and "entry".

        Raises:
            UnsupportedModelError: one was not found.
        """
        for name in names:
            if name in self.missing:
                raise UnsupportedModelError(
                    f"{type(self.model).__module__} does not show its {name}: "
                    f"{self.missing[name]} Use a drafter that does not need it."
                )
