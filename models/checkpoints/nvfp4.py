"""Unpacking of weights that modelopt has packed as NVFP4.

`weight`, uint8, holds two E2M1 numbers a byte, the low half first. `weight_scale`,
E4M3, holds one scale for 16 numbers, and `weight_scale_2` one scale for all of them.
"""

import mlx.core as mx

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE, _WHOLE = ".weight_scale", ".weight_scale_2"


def unpacked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights with NVFP4 ones unpacked.

    These get the dtype of the norms, or bfloat16 if there are no norms.

    Args:
        weights: by their names in files; scales of E4M3 are uint8.
    """
    parts = [name.removesuffix(_WHOLE) for name in weights if name.endswith(_WHOLE)]
    if not parts:
        return weights
    norms = (v.dtype for name, v in weights.items() if name.endswith("norm.weight"))
    result, dtype = dict(weights), next(norms, mx.bfloat16)
    for part in parts:
        packed, scale = result.pop(f"{part}.weight"), result.pop(f"{part}{_SCALE}")
        whole = result.pop(f"{part}{_WHOLE}")
        result.pop(f"{part}.input_scale", None)  # of activations
        numbers = _numbers(packed) * _repeated(scale) * whole
        result[f"{part}.weight"] = numbers.astype(dtype)
    return result


def _numbers(packed: mx.array) -> mx.array:
    """Return the E2M1 numbers in uint8 [out, in / 2], as float32 [out, in]."""
    table = mx.array([*_VALUES, *(-value for value in _VALUES)])
    halves = mx.stack([packed & 15, packed >> 4], axis=-1)
    return table[halves].reshape(*packed.shape[:-1], -1)


def _repeated(scale: mx.array) -> mx.array:
    """Return E4M3 scales, uint8 [out, in / 16], as float32 [out, in]."""
    return mx.repeat(mx.from_fp8(scale, dtype=mx.float32), 16, axis=-1)
