"""Multi-token-prediction heads: two norms, a projection, a block, a last norm.

Slot i takes the target's state at position i and the token at position i + 1. Its
logits are for the token at i + 2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from support.references.blocks.primitives import Array, Weights, linear, rms
from support.references.tiny_files import Draws

Config = dict[str, Any]
Ids = NDArray[np.int64]
Named = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MtpRows:
    """Output of a head's layer for each slot."""

    logits: Array  # [n, V]
    recycled: Array  # [n, H], the state for the next step, or the next layer of a chain


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors around one layer's block."""

    project: str  # the projection of the concatenation
    token_norm: str
    state_norm: str
    last_norm: str | None  # before the logits
    head: str | None = None  # the layer's own output matrix; None: the target's


@dataclass(frozen=True, slots=True)
class Family:
    """A family of heads, with a tiny configuration of a target that has one."""

    module: str  # the target's module in mlx_lm.models
    config: Config  # config.json of the target and its head
    names: Sequence[Names]  # by layer
    # Runs one layer's block on [n, H]; if `plus_one`, norm weights are passed as 1 + w.
    block: Callable[["Family", Weights, int, Array], Array]
    # Names and shapes of all tensors that are no copies. {"x.#": (2, 8)} stands for
    # x.0 and x.1, each of shape (8,).
    tensors: Mapping[str, Sequence[int]]
    layers: int = 1  # number of layers; layer k reads what layer k - 1 recycles
    used: int | None = None  # number of layers that are used; None: all
    hidden_first: bool = False  # the state precedes the embedding in the concatenation
    plus_one: bool = False  # norms are stored as w and applied as 1 + w
    state: Literal["after_norm", "before_norm"] = "after_norm"  # input of the head
    recycles: Literal["after_norm", "before_norm"] = "after_norm"  # next step's input
    # Names of copies of the target's embedding and head in the file.
    copies: Mapping[str, Literal["embedding", "head"]] = field(default_factory=dict)

    @property
    def chains(self) -> bool:
        """Return whether drafted token k is layer k's; else all are layer 0's."""
        return (self.used or self.layers) > 1

    @property
    def text(self) -> Config:
        """The part of the config for the language model."""
        return dict(self.config.get("text_config", self.config))


def make_tensors(
    family: Family,
    seed: int,
    *,
    embedding: NDArray[np.float32],
    head: NDArray[np.float32],
) -> Named:
    """Return the random tensors of a head under their names on disk.

    `embedding` and `head` are the target's matrices [V, H], for files with copies.
    """
    draws, tensors = Draws(seed), {}
    for name, shape in family.tensors.items():
        count, each = (shape[0], shape[1:]) if "#" in name else (1, shape)
        for number in range(count):
            tensors[name.replace("#", str(number))] = _drawn(draws, name, each)
    for name, which in family.copies.items():
        tensors[name] = embedding if which == "embedding" else head
    if not family.plus_one:
        return tensors
    return {k: v - 1 if _is_norm(k) else v for k, v in tensors.items()}


def _drawn(draws: Draws, name: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return a random tensor, whose scale depends on its name.

    Biases of experts are not negative, so that experts of an excluded group are never
    chosen, whether exclusion sets their score to 0 or to minus infinity.
    """
    if len(shape) > 1:
        return draws.matrix(*shape)
    if name.endswith(".weight"):
        return draws.scale(*shape)
    bias = draws.vector(*shape, size=1.0 if "sink" in name else 0.3)
    return abs(bias) if name.endswith(("correction_bias", "expert_bias")) else bias


def rows(
    family: Family,
    tensors: Weights,
    hidden: Array,
    tokens: Ids,
    *,
    embedding: Array,
    head: Array,
    layer: int = 0,
) -> MtpRows:
    """Run one layer of a head over a whole history.

    Args:
        hidden: [n, H], the target's states, or recycled states.
        tokens: [n], for slot i the token at i + 1; for layer k of a chain, the token at
            i + 1 + k.
        embedding, head: the target's matrices [V, H].
    """
    tensors = {
        name: tensor.astype(np.float64) + (family.plus_one and _is_norm(name))
        for name, tensor in tensors.items()
    }
    config = family.text
    names = family.names[layer]
    eps = epsilon(config)
    token = rms(embedding[tokens], tensors[f"{names.token_norm}.weight"], eps)
    state = rms(hidden, tensors[f"{names.state_norm}.weight"], eps)
    both = [state, token] if family.hidden_first else [token, state]
    x = linear(tensors, names.project, np.concatenate(both, axis=-1))
    x = family.block(family, tensors, layer, x)
    y = x
    if names.last_norm is not None:
        y = rms(x, tensors[f"{names.last_norm}.weight"], eps)
    output = head if names.head is None else tensors[f"{names.head}.weight"]
    return MtpRows(
        logits=y @ output.T, recycled=y if family.recycles == "after_norm" else x
    )


def epsilon(config: Config) -> float:
    """Return the epsilon of a config's norms, under any of its names."""
    for name in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon"):
        if name in config:
            return float(config[name])
    raise KeyError("no epsilon")


def _is_norm(name: str) -> bool:
    return "norm" in name
