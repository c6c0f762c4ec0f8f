"""The check whether the caches of a request can be quantized."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import KVQuantization
from mlx_speculation.errors import InvalidRequestError


def checked_quantization(
    model: nn.Module,
    quantization: KVQuantization | None,
    caches: Sequence[Any] | None,
    reach: int,
) -> KVQuantization | None:
    """Return the quantization of a request's caches; None: they are not quantized.

    The check builds forwards over new caches, but does not evaluate them. `reach` is
    the largest number of positions, of prompt and text together.

    Raises:
        InvalidRequestError: a cache holds a window, which mlx-lm cannot quantize; mlx
            lacks the bits or group size; or the model fails with quantized caches.
    """
    if quantization is None or reach < quantization.start:
        return None
    fresh = make_prompt_cache(model)
    window = KVQuantization.unable(fresh if caches is None else caches)
    if window is not None:
        raise InvalidRequestError(
            f"kv_bits is {quantization.bits}, and mlx-lm cannot quantize a "
            f"{type(window).__name__}. Quantization would begin at "
            f"{quantization.start} tokens, which this request may reach. Leave kv_bits "
            "out, or raise quantized_kv_start above the tokens of prompt and text."
        )
    now = KVQuantization(quantization.bits, quantization.group_size)
    token = mx.zeros((1, 1), mx.int32)
    try:
        model(token, cache=fresh)
        now.replace(fresh)
        model(token, cache=fresh)
        model(mx.zeros((1, 2), mx.int32), cache=fresh)
    except Exception as error:
        raise InvalidRequestError(
            f"kv_bits is {quantization.bits} and kv_group_size "
            f"{quantization.group_size}, and {type(model).__module__} cannot read "
            f"such quantized caches: {type(error).__name__}: {error}. Leave "
            "kv_bits out, or choose another kv_bits or kv_group_size."
        ) from error
    return quantization
