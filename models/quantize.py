"""Weights in fewer bits, or in float32, after they were loaded.

A drafter costs what reading its weights costs, and what its choices are decides speed
alone, never the text. So it may be held in fewer bits than its checkpoint has. On a
Linux CPU that saves bytes and no time: products with quantized weights do not go
through BLAS there.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_speculation.errors import InvalidRequestError

BITS = (2, 3, 4, 5, 6, 8)
# Tried in this order: more numbers to a scale are fewer bytes, and less precise.
GROUP_SIZES = (64, 32, 128)


def check_bits(bits: Any) -> None:
    """Refuse a number of bits that mlx has no quantization of.

    Raises:
        InvalidRequestError: names the number, and those there are.
    """
    if bits not in BITS or isinstance(bits, bool):
        raise InvalidRequestError(
            f"quantize_draft is {bits!r}, and one of {', '.join(map(str, BITS))} bits "
            "is needed. Leave it out to take the weights as they are."
        )


def quantize_weights(module: nn.Module, bits: int) -> int:
    """Quantize linear layers and embeddings in place, as far as they are not yet.

    Rows that none of `GROUP_SIZES` divides stay as they are. The model's own
    `quant_predicate` (mlx-lm) is followed: it keeps routers in more bits, or whole.

    Args:
        module: a model or a head.
        bits: one of `BITS`.

    Returns:
        How many layers were quantized.

    Raises:
        InvalidRequestError: there is nothing to quantize.
    """
    check_bits(bits)
    predicate = getattr(module, "quant_predicate", None)
    count = 0

    def how(path: str, layer: nn.Module) -> dict[str, int] | bool:
        nonlocal count
        group = _group_size(layer)
        quantizes = True if predicate is None else predicate(path, layer)
        if group is None or not quantizes:
            return False
        count += 1
        more = quantizes.get("bits", bits) if isinstance(quantizes, dict) else bits
        return {"group_size": group, "bits": max(bits, more)}

    nn.quantize(module, class_predicate=how)
    if not count:
        raise InvalidRequestError(
            f"quantize_draft is {bits}, and the draft has 0 layers that can be "
            f"quantized: they are quantized already, or no group of {GROUP_SIZES} "
            "numbers divides their rows. Leave it out."
        )
    mx.eval(module.parameters())
    return count


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's arrays."""
    arrays: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in arrays)


def _group_size(layer: Any) -> int | None:
    """Return the group size that fits a layer's rows, if it can be quantized."""
    return next((size for size in GROUP_SIZES if _fits(layer, size)), None)


def _fits(layer: Any, size: int) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % size == 0


def runs_on_linux_cpu() -> bool:
    """Return whether arrays live on the CPU and no GPU backend could take them."""
    on_cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and not mx.metal.is_available()


def to_float32(model: nn.Module, *, lazy: bool = False) -> nn.Module:
    """Dequantize and widen the weights to float32; with `lazy`, evaluate nothing.

    On a Linux CPU only float32 products go through BLAS; the cost of a quantized or
    half-precision product grows with every row, so that verifying k drafts would cost
    k steps. The price is memory: 4 bytes a weight.
    """
    model.set_dtype(mx.float32)  # scales first, so that products do not round
    model = dequantize_model(model)
    if not lazy:
        mx.eval(model.parameters())
    return model
