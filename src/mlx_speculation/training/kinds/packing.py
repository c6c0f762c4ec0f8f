"""Storage of trained weights, as 16-bit numbers or quantized to 4 or 8 bits."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_speculation.json_files import write_json
from mlx_speculation.models.quantize import GROUP_SIZES

Tensors = dict[str, mx.array]


def packed(module: nn.Module, bits: int | None) -> tuple[Tensors, dict[str, Any]]:
    """Return a module's weights in their stored form, and entries for config.json.

    Matrices of linear and similar layers get `bits` bits; None: bfloat16. Quantized
    layers stay as they are.
    """
    layers = {path for path, part in module.named_modules() if _can_be_packed(part)}
    flat: Any = tree_flatten(module.parameters())
    stored: Tensors = {}
    used: set[int] = set()
    for name, value in flat:
        path, _, kind = name.rpartition(".")
        group = next((g for g in GROUP_SIZES if value.shape[-1] % g == 0), None)
        matrix = kind == "weight" and path in layers
        if bits is not None and matrix and group is not None:
            used.add(group)
            parts = mx.quantize(value.astype(mx.bfloat16), group, bits)
            names = (name, f"{path}.scales", f"{path}.biases")
            stored |= dict(zip(names, parts, strict=True))
        elif value.dtype == mx.float32:
            stored[name] = value.astype(mx.bfloat16)
        else:
            stored[name] = value
    # config.json states the largest group size; loading infers each matrix's own.
    said = {"group_size": max(used), "bits": bits} if used else {}
    return stored, {"quantization": said} if said else {}


def id_tensors(ids: mx.array, width: int) -> Tensors:
    """Return d2t and t2d, which relate columns of a head's logits to target ids.

    Column i stands for `ids[i]`; the ids ascend. d2t has `ids[i]` - i for each column,
    and t2d says for each of the target's `width` ids whether the head drafts it.
    """
    columns = np.array(ids, np.int64)
    known = np.zeros(width, np.bool_)
    known[columns] = True
    return {"d2t": mx.array(columns - np.arange(ids.size)), "t2d": mx.array(known)}


def write_draft(
    folder: Path, tensors: Tensors, config: dict[str, Any], made_by: str = "mlx"
) -> None:
    """Write model.safetensors and config.json into an existing folder, each atomically.

    `made_by`: "format" in the metadata of the weights, "mlx" or "pt" (PyTorch).
    """
    partial = folder / "model.partial.safetensors"
    mx.save_safetensors(str(partial), tensors, {"format": made_by})
    partial.replace(folder / "model.safetensors")
    write_json(folder / "config.json", config)


def _can_be_packed(part: Any) -> bool:
    return hasattr(part, "to_quantized") and part["weight"].ndim == 2
