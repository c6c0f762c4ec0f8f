"""Multi-token-prediction heads: two norms, a projection, a block, a last norm.

Slot i takes the target's state at position i and the token at position i + 1; its
logits are for the token at i + 2. The families differ in names, in the order of the
concatenation, in the block, and in the state that they recycle.
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
    """Output of a head's layer for each slot.

    Attributes:
        logits: [n, V].
        recycled: [n, H], the state that replaces the target's in the next step, or in
            the next layer of a chain.
    """

    logits: Array
    recycled: Array


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors around one layer's block.

    Attributes:
        project: the projection of the concatenation.
        token_norm: the norm of the token's embedding.
        state_norm: the norm of the target's state.
        last_norm: the norm before the logits; None: no norm.
        head: the layer's own output matrix; None: the target's.
    """

    project: str
    token_norm: str
    state_norm: str
    last_norm: str | None
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A family of heads, with a tiny configuration of a target that has one.

    Attributes:
        module: module of the target under mlx_lm.models.
        config: config.json of the target and its head.
        names: of each layer's tensors around its block.
        block: runs one layer's block on [n, H], see `mtp.blocks`; it gets the weights
            of norms as they are applied.
        tensors: names and shapes of all tensors but copies; # in a name stands for each
            number below the first number of the shape.
        layers: number of the head's layers. Layer k reads the output of layer k - 1 at
            the same slot.
        used: number of layers that are used; None: all.
        hidden_first: whether the state precedes the embedding in the concatenation.
        plus_one: whether norms are stored as w and applied as 1 + w.
        state: the state of the target that the head reads.
        recycles: the state of the head that its next step reads.
        copies: names of copies of the target's embedding and head in the file.
    """

    module: str
    config: Config
    names: Sequence[Names]
    block: Callable[["Family", Weights, int, Array], Array]
    tensors: Mapping[str, Sequence[int]]
    layers: int = 1
    used: int | None = None
    hidden_first: bool = False
    plus_one: bool = False
    state: Literal["after_norm", "before_norm"] = "after_norm"
    recycles: Literal["after_norm", "before_norm"] = "after_norm"
    copies: Mapping[str, Literal["embedding", "head"]] = field(default_factory=dict)

    @property
    def chains(self) -> bool:
        """Return whether layer k makes draft k, and not layer 0 applied again."""
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

    Args:
        family: the family.
        seed: chooses the numbers.
        embedding: [V, H], the target's, for files with a copy.
        head: [V, H], the target's output matrix, for files with a copy.
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
        family: the family.
        tensors: the head's tensors, under their names on disk.
        hidden: [n, H], the target's states, or recycled states.
        tokens: [n], the token after each state; for layer k of a chain the token k
            positions later.
        embedding: [V, H], the target's.
        head: [V, H], the target's output matrix, for layers without one.
        layer: number of the layer.
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
