"""Draft checkpoints: reading and checking a folder's config.json and tensors.

The functions raise `ModelFolderError` for what is missing or not supported. `name` is
the drafter's name in the error.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.utils import infer_quant_config

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.rotation import (
    FULL,
    SLIDING,
    Rotation,
    check_rotation,
)
from mlx_speculation.models.config_json import nested
from mlx_speculation.models.quantize import runs_on_linux_cpu, to_float32
from mlx_speculation.models.safetensors_layout import (
    check_index,
    header,
    weight_files,
)

Config = dict[str, Any]
Weights = dict[str, mx.array]
Args = TypeVar("Args", bound=BaseModelArgs)
_SHOWN = 6


def layer_args(
    config: Config,
    name: str,
    kind: type[Args],
    *,
    rotations: Sequence[Rotation],
    gemma: bool = False,
) -> Args:
    """Read mlx-lm's arguments of the decoder layers from a Llama-like config.json.

    `rotations` has a rotation for each layer. All are checked, and the arguments get
    the first. With `gemma` the layers have Gemma's activation. Entries about biases are
    not read: the tensors show which layers have a bias.
    """
    key, *known = ("hidden_act", "silu", "swish")
    if gemma:
        key, *known = ("hidden_activation", "gelu_pytorch_tanh")
    said = config.get(key, known[0])
    if said not in known:
        raise ModelFolderError(
            f"{key} {said!r} in config.json of the {name} is not supported; supported "
            f"is {known[0]!r}."
        )
    positions: int | None = config.get("max_position_embeddings")
    eps: Any = config.get("rms_norm_eps", config.get("norm_eps", 1e-6))
    dim = number(config, "hidden_size", name)
    heads = number(config, "num_attention_heads", name)
    size = number(config, "head_dim", name, dim // heads)
    fields = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": number(config, "intermediate_size", name),
        "num_attention_heads": heads,
        "num_key_value_heads": number(config, "num_key_value_heads", name, heads),
        "head_dim": size,
        "rms_norm_eps": float(eps),
        "num_hidden_layers": number(config, "num_hidden_layers", name, 1),
        "vocab_size": 0,  # layers do not read it
        "tie_word_embeddings": False,
        "rope_theta": rotations[0].theta,
        "rope_scaling": rotations[0].scaling,
        "max_position_embeddings": positions,
    }
    for rotation in rotations:
        check_rotation(rotation, name, dims=size, positions=positions)
    result: Args = kind.from_dict(fields)
    return result


def layer_part(config: Config) -> Config:
    """Return the part of config.json that has the sizes of the drafter's layers.

    If the sizes are at the top, a text_config beside them is the target's.
    """
    part = config.get("transformer_layer_config")
    if part is None and "hidden_size" not in config:
        part = config.get("text_config")
    return part if isinstance(part, dict) else config


def number(
    config: Config,
    key: str,
    name: str,
    default: int | None = None,
    least: int = 1,
) -> int:
    """Return a whole number of config.json, at least `least`.

    If `default` is None, the number has to be there.
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelFolderError(
            f"config.json of the {name} has {key} {value!r}, which has to be a whole "
            f"number of at least {least}. Correct it, or choose another checkpoint."
        )
    return value


def layer_windows(
    kinds: Any, count: int, config: Config, key: str, name: str
) -> tuple[int | None, ...]:
    """Return the window of each layer; None: it has none.

    `kinds` is the list `layer_types` of config.json. It has to have `count` entries.
    `config[key]` is the size of each window.
    """
    known = isinstance(kinds, list) and all(each in (FULL, SLIDING) for each in kinds)
    if not known or len(kinds) != count:
        raise ModelFolderError(
            f"config.json of the {name} has layer_types {kinds!r}, which has to be a "
            f"list of {count} entries, each {FULL} or {SLIDING}."
        )
    if SLIDING not in kinds:
        return (None,) * count
    window = number(config, key, name)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def proposed_tokens(config: Config) -> Any:
    """Return the draft length in config.json, or None.

    The library `speculators` writes it there. The value is not checked.
    """
    methods = nested(config, "speculators_config", "proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return nested({"": first}, "", "speculative_tokens")


def whole_numbers(value: Any, key: str, name: str) -> list[int]:
    """Return a non-empty list of whole numbers in config.json."""
    if not isinstance(value, list) or not value or {type(n) for n in value} != {int}:
        raise ModelFolderError(
            f"config.json of the {name} has {key} {value!r}, which has to be a list of "
            "whole numbers."
        )
    return value


def read_tensors(folder: Path, name: str) -> Weights:
    """Return the tensors in a folder by their names, without a "model." prefix."""
    files = weight_files(folder, "*.safetensors")
    if not files:
        raise ModelFolderError(
            f"The folder {str(folder)!r} of the {name} has no *.safetensors. Files of "
            "other kinds are not read: convert them."
        )
    check_index(folder)
    result: Weights = {}
    for file in files:
        header(file)  # refuses truncated files with a clear error
        arrays: Any = mx.load(str(file))
        result |= {each.removeprefix("model."): value for each, value in arrays.items()}
    return _unpacked(
        {n: v for n, v in result.items() if not n.endswith("rotary_emb.inv_freq")}
    )


def _unpacked(weights: Weights) -> Weights:
    """Return the weights, unpacking those that modelopt has packed as NVFP4.

    `weight`, uint8, holds two E2M1 numbers a byte, the low half first. `weight_scale`,
    E4M3, holds one scale for every 16 numbers, and `weight_scale_2` holds one scale for
    all. The result has the dtype of the norms.
    """
    whole = ".weight_scale_2"
    parts = [name.removesuffix(whole) for name in weights if name.endswith(whole)]
    norms = (v.dtype for name, v in weights.items() if name.endswith("norm.weight"))
    dtype = next(norms, mx.bfloat16)
    for part in parts:
        numbers = mx.dequantize(
            weights.pop(f"{part}.weight").view(mx.uint32),
            weights.pop(f"{part}.weight_scale"),
            group_size=16,
            bits=4,
            mode="nvfp4",
        )
        numbers = numbers.astype(mx.float32) * weights.pop(f"{part}{whole}")
        weights.pop(f"{part}.input_scale", None)  # of activations
        weights[f"{part}.weight"] = numbers.astype(dtype)
    return weights


def renamed(weights: Weights, begins: Mapping[str, str]) -> Weights:
    """Return the tensors, with prefixes of names replaced: `begins` maps old to new."""
    result: Weights = {}
    for key, value in weights.items():
        for theirs, ours in begins.items():
            if key.startswith(theirs):
                key = ours + key.removeprefix(theirs)
        result[key] = value
    return result


def take_draft_ids(weights: Weights, vocab: int, drafter: str) -> mx.array | None:
    """Remove d2t and t2d from the weights; return the target's ids of the logits.

    Logit i has the id i + d2t[i], below `vocab`. None: there is no d2t.

    Raises:
        ModelFolderError: columns share an id, the target lacks an id, or t2d has
            other ids than d2t.
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
            f"{ids.max(initial=0)}, but each column needs an id of its own below "
            f"{vocab}. Choose the head of this target."
        )
    if known is not None:
        named = np.flatnonzero(np.array(known))
        if not np.array_equal(named, np.sort(ids)):
            raise ModelFolderError(
                f"t2d of the {drafter} has {named.size} ids and d2t {ids.size}, but "
                "both have to have the same ids. Take another checkpoint."
            )
    return mx.array(ids.astype(np.uint32))


def load_into(
    module: nn.Module,
    weights: Weights,
    name: str,
    file_name: Callable[[str], str] = str,
) -> None:
    """Load tensors by parameter name into a drafter's module, and evaluate them.

    Layers are quantized as the shapes of their tensors show. On a Linux CPU the module
    becomes float32. `file_name` returns a parameter's name in files.
    """
    add_biases(module, weights)
    quantize_like(module, weights)
    check_shapes(shapes_of(module), weights, name, file_name)
    module.load_weights(list(weights.items()))
    module.eval()
    mx.eval(module.parameters())
    if runs_on_linux_cpu():
        to_float32(module)


def add_biases(module: nn.Module, weights: Weights) -> None:
    """Give a bias to the linear layers that are stored with one."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and f"{path}.bias" in weights:
            part.bias = mx.zeros(len(part.weight))


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by name."""
    flat: Any = tree_flatten(module.parameters())
    return {name: value.shape for name, value in flat}


def quantize_like(module: nn.Module, weights: Weights) -> None:
    """Quantize those parts of a drafter's module that are stored quantized.

    Bits and group size are computed from the shapes. They often differ from the
    target's.
    """

    def packed(path: str, part: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(part, "to_quantized"):
            return False
        result: dict[str, Any] = infer_quant_config(path, part, weights)
        return result

    try:
        nn.quantize(module, class_predicate=packed)
    except ValueError as error:
        raise ModelFolderError(
            f"The draft is quantized in a way that mlx does not support: {error}"
        ) from error


def check_shapes(
    wanted: Mapping[str, tuple[int, ...]],
    weights: Weights,
    name: str,
    file_name: Callable[[str], str] = str,  # returns a parameter's name in files
) -> None:
    """Refuse weights whose names or shapes are not those in `wanted`."""

    def some(result: set[str]) -> str:
        shown = sorted(map(file_name, result))
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
            f"has tensors whose shapes do not follow from config.json: {some(wrong)} "
            f"({file_name(one)} has {weights[one].shape} instead of {wanted[one]})"
        )
    if problems:
        raise ModelFolderError(
            f"The {name} {'; '.join(problems)}. Take a whole checkpoint of this model."
        )
