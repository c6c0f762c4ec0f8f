"""Conversion of the stored tensors of an MTP head to the parameters of its module.

mlx-lm drops these tensors, so they are converted here, without reading config.json:

    X.weight, X.weight_scale_inv         e4m3, a scale for each 128 x 128: made bfloat16
    experts.{e}.gate_proj.weight ...     stacked to switch_mlp.gate_proj.weight
    experts.gate_up_proj [E, 2I, H]      split: the gate's rows come first
    kv_b_proj [heads * (nope + v), rank] split into embed_q and unembed_out
    qkv_proj                             split into q_proj, k_proj and v_proj
    norms stored as w, applied as 1 + w  one is added, by `with_ones`
"""

import re
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.convention import Norms
from mlx_speculation.models.checkpoints.draft_checkpoint import Weights

Shapes = Mapping[str, tuple[int, ...]]

_FP8_BLOCK = 128
_PARTS = ("weight", "scales", "biases", "bias")
# Parts of an expert without a gate: names in files, mapped to mlx-lm's names.
_UNGATED_PARTS = {"up_proj": "fc1", "down_proj": "fc2"}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases|bias)")
_FUSED = re.compile(r"(.*)\.experts\.(gate_up_proj|down_proj)(?:\.weight)?")


def transformed(weights: Weights, wanted: Shapes) -> Weights:
    """Return the weights with the names and shapes of the head's parameters.

    In the names of `weights`, prefixes are `MtpHead`'s already; the rest is as stored.
    `wanted` has the shapes of the module's parameters before quantization. Unknown
    tensors stay unchanged.

    Raises:
        ModelFolderError: experts are missing or too many, or scales do not fit.
    """
    weights = _without_fp8(weights)
    weights = _stacked_experts(weights, wanted)
    weights = _split_fused_experts(weights)
    weights = _split_latent(weights, wanted)
    return _split_qkv(weights, wanted)


def norms_of(weights: Weights) -> Weights:
    """Return the weights of norms among `weights`."""
    return {n: w for n, w in weights.items() if is_norm(n) and w.ndim == 1}


def with_ones(stored: Weights, norms: Norms) -> Weights:
    """Return the weights of norms as they are applied; see `MtpConvention.norms`."""

    def lacks_one(name: str) -> bool:
        if isinstance(norms, tuple):
            return name.split(".")[-2] in norms
        return norms == "plus_one"

    return {n: w + 1 if lacks_one(n) else w for n, w in stored.items()}


def is_norm(name: str) -> bool:
    """Return whether a parameter of a head is the weight of a norm."""
    *_, module, part = name.split(".")
    return part == "weight" and ("norm" in module or module == "final")


def _without_fp8(weights: Weights) -> Weights:
    ending = "_scale_inv"
    result: Weights = {}
    for name, value in weights.items():
        if name.endswith(f".weight{ending}"):
            continue
        scales = weights.get(name + ending)
        result[name] = value if scales is None else _from_fp8(name, value, scales)
    return result


def _from_fp8(name: str, weight: mx.array, scales: mx.array) -> mx.array:
    """Return e4m3 numbers (bytes [m, n]) times the scales of their blocks, bfloat16."""
    size = _FP8_BLOCK
    blocks = tuple(-(-length // size) for length in weight.shape)
    if weight.dtype != mx.uint8 or scales.shape != blocks:
        raise ModelFolderError(
            f"{name!r} of the MTP head is {weight.dtype} {weight.shape} with scales "
            f"{scales.shape}; only e4m3 with scales {blocks}, one for each block of "
            f"{size} x {size}, is supported. Convert the checkpoint to bfloat16."
        )
    m, n = weight.shape
    wide = mx.repeat(mx.repeat(scales, size, 0)[:m], size, 1)[:, :n]
    return (mx.from_fp8(weight, dtype=mx.float32) * wide).astype(mx.bfloat16)


def _stacked_experts(weights: Weights, wanted: Shapes) -> Weights:
    result: Weights = {}
    experts: dict[tuple[str, str, str], dict[int, mx.array]] = {}
    for name, value in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = value
        else:
            block, index, part, kind = match.groups()
            experts.setdefault((block, part, kind), {})[int(index)] = value
    for (block, part, kind), values in experts.items():
        place = f"{block}.switch_mlp.{_UNGATED_PARTS.get(part, part)}"
        if f"{place}.weight" not in wanted:
            place = f"{block}.switch_mlp.{part}"
        count = wanted.get(f"{place}.weight", (len(values),))[0]
        missing = sorted(set(range(count)) - values.keys())
        if missing or len(values) != count:
            wrong = missing or sorted(values.keys() - set(range(count)))
            raise ModelFolderError(
                f"The MTP head has {len(values)} of {count} experts' {part}.{kind}; "
                f"{'missing' if missing else 'not expected'}: "
                f"{block}.experts.{wrong[0]}.{part}.{kind}. Take a whole checkpoint."
            )
        result[f"{place}.{kind}"] = mx.stack([values[e] for e in range(count)])
    return result


def _split_fused_experts(weights: Weights) -> Weights:
    result: Weights = {}
    for name, value in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            result[name] = value
            continue
        place = f"{match[1]}.switch_mlp"
        if match[2] == "down_proj":
            result[f"{place}.down_proj.weight"] = value
        else:
            gate, up = mx.split(value, 2, axis=-2)
            result[f"{place}.gate_proj.weight"] = gate
            result[f"{place}.up_proj.weight"] = up
    return result


def _split_latent(weights: Weights, wanted: Shapes) -> Weights:
    """Split kv_b_proj; a quantized one is dequantized, which takes more memory."""
    result = dict(weights)
    for name in weights:
        path = name.removesuffix(".kv_b_proj.weight")
        query = wanted.get(f"{path}.embed_q.weight")
        if path == name or query is None:
            continue
        heads, rank, nope = query
        packed = {
            part: result.pop(f"{path}.kv_b_proj.{part}", None) for part in _PARTS[:3]
        }
        both = _unpacked(name, packed, rank).reshape(heads, -1, rank)
        result[f"{path}.embed_q.weight"] = mx.contiguous(
            both[:, :nope].swapaxes(-1, -2)
        )
        result[f"{path}.unembed_out.weight"] = mx.contiguous(both[:, nope:])
    return result


def _unpacked(name: str, parts: Mapping[str, mx.array | None], inputs: int) -> mx.array:
    """Return a weight [outputs, inputs], dequantized if it has scales."""
    weight, scales = parts["weight"], parts["scales"]
    assert weight is not None
    if scales is None:
        return weight
    linear = nn.Linear(inputs, 1, bias=False)
    path = name.removesuffix(".weight")
    form = infer_quant_config(
        path, linear, {f"{path}.weight": weight, f"{path}.scales": scales}
    )
    return mx.dequantize(weight, scales, parts["biases"], **form)


def _split_qkv(weights: Weights, wanted: Shapes) -> Weights:
    result: Weights = {}
    for name, value in weights.items():
        path, _, part = name.rpartition(".qkv_proj.")
        rows = [wanted.get(f"{path}.{each}_proj.weight", (0,))[0] for each in "qkv"]
        if not path or not all(rows):
            result[name] = value
            continue
        pieces = mx.split(value, [rows[0], rows[0] + rows[1]], axis=0)
        for each, piece in zip("qkv", pieces, strict=True):
            result[f"{path}.{each}_proj.{part}"] = piece
    return result
