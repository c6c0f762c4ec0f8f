"""Multi-token-prediction heads: two norms, a projection, a block, a last norm.

Slot i takes the target's state at position i and the token at position i + 1; its
logits are for the token at i + 2. The families differ in names, in what stands first
in the concatenation, in the block, and in what they recycle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from support.references.numerics import Array, Ids, Tensors, linear, rms_norm, weight
from support.references.tiny_files import Draws

Config = dict[str, Any]
Named = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MtpRows:
    """Output of a head's layer for each slot.

    Attributes:
        logits: [n, V].
        recycled: [n, H], what takes the place of the target's state in the next
            step, or in the next layer where layers are chained.
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
        last_norm: the norm before the logits; None: there is none.
        head: the layer's own head; None: the target's.
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
        module: of the target under mlx_lm.models.
        config: config.json of the target and its head.
        names: of each layer's tensors around its block.
        block: runs one layer's block on [n, H], see `mtp.blocks`; norms are stored as
            they are applied.
        tensors: names and shapes of all but copies; # numbers as many as the shape
            begins with.
        layers: of the head. Layer k takes what layer k - 1 gave at the same slot.
        used: how many of them; None: all.
        hidden_first: the order in the concatenation.
        plus_one: whether norms are stored as w and applied as 1 + w.
        state: which state of the target goes in.
        recycles: which state of its own goes on.
        copies: names of copies of the target's embedding and head in the file.
    """

    module: str
    config: Config
    names: Sequence[Names]
    block: Callable[["Family", Tensors, int, Array], Array]
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
        """Return whether draft k is made by layer k, not by the first applied again."""
        return (self.used or self.layers) > 1

    @property
    def text(self) -> Config:
        """The part of the config that tells of the language model."""
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
        family: whose.
        seed: chooses them.
        embedding: [V, H], the target's, for files with a copy.
        head: [V, H], the target's, for files with a copy.
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
    """Return a random tensor of the scale that its name asks for.

    Biases of experts are not negative: what a closed group scores then is never chosen,
    be it 0 or minus infinity.
    """
    if len(shape) > 1:
        return draws.matrix(*shape)
    if name.endswith(".weight"):
        return draws.scale(*shape)
    bias = draws.vector(*shape, size=1.0 if "sink" in name else 0.3)
    return abs(bias) if name.endswith(("correction_bias", "expert_bias")) else bias


def rows(
    family: Family,
    tensors: Tensors,
    hidden: Array,
    tokens: Ids,
    *,
    embedding: Array,
    head: Array,
    layer: int = 0,
) -> MtpRows:
    """Run one layer of a head over a whole history.

    Args:
        family: whose.
        tensors: all of the head's, under their names on disk.
        hidden: [n, H], the target's states, or what a layer or a step recycled.
        tokens: [n], the token after each state; for layer k of a chain the one k
            further.
        embedding: [V, H], the target's.
        head: [V, H], the target's, used where the layer has none.
        layer: its number.
    """
    if family.plus_one:
        tensors = {
            name: np.asarray(tensor, dtype=np.float64) + 1 if _is_norm(name) else tensor
            for name, tensor in tensors.items()
        }
    config = family.text
    names = family.names[layer]
    eps = epsilon(config)
    token = rms_norm(
        embedding[tokens], weight(tensors, f"{names.token_norm}.weight"), eps
    )
    state = rms_norm(hidden, weight(tensors, f"{names.state_norm}.weight"), eps)
    both = [state, token] if family.hidden_first else [token, state]
    x = linear(tensors, names.project, np.concatenate(both, axis=-1))
    x = family.block(family, tensors, layer, x)
    y = x
    if names.last_norm is not None:
        y = rms_norm(x, weight(tensors, f"{names.last_norm}.weight"), eps)
    head_weight = (
        head if names.head is None else weight(tensors, f"{names.head}.weight")
    )
    return MtpRows(
        logits=y @ head_weight.T, recycled=y if family.recycles == "after_norm" else x
    )


def epsilon(config: Config) -> float:
    """Return the epsilon of a config's norms, whatever it is called."""
    for name in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon"):
        if name in config:
            return float(config[name])
    raise KeyError("no epsilon")


def _is_norm(name: str) -> bool:
    return "norm" in name
