"""Finding the parts of a model in the trace of one forward; see `parts`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.models.introspect.parts import Parts
from mlx_speculation.models.introspect.trace import ModuleCall, Trace, trace
from mlx_speculation.models.observer import first_array

Found = TypeVar("Found")


class _MissingError(Exception):
    """Reason why a part was not found."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last steps of a forward before the head."""

    norm: ModuleCall | None  # the last call of the final norm; None: it has no weights
    trunk: ModuleCall | None  # the outermost call that returned `hidden`, if any
    hidden: mx.array  # the input of the head


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model.

    Builds one forward of two tokens with new caches, and does not evaluate it.
    """
    traced = trace(model)
    members = list(getattr(model, "layers", None) or [])
    runs = traced.of(members)
    missing: dict[str, str] = {}

    def attempt(name: str, find: Callable[[], Found]) -> Found | None:
        try:
            return find()
        except _MissingError as reason:
            missing[name] = str(reason)
            return None

    end = attempt("norm", lambda: _end(traced, runs))
    layers = attempt("layers", lambda: _layers(traced, members, runs, end))
    entry = attempt("entry", lambda: _entry(runs, end))
    embedding = attempt("embedding", lambda: _embedding(traced, runs, end))
    output = None if end is None else _output(traced, end)
    norm = None if end is None or end.norm is None else end.norm.module
    return Parts(
        model,
        dim=0 if end is None else end.hidden.shape[-1],
        norm=norm,
        norm_calls=0 if norm is None else len(traced.of([norm])),
        trunk=None if end is None or end.trunk is None else end.trunk.module,
        layers=tuple(layers or ()),
        entry=entry,
        embedding=embedding,
        output=None if output is None else output.module,
        tied=output is not None and output.module is embedding,
        bare=output is not None and output.result is traced.logits,
        missing=missing,
    )


def _end(traced: Trace, runs: list[ModuleCall]) -> _End:
    """Return the final norm, the trunk and the input of the head."""
    last = runs[-1].stop if runs else 0
    norms = [call for call in traced.calls if call.start > last and _is_norm(call)]
    if not norms:
        return _weightless(traced, runs)
    norm = norms[-1]
    trunk = _returning(traced, norm)
    read = any(_to_logits(traced, call, norm.result) for call in traced.calls)
    if trunk is None and not (runs and read):
        reason = "the head does not take it" if runs else "none of model.layers ran"
        raise _MissingError(
            f"the last norm after the layers is a {type(norm.module).__name__}. No "
            f"module around it returns its result, and {reason}."
        )
    return _End(norm, trunk, norm.result)


def _is_norm(call: ModuleCall) -> bool:
    """Return whether a module has one weight for each dimension of a hidden state."""
    inside, result = first_array(call.values), call.result
    if not isinstance(result, mx.array) or inside is None:
        return False
    weights: Any = tree_flatten(call.module.parameters())
    shapes = {weight.shape for _, weight in weights}
    return shapes == {inside.shape[-1:]} and inside.shape == result.shape


def _returning(traced: Trace, call: ModuleCall) -> ModuleCall | None:
    """Return the outermost call around `call` that returns the same result.

    The model's call does not count. None: there is no such call.
    """
    around = (outer for outer in traced.calls[1:] if outer.contains(call))
    return next((outer for outer in around if outer.result is call.result), None)


def _to_logits(traced: Trace, call: ModuleCall, hidden: mx.array) -> bool:
    """Return whether a call turns `hidden` into an array of the logits' shape."""
    if not call.reads(hidden) or not isinstance(call.result, mx.array):
        return False
    return call.result.shape == traced.logits.shape


def _weightless(traced: Trace, runs: list[ModuleCall]) -> _End:
    """Return the end of a trunk that has no module with weights as its final norm."""
    owner = runs[-1].caller if runs else None
    if owner is None or owner is traced.calls[0]:
        raise _MissingError(
            "no call of a norm was found after the last of model.layers, and no "
            "module around the layers."
        )
    hidden = owner.result
    if not traced.is_hidden(hidden) or hidden is traced.logits:
        raise _MissingError(
            "no call of a norm was found after the last of model.layers, and what "
            f"the {type(owner.module).__name__} around them returns is not a hidden "
            "state."
        )
    return _End(None, owner, hidden)


def _layers(
    traced: Trace, members: Sequence[Any], runs: list[ModuleCall], end: _End | None
) -> Sequence[Any]:
    """Return the decoder layers, if each passes one hidden state to the next."""
    order = [next(i for i, m in enumerate(members) if m is r.module) for r in runs]
    if not members or order != list(range(len(members))):
        raise _MissingError(
            f"model.layers has {len(members)} modules, but a forward calls them in the "
            f"order {order}. Each has to be called once, in order."
        )
    if end is None:
        raise _MissingError("neither the final norm nor the head's input was found.")
    shape = end.hidden.shape
    for index, run in enumerate(runs):
        outputs = run.result if isinstance(run.result, tuple | list) else [run.result]
        hidden = [value for value in outputs if traced.is_hidden(value)]
        if len(hidden) != 1 or first_array(outputs).shape != shape:
            raise _MissingError(
                f"layer {index} does not return one hidden state per position, of "
                f"shape {shape}, but {_described(run.result)}."
            )
    readers = [*runs[1:], *([end.norm] if end.norm is not None else [])]
    for index, (run, reader) in enumerate(zip(runs, readers, strict=False)):
        if not reader.reads(first_array(run.result)):
            raise _MissingError(
                f"the {_name(reader)} after layer {index} is not given what that layer "
                "returns: the model keeps a part of the state elsewhere."
            )
    return members


def _entry(runs: list[ModuleCall], end: _End | None) -> nn.Module:
    """Return the first layer, if its input is a hidden state."""
    given = first_array(runs[0].values) if runs else None
    if end is None or given is None or given.shape != end.hidden.shape:
        raise _MissingError(
            "the first of model.layers is not called with one hidden state per "
            "position."
        )
    return runs[0].module


def _embedding(traced: Trace, runs: list[ModuleCall], end: _End | None) -> nn.Module:
    first = runs[0].start if runs else traced.calls[0].stop
    dim = None if end is None else end.hidden.shape[-1]
    calls = [
        call
        for call in traced.calls
        if call.stop < first
        and len(call.values) == 1
        and call.values[0] is traced.ids
        and traced.is_hidden(call.result)
        and call.result.shape[-1] == dim
    ]
    outer = [c for c in calls if not any(other.contains(c) for other in calls)]
    heads = {id(call.module) for call in traced.calls if call.method == "as_linear"}
    tied = [call for call in outer if id(call.module) in heads]
    result = tied or outer
    if len(result) != 1:
        raise _MissingError(
            f"{len(result)} modules make hidden states of the token ids alone, before "
            "the first of model.layers, but exactly one should."
        )
    return result[0].module


def _output(traced: Trace, end: _End) -> ModuleCall | None:
    calls = [call for call in traced.calls if _to_logits(traced, call, end.hidden)]
    outer = [c for c in calls if not any(other.contains(c) for other in calls)]
    return outer[0] if len(outer) == 1 else None


def _name(call: ModuleCall) -> str:
    return type(call.module).__name__


def _described(value: Any) -> str:
    if isinstance(value, mx.array):
        return f"an array of shape {value.shape}"
    if isinstance(value, tuple | list):
        return "a tuple of " + ", ".join(_described(each) for each in value)
    return f"a {type(value).__name__}"
