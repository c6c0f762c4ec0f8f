"""The keys and values of a target that an assistant reads.

For each kind of layer, sliding or full, an assistant reads the target's last cache of
this kind. The target's last layers have no caches: they share the keys and values of
earlier layers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_speculation.caches import check_readable, read_rows
from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.checkpoints.rotation import FULL, SLIDING
from mlx_speculation.models.gemma_assistant.config import NAME
from mlx_speculation.models.gemma_assistant.network import Assistant, Read, Shown

_KINDS = {SLIDING: RotatingKVCache, FULL: KVCache}


class SharedKv:
    """Reads the target's caches for an assistant.

    Raises:
        UnsupportedModelError: the target's layers do not fit the assistant's.
    """

    def __init__(self, model: nn.Module, assistant: Assistant) -> None:
        caches: Any = make_prompt_cache(model)
        kinds = dict.fromkeys(layer.layer_type for layer in assistant.layers)
        self.places = {kind: _last(caches, kind, model) for kind in kinds}
        self._window = assistant.settings.layers.sliding_window
        model(mx.zeros((1, 1), mx.int32), cache=caches)  # gives the caches their shapes
        for layer in assistant.layers:
            cache = caches[self.places[layer.layer_type]]
            _check_shapes(layer.self_attn, cache, self.places[layer.layer_type])

    def check(self, caches: Sequence[Any]) -> None:
        """Refuse caches that cannot be read.

        Raises:
            UnsupportedCacheError: a cache is of a kind that cannot be read.
        """
        for place in self.places.values():
            check_readable(caches[place], place)

    def read(self, caches: Any, left_out: int) -> "tuple[Read, int]":
        """Return keys and values for each kind of layer, and the position after them.

        The last `left_out` positions are not read. The caller must drop the arrays
        before the target writes again.
        """
        offsets = {caches[place].offset for place in self.places.values()}
        stop = max(offsets) - left_out
        counts = {SLIDING: self._window, FULL: None}
        result = {
            kind: Shown(*read_rows(caches[place], stop, counts[kind]))
            for kind, place in self.places.items()
        }
        return result, stop

    def read_together(
        self, caches: Any, places: list[int], stops: list[int], seen: list[int]
    ) -> Read:
        """Return keys and values for each kind of layer, for texts of a batch.

        The caller must drop the arrays before the target writes again. For each text,
        `places` has its row in the batch, `stops` the position after the last one to
        read, and `seen` the number of positions that the target has been fed.
        """
        result = {}
        for kind, layer in self.places.items():
            cache = caches[layer]
            keys, values = (
                _of_texts(part, places, cache) for part in cache.keys_and_values()
            )
            count = keys.shape[2]
            columns, firsts = mx.arange(count), [0] * len(seen)
            if isinstance(cache, BatchRotatingKVCache):  # all rows end together
                firsts = [known - count for known in seen]
                if cache.rotated:
                    columns = (columns - cache._idx) % count
            window = self._window if kind == SLIDING else max(stops)
            starts = [max(0, stop - window) for stop in stops]
            mask, spans = None, zip(firsts, starts, stops, strict=True)
            if any(
                start > first or first < 0 or stop < first + count
                for first, start, stop in spans
            ):
                each = mx.array([firsts, starts, stops])[..., None, None, None]
                positions = each[0] + columns
                mask = (positions >= each[1]) & (positions < each[2])
                # A text that would see no column sees all; its draft is not used.
                mask = mask | ~mask.any(axis=-1, keepdims=True)
            result[kind] = Shown(keys, values, mask)
        return result


def _of_texts(part: Any, places: list[int], cache: Any) -> mx.array:
    if isinstance(part, tuple):
        form: Any = {"group_size": cache.group_size, "bits": cache.bits}
        codes, scales, biases = (_of_texts(one, places, cache) for one in part)
        return mx.dequantize(codes, scales, biases, **form)
    if places == [*range(len(places))]:
        return part[: len(places)]  # type: ignore[no-any-return]
    return part[mx.array(places)]  # type: ignore[no-any-return]


def _last(caches: Iterable[Any], kind: str, model: nn.Module) -> int:
    places = [i for i, each in enumerate(caches) if type(each) is _KINDS[kind]]
    if not places:
        raise UnsupportedModelError(
            f"The {NAME} reads keys and values of {kind} layers, but the caches of "
            f"{type(model).__module__} are {sorted({type(c).__name__ for c in caches})}"
            ". Choose the assistant that belongs to this model."
        )
    return places[-1]


def _check_shapes(attention: Any, cache: Any, place: int) -> None:
    heads, dims = cache.keys.shape[1], (cache.keys.shape[3], cache.values.shape[3])
    count, dim = attention.n_heads, attention.head_dim
    if dims != (dim, dim) or count % heads:
        raise UnsupportedModelError(
            f"The {NAME} has {count} heads of size {dim}, but layer {place} has "
            f"{heads} heads with keys of size {dims[0]} and values of size {dims[1]}. "
            "Choose the assistant that belongs to this model."
        )
