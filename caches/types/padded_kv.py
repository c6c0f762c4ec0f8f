"""Keys and values shown in whole steps of rows, with a mask for what is not filled.

On CUDA, mlx has cuDNN compute attention of two and more rows, and cuDNN makes a plan,
of some 40 ms, for each pair of row count and key count that it has not met. A verify
meets a new key count in every round. In whole steps the same few plans do:

    offset 300, the model writes 3 rows     native: 303 keys, "causal"
                                            here: 512 keys, bool mask [3, 512]

Steps are of 512 rows, and past 4,096 an eighth of the largest power of two in the
count, so that long texts meet few plans too and no more than an eighth is added.

What lies behind the written rows is zeros or rows that were taken back; its weights
in the attention are 0. Rows that are not finite would be felt all the same: the logits
are then not finite either, which every round checks.

A sliding window is shown so until it is full; then its rows are as many in every round.

A cache is shown so only to models that have been tried (`key_steps` in
`models/exclusions.toml`): the mask has to come from `make_mask` of a cache in the same
round, and to be applied to all that `update_and_fetch` returns.
"""

import os
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

STEP = 512
PARTS = 8  # steps in a power of two, at the least


def asks_cudnn(dtype: mx.Dtype) -> bool:
    """Return whether attention with these keys comes from cuDNN here."""
    return (
        dtype in (mx.float16, mx.bfloat16)
        and os.environ.get("MLX_CUDA_USE_CUDNN_SDPA") != "0"
        and mx.default_device().type == mx.DeviceType.gpu
        and mx.cuda.is_available()
    )


class KeySteps:
    """State that the layers of one round share.

    Attributes:
        ends: by window, None for a cache without, the offset behind the rows for which
            a mask in whole steps was made; none where the last one was native.
    """

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: dict[int | None, int] = {}


def steps_of_a_round() -> KeySteps | None:
    """Return what the layers of a round share; None where steps never pay here."""
    return KeySteps() if asks_cudnn(mx.float16) else None


class SteppedKVCache(KVCache):
    """A live `KVCache` that shows whole steps of rows; it shares its `__dict__`."""

    __slots__ = ("_live", "_steps")
    _live: KVCache
    _steps: KeySteps

    def make_mask(
        self,
        N: int,  # noqa: N803  models may name it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Return a mask [N, shown keys] for two and more rows, else the native one."""
        keys: Any = self.keys
        if N == 1 or keys is None or not asks_cudnn(keys.dtype):
            self._steps.ends.pop(None, None)
            return self._live.make_mask(
                N, return_array=return_array, window_size=window_size
            )
        self._steps.ends[None] = self.offset + N
        return stepped_mask(N, self.offset, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write as the live cache does, then show what the mask was made for.

        Args:
            keys: [batch, heads, rows, key dim].
            values: [batch, heads, rows, value dim].
        """
        self._live.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the rows held, and with a mask in whole steps those up to its end."""
        live: Any = self._live
        if self._steps.ends.get(None) != live.offset:
            shown: tuple[mx.array, mx.array] = live.keys_and_values()
            return shown
        return shown_in_steps(live)


def in_steps(cache: KVCache, steps: KeySteps) -> SteppedKVCache:
    """Return what a model gets in the place of `cache`."""
    shown = object.__new__(SteppedKVCache)
    shown.__dict__ = cache.__dict__
    shown._live, shown._steps = cache, steps
    return shown


def stepped_mask(count: int, offset: int, window: int | None) -> mx.array:
    """Return the mask of `count` rows from `offset` on, bool [count, whole steps]."""
    end = offset + count
    mask = create_causal_mask(count, offset, window_size=window)
    return mx.pad(mask, [(0, 0), (0, whole_steps(end) - end)])


def shown_in_steps(cache: Any) -> tuple[mx.array, mx.array]:
    """Return the buffers of a cache up to the end of a step, made longer if need be.

    Their row 0 has to be position 0.
    """
    rows, room = cache.offset, whole_steps(cache.offset)
    if cache.keys.shape[2] < room:
        cache.keys = with_room(cache.keys, rows, room)
        cache.values = with_room(cache.values, rows, room)
    return cache.keys[..., :room, :], cache.values[..., :room, :]


def whole_steps(rows: int) -> int:
    """Return the end of the step that the last of `rows` rows is in; 0 of none."""
    step = max(STEP, (1 << rows.bit_length()) // (2 * PARTS))
    return -(-rows // step) * step


def with_room(old: mx.array, rows: int, room: int) -> mx.array:
    """Return a buffer of `room` rows that begins with the first `rows` of `old`."""
    batch, heads, _, dim = old.shape
    more = mx.zeros((batch, heads, room - rows, dim), old.dtype)
    return mx.concatenate([old[..., :rows, :], more], axis=2)
