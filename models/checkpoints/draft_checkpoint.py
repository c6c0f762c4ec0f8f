"""What drafters in folders of their own share: sizes, tensors, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import infer_quant_config

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.quantize import runs_on_linux_cpu, to_float32
from mlx_speculation.models.safetensors_layout import header

Config = dict[str, Any]
Weights = dict[str, mx.array]
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a drafter's decoder layers.

    Attributes:
        dim: the hidden size.
        mlp: the width of the MLP.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: the size of a head.
        eps: of the norms.
        layers: how many there are.
        rope_base: the base of the rotation.
        rope_scaling: as mlx-lm takes it, or None.
        max_positions: for rotations that depend on it.
    """

    dim: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layers: int
    rope_base: float
    rope_scaling: dict[str, Any] | None
    max_positions: int | None

    def rope(self) -> nn.Module:
        """Return the rotation of a head, over positions that a cache counts.

        Raises:
            ModelFolderError: it is of an unknown type.
        """
        try:
            made: nn.Module = initialize_rope(
                self.head_dim,
                self.rope_base,
                False,
                self.rope_scaling,
                self.max_positions,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"config.json of the draft has rope_scaling {self.rope_scaling}, which "
                f"is not understood: {error!r}."
            ) from error
        return made


def sizes_of(config: Config, name: str) -> Sizes:
    """Read the sizes of a Llama-like config.json.

    Args:
        config: what it holds.
        name: of the drafter, for messages.

    Raises:
        ModelFolderError: one is missing, or of another kind.
    """
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelFolderError(
            f"config.json of the {name} says hidden_act {act!r}, and 'silu' is known."
        )
    dim, heads = (
        number(config, "hidden_size", name),
        number(config, "num_attention_heads", name),
    )
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if rope is not None and not isinstance(rope, dict):
        raise ModelFolderError(
            f"rope_scaling of the {name} is {rope!r}, and an object or null is needed."
        )
    theta: Any = config.get("rope_theta", (rope or {}).get("rope_theta", 10_000.0))
    return Sizes(
        dim=dim,
        mlp=number(config, "intermediate_size", name),
        heads=heads,
        kv_heads=number(config, "num_key_value_heads", name, heads),
        head_dim=number(config, "head_dim", name, dim // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        layers=number(config, "num_hidden_layers", name, 1),
        rope_base=float(theta),
        rope_scaling=rope,
        max_positions=config.get("max_position_embeddings"),
    )


def number(config: Config, key: str, name: str, default: int | None = None) -> int:
    """Return a positive whole number of config.json.

    Raises:
        ModelFolderError: it is missing and has no default, or is none.
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(
            f"config.json of the {name} says {key} {value!r}, and a whole number of at "
            "least 1 is needed. Take a whole checkpoint."
        )
    return value


def read_tensors(folder: Path, name: str) -> Weights:
    """Return all tensors in a folder's safetensors files, without "model." in front.

    Raises:
        ModelFolderError: there is no such file, or one cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(
            f"The folder {str(folder)!r} of the {name} has no *.safetensors. Files of "
            "other kinds are not read: convert them."
        )
    found: Weights = {}
    for file in files:
        header(file)  # cut files are refused with a clear error
        held: Any = mx.load(str(file))
        found |= {each.removeprefix("model."): value for each, value in held.items()}
    return {n: v for n, v in found.items() if not n.endswith("rotary_emb.inv_freq")}


def take_draft_ids(weights: Weights, vocab: int, drafter: str) -> mx.array | None:
    """Take d2t and t2d out of the weights, and return the target's ids of the logits.

    The id of column i is i + d2t[i].

    Args:
        weights: the tensors, from which the two are taken.
        vocab: how many ids the target has.
        drafter: its name, for messages.

    Raises:
        ModelFolderError: columns share an id, or the target lacks one.
    """
    shifts, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if shifts is None:
        return None
    ids = np.array(shifts).astype(np.int64) + np.arange(shifts.size)
    right = ids.size > 0 and ids.min() >= 0 and ids.max() < vocab
    if shifts.ndim != 1 or not right or np.unique(ids).size != ids.size:
        raise ModelFolderError(
            f"d2t of the {drafter} maps {ids.size} columns to "
            f"{np.unique(ids).size} ids from {ids.min(initial=0)} to "
            f"{ids.max(initial=0)}, and each has to have an id of its own below "
            f"{vocab}. Choose the head of this target."
        )
    if known is not None:
        named = np.flatnonzero(np.array(known))
        if not np.array_equal(named, np.sort(ids)):
            raise ModelFolderError(
                f"t2d of the {drafter} names {named.size} ids and d2t {ids.size}, and "
                "they should be the same. Take a whole checkpoint."
            )
    return mx.array(ids.astype(np.uint32))


def rows_of(weights: Weights, name: str) -> int | None:
    """Return how many rows the weight of a layer has; None: there is none."""
    found = weights.get(f"{name}.weight")
    return None if found is None else int(found.shape[0])


def biased(weights: Weights) -> frozenset[str]:
    """Return the names of layers that have a bias, without what is before them."""
    return frozenset(n.split(".")[-2] for n in weights if n.endswith(".bias"))


def load_into(module: nn.Module, weights: Weights, name: str) -> None:
    """Load a drafter's tensors, quantized ones as shapes say, and evaluate them.

    On a Linux CPU the module becomes float32.

    Raises:
        ModelFolderError: they are not all, or more than, what the module has.
    """
    quantize_like(module, weights)
    check_shapes(shapes_of(module), weights, name)
    module.load_weights(list(weights.items()))
    module.eval()
    mx.eval(module.parameters())
    if runs_on_linux_cpu():
        to_float32(module)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by name."""
    flat: Any = tree_flatten(module.parameters())
    return {name: value.shape for name, value in flat}


def quantize_like(module: nn.Module, weights: Weights) -> None:
    """Quantize those parts of a draft that are stored quantized.

    Bits and group size follow from the shapes: a draft is often packed in another
    way than its target.

    Raises:
        ModelFolderError: the shapes fit no format.
    """

    def packed(path: str, part: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(part, "to_quantized"):
            return False
        found: dict[str, Any] = infer_quant_config(path, part, weights)
        return found

    try:
        nn.quantize(module, class_predicate=packed)
    except ValueError as error:
        raise ModelFolderError(
            f"The draft is packed in a way that mlx does not know: {error}"
        ) from error


def check_shapes(
    wanted: Mapping[str, tuple[int, ...]], weights: Weights, name: str
) -> None:
    """Refuse weights of other names or shapes than a module has."""

    def some(found: set[str]) -> str:
        shown = sorted(found)
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return ", ".join(shown[:_SHOWN]) + more

    problems = []
    if missing := wanted.keys() - weights.keys():
        problems.append(f"lacks {some(missing)}")
    if extra := weights.keys() - wanted.keys():
        problems.append(f"has tensors that are not known: {some(extra)}")
    both = wanted.keys() & weights.keys()
    if wrong := {one for one in both if wanted[one] != weights[one].shape}:
        one = min(wrong)
        problems.append(
            f"has another shape than config.json says for {some(wrong)}: "
            f"{weights[one].shape} instead of {wanted[one]} for the first"
        )
    if problems:
        raise ModelFolderError(
            f"The {name} {'; '.join(problems)}. Take a whole checkpoint of this kind."
        )


class GatedMlp(nn.Module):
    """The MLP of a Llama layer.

    Args:
        sizes: the drafter's.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.dim, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.dim, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP of rows [batch, positions, dim]."""
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def by_head(x: mx.array, heads: int) -> mx.array:
    """Return [batch, positions, heads * size] as [batch, heads, positions, size]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def side_by_side(x: mx.array) -> mx.array:
    """Undo `by_head`."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
