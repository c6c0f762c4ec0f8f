"""Trained weights as they are stored: 16-bit numbers, or packed in 4 or 8 bits."""

from typing import Any

import mlx.core as mx

from mlx_speculation.models.quantize import GROUP_SIZES

Tensors = dict[str, mx.array]


def packed(tensors: Tensors, bits: int | None) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors as they are stored, and what config.json says of it.

    Args:
        tensors: the weights, by name.
        bits: of matrices; None: all are bfloat16.
    """
    stored: Tensors = {}
    used: set[int] = set()
    for name, value in tensors.items():
        group = next((g for g in GROUP_SIZES if value.shape[-1] % g == 0), None)
        if bits is None or value.ndim != 2 or group is None:
            stored[name] = value.astype(mx.bfloat16)
            continue
        used.add(group)
        parts = mx.quantize(value.astype(mx.bfloat16), group, bits)
        stem = name.removesuffix("weight")
        stored |= dict(
            zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=True)
        )
    said = {"quantization": {"group_size": min(used), "bits": bits}} if used else {}
    return stored, said
