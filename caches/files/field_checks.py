"""Checks of the fields of one cache against each other.

Each public function gets a cache whose numbers are not negative. It returns None if the
fields break one of the conditions below. Else it returns the number of rows in use,
and the caller cuts off the other rows. The last two kinds of the table have no rows to
cut off: for them, the result 0 only says that the conditions hold.

| kind | conditions, with R rows in keys and values |
|---|---|
| KV, quantized | 0 <= offset <= R |
| concatenating | offset = R |
| chunked | 0 <= start_position <= offset, offset - start_position <= R |
| ring | not wrapped: _idx = offset <= R; R <= max_size unless offset = R |
| | ordered, rows evicted: _idx = R < offset, max_size <= R |
| | wrapped: keep < _idx < R = max_size < offset |
| batch of KV | offset = _idx - left_padding for every text, _idx <= R |
| batch of rings | as a ring, with _offset in place of offset; rotated only if full |
| | left_padding + offset >= _idx (max_size if rotated) for every text |
| arrays | one batch size in all slots, lengths and left_padding |
| DeepSeek V4.1 layer | window rows = min(offset, window_size); groups fit offset |
"""

from typing import Any

import mlx.core as mx

MAX_COUNT = 2**30  # mlx-lm's positions are int32; this leaves room for more tokens
MAX_SLOTS = 64  # of an `ArraysCache`; the models of mlx-lm use at most 4
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
INTEGERS = (mx.int32, mx.int64)
MISFIT = -1  # the result of `_rows` for keys and values that do not fit


def _is_float(array: Any, ndim: int) -> bool:
    """Return whether `array` holds floats, and has `ndim` axes that fit.

    Axes of length 0 fit only among the last 2.
    """
    fits = isinstance(array, mx.array) and array.ndim == ndim
    return fits and array.dtype in FLOATS and 0 not in array.shape[: ndim - 2]


def _rows(cache: Any) -> int:
    """Return the number of rows in a cache's keys and values, or `MISFIT`.

    Both are [batch, heads, rows, dim].
    """
    keys, values = cache.keys, cache.values
    if keys is None and values is None:
        return 0
    fits = _is_float(keys, 4) and _is_float(values, 4) and keys.shape[3] > 0
    return keys.shape[2] if fits and keys.shape[:3] == values.shape[:3] else MISFIT


def _integers(array: Any) -> list[int]:
    """Return the integers of an array [batch]; an empty list if the array is unfit."""
    fits = isinstance(array, mx.array) and array.ndim == 1 and array.dtype in INTEGERS
    values: list[int] = array.tolist() if fits else []
    return values if max(map(abs, values), default=0) <= MAX_COUNT else []


def kv(cache: Any) -> int | None:
    """Check a `KVCache`."""
    return cache.offset if cache.offset <= _rows(cache) else None


def concatenate(cache: Any) -> int | None:
    """Check a `ConcatenateKVCache`. A trimmed cache has too many rows, and is unfit."""
    return cache.offset if cache.offset == _rows(cache) else None


def quantized(cache: Any) -> int | None:
    """Check a `QuantizedKVCache`: packed rows, scales, biases of keys and values."""
    group, bits = cache.group_size, cache.bits
    if group not in (32, 64, 128) or bits not in (2, 3, 4, 5, 6, 8):
        return None
    if cache.keys is None and cache.values is None:
        return 0 if cache.offset == 0 else None
    shapes = [_packed(parts, group, bits) for parts in (cache.keys, cache.values)]
    fits = shapes[0] is not None and shapes[0] == shapes[1]
    return cache.offset if fits and cache.offset <= shapes[0][2] else None


def _packed(parts: Any, group: int, bits: int) -> Any:
    """Return the shape of packed rows without its last axis; None: a misfit."""
    if not isinstance(parts, (list, tuple)) or len(parts) != 3:
        return None
    packed, scales, biases = parts
    if not _is_float(scales, 4) or not _is_float(biases, 4):
        return None
    alike = scales.shape == biases.shape and scales.dtype == biases.dtype
    if not alike or not isinstance(packed, mx.array) or packed.dtype != mx.uint32:
        return None
    dim = scales.shape[3] * group
    whole = (*scales.shape[:3], dim * bits // 32)
    return packed.shape[:3] if dim > 0 and packed.shape == whole else None


def chunked(cache: Any) -> int | None:
    """Check a `ChunkedKVCache`."""
    used = cache.offset - cache.start_position
    return used if 0 <= used <= _rows(cache) and cache.chunk_size > 0 else None


def ring(cache: Any) -> int | None:
    """Check a `RotatingKVCache`."""
    if cache.keep >= cache.max_size:
        return None
    return _used_of_ring(cache, cache.offset, wrapped=cache._idx > cache.keep)


def _used_of_ring(cache: Any, offset: int, wrapped: bool) -> int | None:
    """Return the number of rows in use; `wrapped`: allow a wrapped ring."""
    rows, index, size = _rows(cache), cache._idx, cache.max_size
    if index == offset <= rows and (rows <= size or rows == offset):
        return offset
    ordered = index == rows < offset and rows >= size
    inside = index < rows == size < offset and wrapped
    return rows if ordered or inside else None


def arrays(cache: Any) -> int | None:
    """Check an `ArraysCache`."""
    slots = cache.cache
    if not isinstance(slots, list) or not 1 <= len(slots) <= MAX_SLOTS:
        return None
    extents = [x for x in (cache.lengths, cache.left_padding) if x is not None]
    filled = [*(slot for slot in slots if slot is not None), *extents]
    fits = all(isinstance(x, mx.array) and x.ndim > 0 for x in filled)
    if not fits or not all(_integers(extent) for extent in extents):
        return None
    sizes = {array.shape[0] for array in filled}
    return 0 if len(sizes) < 2 and 0 not in sizes else None


def _of_batch(cache: Any) -> list[tuple[int, int]]:
    """Return each text's offset and left padding; an empty list if fields are unfit."""
    offsets, padding = _integers(cache.offset), _integers(cache.left_padding)
    if _rows(cache) == MISFIT:
        return []
    sizes = {len(offsets), len(padding)}
    if cache.keys is not None:
        sizes.add(cache.keys.shape[0])
    return list(zip(offsets, padding, strict=True)) if len(sizes) == 1 else []


def batch_kv(cache: Any) -> int | None:
    """Check a `BatchKVCache`."""
    index, pairs = cache._idx, _of_batch(cache)
    ends = all(pad >= 0 and offset == index - pad for offset, pad in pairs)
    return index if pairs and ends and index <= _rows(cache) else None


def batch_ring(cache: Any) -> int | None:
    """Check a `BatchRotatingKVCache`."""
    index, size, rotated = cache._idx, cache.max_size, cache.rotated
    written, rows, pairs = cache._offset, _rows(cache), _of_batch(cache)
    base = size if rotated else index
    if not pairs or size == 0:
        return None
    if not all(offset + pad >= base and pad >= -written for offset, pad in pairs):
        return None
    if not rotated:
        return _used_of_ring(cache, written, wrapped=False)
    return rows if rows == size < written and 0 < index <= rows else None


LAYER = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


def layer(cache: Any) -> int | None:
    """Check a `LayerCache` of DeepSeek V4.1; arrays are [batch, rows, dim]."""
    offset, size = cache.offset, cache.window_size
    filled = {name: getattr(cache, name) for name in LAYER}
    filled = {name: array for name, array in filled.items() if array is not None}
    if size == 0 or bool(filled) != (offset > 0):
        return None
    if not filled:
        return 0
    if "window" not in filled or not all(_is_float(x, 3) for x in filled.values()):
        return None
    rows = {name: array.shape[1] for name, array in filled.items()}
    dims = {filled[name].shape[2] for name in filled if name != "index_k"}
    batches = {array.shape[0] for array in filled.values()}
    alike = len(dims) == len(batches) == 1 and 0 not in dims
    fits = alike and rows["window"] == min(offset, size) and _groups_fit(offset, rows)
    return 0 if fits else None


def _groups_fit(offset: int, rows: dict[str, int]) -> bool:
    """Return whether `offset` rows make equal groups and perhaps a smaller rest."""
    groups, pending = rows.get("compress_kv"), rows.get("pending_kv")
    if pending != rows.get("pending_gate") or rows.get("index_k") not in (None, groups):
        return False
    if groups is not None and not 1 <= groups <= offset:
        return False
    if pending is None:
        return True
    closed = offset - pending
    if groups is None:
        return closed == 0
    return closed % groups == 0 and closed // groups > pending
