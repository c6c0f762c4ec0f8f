"""Output layers for some token ids only.

    reduced = ReducedOutput(find_parts(model), ids)
    with reduced.only():
        logits = model(tokens, cache=caches)        # [batch, positions, len(ids)]

Inside the block the output layer multiplies with copies of its rows for `ids`. The
model's own operations on logits, such as a soft cap, still apply. An embedding that is
also the output layer still embeds every id.
"""

import io
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.interrupts import finalize
from mlx_speculation.models.instance_hooks import Hooked, plain_class
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.parts import Parts
from mlx_speculation.models.introspect.trace import POSITIONS
from mlx_speculation.models.observer import OBSERVED, Observer, observing

# Operations that take ids of logits. mlx does not check the ids, so an id past the end
# would write or read other memory.
_INDEXED = ('"Scatter', '"Gather')
# The difference that is allowed, as a share of the largest logit: with fewer outputs a
# product can round differently.
_TOLERANCE = 1e-3


class ReducedOutput(Observer):
    """The output layer of one model, for some ids.

    `ids` are different token ids, in any order, that the model has logits for.

    Raises:
        UnsupportedModelError: the output layer was not found or is of an unknown kind,
            or the model's logits of `ids` are not the same without the other ids.
    """

    def __init__(self, parts: Parts, ids: Sequence[int]) -> None:
        if parts.output is None:
            raise _refused(parts, "none of its modules makes the logits.")
        self.ids = mx.array(list(ids), mx.uint32)
        try:
            self.layer = sliced(parts.output, self.ids)
        except TypeError as error:
            raise _refused(parts, f"{error}.") from error
        self._module = parts.output
        self._blank = False  # whether zeros replace the product, for the check
        self._method = "as_linear" if parts.tied else "__call__"
        hooked = Hooked([(parts.output, OBSERVED)])
        self._finalizer = weakref.finalize(self, finalize, hooked.remove)
        self._finalizer.atexit = False
        self._check(parts)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Inside the block, forwards compute the logits of these ids only."""
        with observing(self):
            yield

    def enter(
        self, module: nn.Module, method: str, values: tuple[Any, ...]
    ) -> mx.array | None:
        """Replace the product of the output layer by the reduced one."""
        if module is not self._module or method != self._method:
            return None
        result: mx.array = self.layer(values[0])
        return mx.zeros_like(result) if self._blank else result

    def _check(self, parts: Parts) -> None:
        """Refuse a model whose logits of these ids are different inside of `only`."""
        whole, graph = self._trial(parts), io.StringIO()
        try:
            with self.only():
                some = self._trial(parts)
                self._blank = True
                mx.export_to_dot(graph, self._trial(parts))
        except ValueError as error:
            raise _refused(parts, f"with fewer logits it fails: {error}.") from error
        finally:
            self._blank = False
        if any(name in graph.getvalue() for name in _INDEXED):
            raise _refused(parts, "it reads or writes logits by their ids.")
        if some.shape != (1, POSITIONS, len(self.ids)):
            raise _refused(parts, f"they would have the shape {some.shape}.")
        expected = whole[..., self.ids]
        bound = _TOLERANCE * mx.maximum(mx.abs(expected).max(), 1e-6)
        if not (mx.abs(some - expected) <= bound).all():
            raise _refused(parts, "they would have other values.")

    @staticmethod
    def _trial(parts: Parts) -> mx.array:
        """Return the logits of a forward, not evaluated."""
        model: Any = parts.model
        tokens = mx.zeros((1, POSITIONS), mx.int32)
        result: mx.array = model(tokens, cache=make_prompt_cache(model))
        return result


class ReducedEnds:
    """The embeddings and the output layer of a target, for some ids' logits only."""

    def __init__(self, taps: HiddenStates, ids: Sequence[int]) -> None:
        self._taps, self._output = taps, ReducedOutput(taps.parts, ids)

    @property
    def layer(self) -> nn.Module:
        """The linear layer with the rows of those ids."""
        return self._output.layer

    def embed(self, tokens: mx.array) -> mx.array:
        """Return embeddings [batch, positions, dim] of ids [batch, positions]."""
        return self._taps.embed(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits [batch, positions, n] of states after the final norm."""
        return self._taps.head(hidden, only=self._output)


def _refused(parts: Parts, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(parts.model).__module__} cannot compute logits of a part of its "
        f"vocabulary: {why} Leave the reduced vocabulary out."
    )


def sliced(layer: nn.Module, ids: mx.array) -> nn.Module:
    """Return a linear layer with copies of the rows `ids`, uint32 [n], of a layer.

    `layer` is a linear layer or an embedding, quantized or not.

    Raises:
        TypeError: the layer is of another kind.
    """
    kind, copied = plain_class(layer), cast(Any, layer)
    made: nn.Module = nn.Linear(1, 1)
    if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        form = (copied.group_size, copied.bits, copied.mode)
        made = nn.QuantizedLinear(512, 1, True, *form)
    elif kind not in (nn.Linear, nn.Embedding):
        raise TypeError(f"its output layer is a {kind.__name__}")
    for name in ("weight", "bias", "scales", "biases"):
        rows = copied.get(name)
        if rows is None:
            made.pop(name, None)
        else:
            made[name] = rows[ids]
    mx.eval(made.parameters())
    return made
