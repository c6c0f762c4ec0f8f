"""Conversion of loaded weights to fewer bits or to float32.

A drafter can get fewer bits than its checkpoint has: drafts change the speed and never
the text. On a Linux CPU fewer bits save memory but no time: products with
quantized weights do not use BLAS there.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_speculation.errors import InvalidRequestError

BITS = (2, 3, 4, 5, 6, 8)
# Tried in this order. A larger group takes fewer bytes and is less precise.
GROUP_SIZES = (64, 32)


def check_bits(bits: Any) -> None:
    """Raise `InvalidRequestError` unless `bits` is one of `BITS`."""
    if bits not in BITS or isinstance(bits, bool):
        raise InvalidRequestError(
            f"quantize_draft is {bits!r}, but has to be one of "
            f"{', '.join(map(str, BITS))} bits. Leave it out to take the weights "
            "as they are."
        )


def quantize_weights(module: nn.Module, bits: int) -> int:
    """Quantize linear layers and embeddings in place; return how many were quantized.

    A layer stays as it is if it is quantized already, or if no size in `GROUP_SIZES`
    divides its row length. The `quant_predicate` of a model of mlx-lm applies: it keeps
    routers in more bits, or unquantized.

    Raises:
        InvalidRequestError: there is nothing to quantize, or `bits` is not one of
            `BITS`.
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
            f"quantize_draft is {bits}, but the draft has 0 layers that can be "
            "quantized: they are quantized already, or their row length is no "
            f"multiple of {min(GROUP_SIZES)}. Leave it out."
        )
    mx.eval(module.parameters())
    return count


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's arrays."""
    arrays: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in arrays)


def _group_size(layer: Any) -> int | None:
    if not hasattr(layer, "to_quantized"):
        return None
    return next((n for n in GROUP_SIZES if layer.weight.shape[-1] % n == 0), None)


def runs_on_linux_cpu() -> bool:
    """Return whether arrays are on the CPU, on a machine without Metal."""
    on_cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and not mx.metal.is_available()


def to_float32(model: nn.Module, *, lazy: bool = False) -> nn.Module:
    """Dequantize and widen the weights to float32; with `lazy`, evaluate nothing.

    On a Linux CPU only float32 products use BLAS. Other products take time in
    proportion to their rows, so verifying k drafted tokens would cost k steps.
    """
    model.set_dtype(mx.float32)  # first, so that dequantized weights are float32
    model = dequantize_model(model)
    if not lazy:
        mx.eval(model.parameters())
    return model
