"""KV caches whose rows are padded to whole steps, and a mask that hides the padding.

On CUDA, mlx computes attention of two or more rows with cuDNN. cuDNN builds a plan,
which takes about 40 ms, for each new pair of row count and key count. The key count of
a verification differs in every round. Padding the keys to whole steps (to a multiple of
a step) leaves few key counts:

    offset 300, the model writes 3 rows     mlx-lm: 303 keys, "causal"
                                            here: 512 keys, bool mask [3, 512]

A step is 512 keys. Past 4,096 keys a step is an eighth of the largest power of two that
is not above the key count, so padding is at most an eighth of the keys.

The padding consists of zeros or of rows that were rolled back. The mask gives it weight
0, but if a row of the padding is not finite, the logits are not finite either. Every
round checks whether the logits are finite. A cache with a sliding window is padded only
while the window is not full.

A padded cache is used only for models that were tested with it (`key_steps` in
`models/exclusions.toml`). Such a model takes its mask from `make_mask` of a cache of
the same round, and applies it to all keys that `update_and_fetch` returns.
"""

import os
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

STEP = 512
PARTS = 8  # past 4,096 keys, a step is a power of two divided by this


def asks_cudnn(dtype: mx.Dtype) -> bool:
    """Return whether mlx computes attention of this dtype with cuDNN on this device."""
    return (
        dtype in (mx.float16, mx.bfloat16)
        and os.environ.get("MLX_CUDA_USE_CUDNN_SDPA") != "0"
        and mx.default_device().type == mx.DeviceType.gpu
        and mx.cuda.is_available()
    )


class KeySteps:
    """State that the layers of one round share."""

    __slots__ = ("ends",)

    def __init__(self) -> None:
        # By window size (None: a `KVCache`): the offset at which the rows of the last
        # mask end; no entry if that mask is not padded.
        self.ends: dict[int | None, int] = {}


def steps_of_a_round() -> KeySteps | None:
    """Return a new `KeySteps` for a round; None if cuDNN is not used here."""
    return KeySteps() if asks_cudnn(mx.float16) else None


class SteppedKVCache(KVCache):
    """A padded view of a live `KVCache`. View and cache share one `__dict__`."""

    __slots__ = ("_live", "_steps")
    _live: KVCache
    _steps: KeySteps

    def make_mask(
        self,
        N: int,  # noqa: N803  some models pass it by name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Return a mask [N, padded keys] for two or more rows, else mlx-lm's mask."""
        keys: Any = self.keys
        if N == 1 or keys is None or not asks_cudnn(keys.dtype):
            self._steps.ends.pop(None, None)
            return self._live.make_mask(
                N, return_array=return_array, window_size=window_size
            )
        self._steps.ends[None] = self.offset + N
        return stepped_mask(N, self.offset, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write as the live cache does; return the rows that the mask was made for."""
        self._live.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all rows, padded if the last mask was padded."""
        live: Any = self._live
        if self._steps.ends.get(None) != live.offset:
            shown: tuple[mx.array, mx.array] = live.keys_and_values()
            return shown
        return shown_in_steps(live)


def in_steps(cache: KVCache, steps: KeySteps) -> SteppedKVCache:
    """Return a padded view of `cache`, to pass to the model."""
    shown = object.__new__(SteppedKVCache)
    shown.__dict__ = cache.__dict__
    shown._live, shown._steps = cache, steps
    return shown


def stepped_mask(count: int, offset: int, window: int | None) -> mx.array:
    """Return the mask of `count` rows from `offset` on, bool [count, padded keys]."""
    end = offset + count
    mask = create_causal_mask(count, offset, window_size=window)
    return mx.pad(mask, [(0, 0), (0, whole_steps(end) - end)])


def shown_in_steps(cache: Any) -> tuple[mx.array, mx.array]:
    """Return a cache's rows padded to whole steps; its row 0 has to be position 0."""
    rows, room = cache.offset, whole_steps(cache.offset)
    if cache.keys.shape[2] < room:
        cache.keys = with_room(cache.keys, rows, room)
        cache.values = with_room(cache.values, rows, room)
    return cache.keys[..., :room, :], cache.values[..., :room, :]


def whole_steps(rows: int) -> int:
    """Return `rows` rounded up to whole steps; 0 for no rows."""
    step = max(STEP, (1 << rows.bit_length()) // (2 * PARTS))
    return -(-rows // step) * step


def with_room(old: mx.array, rows: int, room: int) -> mx.array:
    """Return a buffer of `room` rows: the first `rows` rows of `old`, then zeros."""
    batch, heads, _, dim = old.shape
    more = mx.zeros((batch, heads, room - rows, dim), old.dtype)
    return mx.concatenate([old[..., :rows, :], more], axis=2)
