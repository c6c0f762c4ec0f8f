"""Functions that stand in, in a round, for those that a model's layers call.

mlx-lm's layers call attention and activations by global names. A hooked layer runs its
own code, made again with other functions in these names. Each asks whether it serves,
and calls what it stands in for where it does not. Outside of rounds, and where a name
has come to mean something else, the layer's own code runs. Which functions there are
depends on the device:

    cuda   attention by the kernel of `cuda.attention`
    x86    attention by `cpu.attention`, activations by `cpu.exp`, norms and
           rotations by `cpu.norm_rope` and `cpu.shared_rope`; only with OpenBLAS in
           front, where rows differ from single rows by rounding anyway
"""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.cpu import exp, norm_rope, shared_rope
from mlx_speculation.models.cuda.available import kernels_compile
from mlx_speculation.models.instance_hooks import (
    OF_ROUNDS,
    Hook,
    derived,
    made_again,
    plain_class,
)
from mlx_speculation.models.ops.attention import attend_on_cuda, attend_on_x86
from mlx_speculation.models.ops.latent_attention import ATTENTIONS
from mlx_speculation.models.recurrent.mixers import COMPRESSORS, MIXERS
from mlx_speculation.models.round_context import (
    Device,
    cuda_serves,
    device_of_round,
    x86_serves,
)

_ATTENTION = "scaled_dot_product_attention"
# mlx's own are as fast for fewer elements.
_FEWEST = 2048


class StandIn(NamedTuple):
    """What a global name means in a layer's code, and what it is to mean in a round.

    Attributes:
        parts: of a module, those names of it that matter; empty: the name itself does.
        within: where in the module they are, if not at its top.
    """

    theirs: Any
    ours: Any
    parts: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()


def _for_many(
    ours: Callable[..., mx.array], theirs: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """Return `ours` where it serves: rows of float32, all of one shape and not few."""

    def call(*arrays: mx.array) -> mx.array:
        first = arrays[0]
        many = first.size >= _FEWEST and first.size > first.shape[-1]
        same = all(a.dtype == mx.float32 and a.shape == first.shape for a in arrays)
        ask = many and same and device_of_round() == "x86"
        return (ours if ask else theirs)(*arrays)

    return call


def _with(module: Any, **parts: Any) -> Any:
    """Return what can be named like a module, and in which some parts are others."""
    return SimpleNamespace(**{**vars(module), **parts})


def _precise_swiglu(_: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    return exp.swiglu(gate, x)


_NN = {
    name: _for_many(getattr(exp, name), getattr(nn, name))
    for name in ("silu", "gelu_approx")
}

_STAND_INS: dict[Device, dict[str, StandIn]] = {
    "cuda": {_ATTENTION: StandIn(scaled_dot_product_attention, attend_on_cuda)},
    "x86": {
        _ATTENTION: StandIn(scaled_dot_product_attention, attend_on_x86),
        "swiglu": StandIn(
            activations.swiglu, _for_many(exp.swiglu, activations.swiglu)
        ),
        "precise_swiglu": StandIn(
            activations.precise_swiglu,
            _for_many(_precise_swiglu, activations.precise_swiglu),
        ),
        "nn": StandIn(nn, _with(nn, **_NN), frozenset(_NN)),
        "mx": StandIn(
            mx,
            _with(
                mx,
                fast=_with(mx.fast, rope=shared_rope.rope, rms_norm=norm_rope.rms_norm),
            ),
            frozenset({"rope", "rms_norm"}),
            within=frozenset({"fast"}),
        ),
    },
}


def _called(method: Any, device: Device) -> tuple[str, ...]:
    """Return the names in a method's code that have a stand-in."""
    if not isinstance(method, FunctionType):
        return ()
    names = set(method.__code__.co_names)
    return tuple(
        name
        for name, stand_in in _STAND_INS[device].items()
        if name in names
        and method.__globals__.get(name) is stand_in.theirs
        and stand_in.within <= names
        and (not stand_in.parts or stand_in.parts & names)
    )


@functools.cache
def _with_stand_ins(kind: Any, device: Device) -> type[nn.Module]:
    """Return a class whose code has the stand-ins of a device, in a round."""
    original: FunctionType = kind.__call__
    names = {name: _STAND_INS[device][name] for name in _called(original, device)}
    means = original.__globals__
    again = made_again(original, {name: each.ours for name, each in names.items()})
    theirs = [(name, each.theirs) for name, each in names.items()]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current: Any = kind.__call__
        ours = current is original and device_of_round() == device
        for name, their in theirs:
            ours = ours and means[name] is their
        return (again if ours else current)(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def activations_of(method: Any) -> dict[str, Any]:
    """Return activations that ask for themselves whether they serve, by their names.

    For code that is made again for another reason.
    """
    names = {"nn", "swiglu", "precise_swiglu"}.intersection(_called(method, "x86"))
    return {name: _STAND_INS["x86"][name].ours for name in names}


def stand_in_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer whose own code calls what has a stand-in, with its hook.

    Attentions over latents have a way of their own, and of mixers the code is made
    again to take notes.
    """
    device: Device
    if cuda_serves() and kernels_compile():
        device = "cuda"
    elif x86_serves():
        device = "x86"
        exp.compile_here()
        norm_rope.compile_here()
    else:
        return
    for _, module in model.named_modules():
        kind: Any = plain_class(module)
        place = (kind.__module__, kind.__name__)
        if place in ATTENTIONS or place in MIXERS or place in COMPRESSORS:
            continue
        if _called(kind.__call__, device):
            yield module, Hook(OF_ROUNDS, _with_stand_ins, (device,))
