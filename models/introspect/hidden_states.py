"""The hidden states of a model's forwards, its embeddings and its head, for drafters.

```python
taps = HiddenStates(model, layers=(1, 7, 12), after_norm=True)
with taps.collect() as states:
    logits = model(ids, cache=caches)
states.after_norm, states.layer(7)        # [batch, positions, dim], not evaluated
taps.embed(tokens), taps.head(states.after_norm)
```

Bit for bit, the logits stay the same. Several taps on one model, and several threads,
do not affect each other.

    layer(i)      the output of decoder layer i, from 0: the residual stream after it;
                  layer(-1) is the input of the first layer, the embeddings
    before_norm   the input of the final norm. If a model has several residual streams,
                  this is their mix, and there is no `layer(i)`
    after_norm    the output of the final norm. Some models then scale this output or
                  the logits; `head` does so too
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError, SpeculationClosedError
from mlx_speculation.interrupts import finalize
from mlx_speculation.models.instance_hooks import Hooked
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.substitute import input_of, logits_of
from mlx_speculation.models.introspect.taps import (
    AFTER,
    BEFORE,
    Key,
    Notes,
    States,
    tap_for,
)
from mlx_speculation.models.observer import OBSERVED, Observer, observing


class HiddenStates:
    """Taps on one model, for the states that the arguments name.

    Raises:
        UnsupportedModelError: the wanted states were not found in the model.
        InvalidRequestError: the model has no such layer.
    """

    def __init__(
        self,
        # An mlx-lm model, whose modules must not be replaced later
        model: nn.Module,
        *,
        layers: Sequence[int] = (),
        before_norm: bool = False,
        after_norm: bool = False,
    ) -> None:
        self.parts = parts = find_parts(model)
        parts.require("norm", *(["layers"] if layers else []))
        for index in layers:
            if not -1 <= index < len(parts.layers):
                raise InvalidRequestError(
                    f"Layer {index} was requested, but the model has "
                    f"{len(parts.layers)} layers, numbered from 0."
                )
        ends = [(BEFORE, before_norm), (AFTER, after_norm)]
        self._keys: list[Key] = [int(index) for index in layers]
        self._keys += [key for key, wanted in ends if wanted]
        self._taps = [tap_for(parts, key) for key in dict.fromkeys(self._keys)]
        modules = [tap.module for tap in self._taps]
        parts_here = [parts.trunk, parts.norm, parts.entry]
        modules += [module for module in parts_here if module is not None]
        hooked = Hooked((module, OBSERVED) for module in modules)
        self._finalizer = weakref.finalize(self, finalize, hooked.remove)
        self._finalizer.atexit = False

    def states(self) -> States:
        """Return empty states, for `collect`."""
        return States(self._keys)

    @contextmanager
    def collect(self, states: States | None = None) -> Iterator[States]:
        """Collect the states of the forwards that this thread runs inside the block.

        They are added to `states`; None: to new ones. An error raised in the block
        leaves them unchanged. Do not `yield` inside the block in a generator: the
        forwards of its caller would be collected too.

        Raises:
            UnsupportedModelError: an observed module was not called.
        """
        self._check_open()
        result = self.states() if states is None else states
        notes = Notes(self._taps)
        with observing(notes):
            yield result
        for forward in notes.forwards():
            result.add(forward)

    def embed(self, tokens: mx.array, *, scaled: bool = False) -> mx.array:
        """Return embeddings [batch, positions, dim] of token ids [batch, positions].

        They are rows of the table. With `scaled` they are the input of the first layer:
        the model has applied its scale, norm or positions (from 0) to the rows.

        Raises:
            UnsupportedModelError: the embeddings do not follow from the ids alone.
        """
        self._check_open()
        self.parts.require("entry" if scaled else "embedding")
        if scaled:
            assert self.parts.entry is not None
            return input_of(self.parts.model, self.parts.entry, tokens)
        assert self.parts.embedding is not None
        rows: mx.array = self.parts.embedding(tokens)
        return rows

    def head(self, hidden: mx.array, *, only: Observer | None = None) -> mx.array:
        """Return the logits [batch, positions, vocab] of states after the final norm.

        `hidden` is [batch, positions, dim], of any origin. `only`, a `ReducedOutput` of
        this model, limits the logits to the ids that it was made for. The model's
        scales, soft caps and masked ids apply. In gpt_neox, lille-130m, gemma3n and
        phixtral each call builds a forward, of which the part before the norm is not
        evaluated.
        """
        self._check_open()
        if hidden.ndim != 3 or hidden.shape[-1] != self.parts.dim:
            raise InvalidRequestError(
                f"Hidden states of shape {hidden.shape} were passed, but the head "
                f"takes [batch, positions, {self.parts.dim}]."
            )
        # Not `or`: a module without parameters is an empty dict.
        where = self.parts.norm if self.parts.trunk is None else self.parts.trunk
        assert where is not None
        return logits_of(self.parts.model, where, hidden, only)

    def remove(self) -> None:
        """Remove the hooks, except those that another owner needs."""
        self._finalizer()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise SpeculationClosedError(
                "These HiddenStates were removed from their model. Make new ones: "
                "HiddenStates(model, ...)"
            )
