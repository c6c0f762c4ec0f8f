"""What of mlx-lm's own generation the drop-in speaks the language of."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from mlx_speculation.caches import KVQuantization
from mlx_speculation.errors import InvalidRequestError

__all__ = [
    "GenerationResponse",
    "check_quantizable",
    "drawn_seed",
    "greedy_sampler",
    "make_prompt_cache",
]


def drawn_seed() -> int:
    """Draw a seed of 62 bits from mlx's global generator, whose seed decides it."""
    drawn: Any = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
    return int(drawn[0]) << 31 | int(drawn[1])


def check_quantizable(
    model: nn.Module, quantization: KVQuantization, caches: list[Any] | None
) -> None:
    """Refuse to quantize what mlx-lm cannot, or what the model cannot read then.

    It builds two forwards over fresh caches, and computes neither.

    Args:
        model: the target.
        quantization: how the caches are to be quantized.
        caches: the caller's, of the same model; None: new ones.

    Raises:
        InvalidRequestError: a cache holds a window, the numbers are not those that
            mlx can quantize with, or the model fails with quantized caches.
    """
    fresh = make_prompt_cache(model)
    window = KVQuantization.unable(fresh if caches is None else caches)
    if window is not None:
        raise InvalidRequestError(
            f"kv_bits is {quantization.bits}, and mlx-lm cannot quantize a "
            f"{type(window).__name__}, which the text would make it do at "
            f"{quantization.start} tokens. Leave kv_bits out, or raise "
            "quantized_kv_start above the tokens of prompt and text."
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
            f"caches that are quantized so: {type(error).__name__}: {error}. Leave "
            "kv_bits out, or choose others."
        ) from error
