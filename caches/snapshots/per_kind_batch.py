"""Snapshots of a batch, where each row has its own position.

A batch is saved as a whole. Its positions are those of the furthest row; the lag of a
row is its distance to that row. Padding that all rows share is not saved:

    row 0    . . a b c d e     position 5    lag 0
    row 1    . . . . x y z              3        2
    row 2    . . . . . . m              1        4
    range        [0    5)

    split at 3     a b c | d e      row 1 is cut likewise: x | y z

So KV rows are cut at one column of the whole batch, and parts can be joined only if
their lags are equal. The lags change in `filter`, in `extend`, and in a commit that
keeps a different number of tokens in each row; after these, take a snapshot from 0.
Rings and recurrent states exist only at the offset where they were taken, as for one
sequence.

If a row begins only after the end of a part, its offset there is below 0, as in mlx-lm
while a prompt with padding on the left is fed.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from mlx_speculation.caches.types.shared_rows import Arrays, native_type
from mlx_speculation.errors import InvalidRequestError

Lags = tuple[int, ...]  # of each row; empty for one sequence


def batch_extent(batches: Sequence[tuple[str, Any]]) -> tuple[int, Lags]:
    """Return the position of the furthest row of batch caches, and the rows' lags.

    The offsets are read back from the device.

    Raises:
        InvalidRequestError: the layers hold different numbers of tokens, a prompt with
            right padding is not finalized, or all rows are inside their left padding.
    """
    # A layer that the model does not use stays empty.
    used = [(place, x) for place, x in batches if not x.empty()] or batches
    (first, leaf), *others = used
    offsets: list[int] = leaf.offset.tolist()
    for place, other in others:
        result = other.offset.tolist()
        if result != offsets:
            raise InvalidRequestError(
                f"The rows of layer {first} hold {offsets} tokens, and those of layer "
                f"{place} {result}. The layers of a model move together: pass caches "
                "that were fed the same tokens."
            )
    for place, other in used:
        pending = other._lengths if _is_ring(other) else other._right_padding
        if pending is not None:
            raise InvalidRequestError(
                f"Layer {place} waits for finalize(), with {len(offsets)} rows padded "
                "on the right. Call it before a snapshot."
            )
    furthest = max(offsets)
    if furthest < 0:
        raise InvalidRequestError(
            f"The rows of layer {first} hold {offsets} tokens: all are inside their "
            "left padding. Feed the prompts first."
        )
    return furthest, tuple(furthest - offset for offset in offsets)


def _is_ring(cache: Any) -> bool:
    return native_type(cache) is BatchRotatingKVCache


def batch_fields(arrays: Arrays, rows: int, lags: Lags) -> dict[str, Any]:
    """Return the fields of a `BatchKVCache` with these arrays, up to position `rows`.

    Args:
        arrays: keys and values [batch, heads, at least `rows`, dim], or an empty tuple.
        rows: the position of the furthest row.
        lags: the lag of each row.
    """
    keys, values = arrays if arrays else (None, None)
    return {
        "keys": keys,
        "values": values,
        "offset": mx.array([rows - lag for lag in lags]),
        "left_padding": mx.array(list(lags)),
        "_idx": rows,
        "_right_padding": None,
    }


def batch_ring_state(cache: Any) -> dict[str, Any]:
    """Return the fields of a `BatchRotatingKVCache`, without unused slots."""
    names = ("keys", "values", "offset", "left_padding", "_idx", "_offset", "rotated")
    fields = {name: getattr(cache, name) for name in names}
    if cache.keys is not None and not cache.rotated and cache._idx == cache._offset:
        fields["keys"] = cache.keys[..., : cache._idx, :]
        fields["values"] = cache.values[..., : cache._idx, :]
    return {**fields, "_lengths": None}
