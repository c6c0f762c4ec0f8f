"""The forwards of a small draft model over one or two tokens, compiled as a whole.

On a CPU the time of a small model's step depends on the number of operations. Compiling
a step of the demo draft leaves half of its 336 operations, and Python builds none of
them. But in a compiled step all values that depend on the text have to be arrays. So
keys and values are in buffers of 512 rows or a multiple of 512. A step writes them at
an offset that is an array, and a mask hides the rows behind the written ones:

    offset 300, 1 token     mlx-lm: 301 keys, no mask
                            here: 512 keys, bool mask [1, 512]

The caches stay mlx-lm's own: a step gets their buffers and returns new ones. The logits
differ from mlx-lm's by rounding, so they are used only for drafts.

mlx compiles some twenty libraries with a C++ compiler. That takes 16 seconds at the
first use on a machine, and again after the folder for temporary files was emptied.
Otherwise it takes 20 ms in each process.
"""

import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_speculation.caches import whole_steps, with_room
from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.round_context import rows_of_a_round

MOST_TOKENS = 2  # in a step; after a round, the draft's lane lacks 1 or 2 known tokens
_SAMPLE = (3, 1, 2, 0)


class FixedKeys:
    """Substitute for a `KVCache` in a compiled step.

    `keys` and `values` are [1, heads, rows, dim], `offset` is int32 []. The rows before
    the offset are in use.
    """

    # Lets `serves` in models/cpu/attention.py accept a single token.
    single_rows = True

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset

    def make_mask(
        self,
        N: int,  # noqa: N803  models can pass it by name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array:
        """Return the rows of the buffers that each token sees, bool [N, rows]."""
        keys = mx.arange(self.keys.shape[2])[None]
        rows = (self.offset + mx.arange(N))[:, None]
        mask = keys <= rows
        return mask if window_size is None else mask & (keys > rows - window_size)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write at the offset and return the buffers, [1, heads, rows, dim] each."""
        start = self.offset.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the buffers, [1, heads, rows, dim] each."""
        return self.keys, self.values


class CompiledSteps:
    """The compiled forward of one model whose caches are all `KVCache`."""

    def __init__(self, model: nn.Module) -> None:
        def step(
            tokens: mx.array, offset: mx.array, *buffers: mx.array
        ) -> tuple[mx.array, ...]:
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            caches = [FixedKeys(keys, values, offset) for keys, values in pairs]
            with rows_of_a_round():
                logits = model(tokens[None], cache=caches)
            written = [
                array for cache in caches for array in (cache.keys, cache.values)
            ]
            return logits.squeeze(0), *written

        self._step = mx.compile(step, inputs=model.state)

    def serves(self, caches: Sequence[Any], count: int) -> bool:
        """Return whether `forward` can feed `count` tokens to these caches."""
        if not 0 < count <= MOST_TOKENS:
            return False
        first = caches[0]
        return all(
            type(cache) is KVCache
            and cache.keys is not None
            and cache.offset == first.offset
            for cache in caches
        )

    def forward(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Feed tokens [n], write to the caches, return logits [n, vocab], lazy.

        `serves` has to be true for the arguments.
        """
        start = caches[0].offset
        end = start + tokens.shape[0]
        buffers = [
            _in_steps(each, start, end) for c in caches for each in (c.keys, c.values)
        ]
        ids = tokens.astype(mx.uint32)  # another dtype would be compiled again
        logits, *written = self._step(ids, mx.array(start), *buffers)
        for place, cache in enumerate(caches):
            cache.keys, cache.values = written[2 * place : 2 * place + 2]
            cache.offset = end
        return logits


def _in_steps(old: mx.array, rows: int, room: int) -> mx.array:
    """Return the buffer with `whole_steps(room)` rows, so that few shapes occur."""
    room = whole_steps(room)
    return old if old.shape[2] == room else with_room(old, rows, room)


def compiled_steps(model: nn.Module) -> CompiledSteps:
    """Compile the forward of a draft model, test it, and return it.

    Raises:
        UnsupportedModelError: the forward cannot be compiled here, or has other logits
            than the model.
    """
    kinds = {type(cache).__name__ for cache in make_prompt_cache(model)}
    if mx.default_device().type != mx.DeviceType.cpu:
        _refuse(model, f"this is for CPUs, and the device is {mx.default_device()}")
    if shutil.which("g++") is None:
        _refuse(model, "mlx compiles for a CPU with g++, which is not installed")
    if kinds != {KVCache.__name__}:
        _refuse(model, f"its caches are {', '.join(sorted(kinds))} and not all KVCache")
    sample = mx.array(_SAMPLE)
    wanted = model(sample[None], cache=make_prompt_cache(model)).squeeze(0)
    steps, caches = CompiledSteps(model), make_prompt_cache(model)
    model(sample[None, :1], cache=caches)
    try:
        said = [steps.forward(part, caches) for part in (sample[1:3], sample[3:])]
        same = mx.allclose(mx.concatenate(said), wanted[1:], rtol=1e-2, atol=1e-2)
    except Exception as error:
        _refuse(model, f"{type(error).__name__}: {error}", error)
    if not same.item():
        _refuse(model, "the compiled steps give other logits")
    return steps


def _refuse(model: nn.Module, reason: str, error: Exception | None = None) -> NoReturn:
    raise UnsupportedModelError(
        f"compile_draft is True, but steps of the draft {type(model).__module__} "
        f"cannot be compiled: {reason}. Leave compile_draft out."
    ) from error
