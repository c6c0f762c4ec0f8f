"""A model whose forwards over many positions are wrong at one of them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache


class WrongInWideForwards(nn.Module):
    """Makes the best token the worst at index `row` of forwards over `width` tokens."""

    def __init__(self, model: nn.Module, row: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._row, self._width = row, width

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        if ids.shape[1] != self._width:
            return logits
        best = mx.argmax(logits, axis=-1, keepdims=True) == mx.arange(logits.shape[-1])
        here = mx.arange(self._width)[None, :, None] == self._row
        return mx.where(best & here, logits.min(), logits)
