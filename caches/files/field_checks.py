"""Checks of the fields of one cache against each other.

Each check refuses fields that no mlx-lm cache can have, and returns the leaf without
unused rows:

| kind | conditions, with R rows in keys and values |
|---|---|
| KV, quantized | 0 <= offset <= R |
| concatenating | offset = R |
| chunked | 0 <= start_position <= offset, offset - start_position <= R |
| ring | not wrapped: _idx = offset <= R, and R <= max_size or offset = R |
| | ordered, rows evicted: _idx = R < offset, max_size <= R |
| | wrapped: keep < _idx < R = max_size < offset |
| batch of KV | offset = _idx - left_padding in every row, _idx <= R |
| batch of rings | as a ring, with _offset for offset; rotated only when full |
| | left_padding + offset >= _idx (max_size if rotated) in every row |
| arrays | one batch size in all slots, lengths and left_padding |
| DeepSeek V4.1 layer | window rows = min(offset, window_size); groups fit offset |

A cache without used rows is saved without arrays.
"""

import mlx.core as mx

from mlx_speculation.caches.files.fields import (
    Leaf,
    cut,
    need,
    need_floats,
    need_integers,
    rows_of,
)

MAX_SLOTS = 64  # the models of mlx-lm have up to 4


def check_kv(leaf: Leaf) -> Leaf:
    """Check a `KVCache`."""
    need_floats(leaf, "keys", "values")
    offset, rows = leaf.numbers["offset"], rows_of(leaf)
    need(offset <= rows, f"its offset is {offset} and it has {rows} rows")
    return cut(leaf, offset)


def check_concatenate(leaf: Leaf) -> Leaf:
    """Check a `ConcatenateKVCache`; one that was trimmed has too many rows."""
    need_floats(leaf, "keys", "values")
    offset, rows = leaf.numbers["offset"], rows_of(leaf)
    need(offset == rows, f"its offset is {offset} and it has {rows} rows")
    return cut(leaf, rows)


QUANTIZED = tuple(f"{name}.{i}" for name in ("keys", "values") for i in range(3))


def check_quantized(leaf: Leaf) -> Leaf:
    """Check a `QuantizedKVCache`: packed rows, scales, biases of keys and values."""
    group, bits = leaf.numbers["group_size"], leaf.numbers["bits"]
    need(
        group in (32, 64, 128) and bits in (2, 3, 4, 5, 6, 8),
        f"groups of {group} with {bits} bits are none that mlx quantizes to",
    )
    rows = rows_of(leaf, "keys.0", "values.0")
    need(
        all((name in leaf.arrays) == ("keys.0" in leaf.arrays) for name in QUANTIZED),
        "it lacks some of the packed rows, scales and biases",
    )
    if rows:
        _check_packed(leaf, "keys", group, bits)
        _check_packed(leaf, "values", group, bits)
    offset = leaf.numbers["offset"]
    need(offset <= rows, f"its offset is {offset} and it has {rows} rows")
    return cut(leaf, offset, QUANTIZED)


def _check_packed(leaf: Leaf, name: str, group: int, bits: int) -> None:
    packed, scales, biases = (leaf.arrays[f"{name}.{i}"] for i in range(3))
    need(packed.dtype == mx.uint32, f"the packed {name} are {packed.dtype}, not uint32")
    need_floats(leaf, f"{name}.1", f"{name}.2")
    need(
        scales.shape == biases.shape and scales.dtype == biases.dtype,
        f"the scales of {name} are {scales.shape} {scales.dtype} and the biases "
        f"{biases.shape} {biases.dtype}",
    )
    dim = scales.shape[-1] * group if scales.ndim == 4 else 0
    need(
        dim > 0
        and packed.shape[:3] == scales.shape[:3]
        and packed.shape[3] * 32 == dim * bits,
        f"the packed {name} are {packed.shape} and their scales {scales.shape}, which "
        f"do not fit groups of {group} with {bits} bits",
    )


def check_chunked(leaf: Leaf) -> Leaf:
    """Check a `ChunkedKVCache`."""
    need_floats(leaf, "keys", "values")
    numbers = leaf.numbers
    offset, start, rows = numbers["offset"], numbers["start_position"], rows_of(leaf)
    need(numbers["chunk_size"] > 0, "its chunk_size is 0")
    need(
        0 <= offset - start <= rows,
        f"its positions are [{start}, {offset}) and it has {rows} rows",
    )
    return cut(leaf, offset - start)


def check_ring(leaf: Leaf) -> Leaf:
    """Check a `RotatingKVCache`."""
    need_floats(leaf, "keys", "values")
    numbers = leaf.numbers
    offset, index, size = numbers["offset"], numbers["_idx"], numbers["max_size"]
    keep = numbers["keep"]
    need(keep < size, f"it keeps {keep} rows of a window of {size}")
    return _cut_ring(leaf, offset, index, size, wrapped=index > keep)


def _cut_ring(leaf: Leaf, offset: int, index: int, size: int, wrapped: bool) -> Leaf:
    """Refuse an index that does not fit the rows; `wrapped`: allow a wrapped ring."""
    rows = rows_of(leaf)
    if index == offset <= rows and (rows <= size or rows == offset):
        return cut(leaf, offset)
    ordered = index == rows < offset and rows >= size
    inside = index < rows == size < offset and wrapped
    need(
        ordered or inside,
        f"its offset is {offset}, its index {index}, its window {size} and it has "
        f"{rows} rows, which do not fit",
    )
    return leaf


def check_arrays(leaf: Leaf) -> Leaf:
    """Check an `ArraysCache`."""
    slots = leaf.numbers["slots"]
    need(1 <= slots <= MAX_SLOTS, f"it has {slots} slots of 1 to {MAX_SLOTS}")
    sizes = set()
    for name, array in leaf.arrays.items():
        if name in ("lengths", "left_padding"):
            need_integers(leaf, name)
        else:
            need(int(name.split(".")[1]) < slots, f"it has {name} and {slots} slots")
        need(array.ndim > 0 and array.shape[0] > 0, f"{name} is {array.shape}")
        sizes.add(array.shape[0])
    need(len(sizes) < 2, f"its arrays are for batches of {sorted(sizes)}")
    return leaf


def _check_batch(leaf: Leaf) -> tuple[list[int], list[int]]:
    need_floats(leaf, "keys", "values")
    rows_of(leaf)
    offsets, padding = need_integers(leaf, "offset", "left_padding")
    batch = leaf.arrays["keys"].shape[0] if "keys" in leaf.arrays else len(offsets)
    need(
        batch == len(offsets),
        f"keys are for a batch of {batch} and offset for {len(offsets)}",
    )
    return offsets, padding


def check_batch_kv(leaf: Leaf) -> Leaf:
    """Check a `BatchKVCache`."""
    offsets, padding = _check_batch(leaf)
    index, rows = leaf.numbers["_idx"], rows_of(leaf)
    need(index <= rows, f"its index is {index} and it has {rows} rows")
    need(min(padding) >= 0, f"a row's left_padding is {min(padding)}")
    for row, (offset, pad) in enumerate(zip(offsets, padding, strict=True)):
        need(
            offset == index - pad,
            f"row {row} has offset {offset}, padding {pad} and the index is {index}",
        )
    return cut(leaf, index)


def check_batch_ring(leaf: Leaf) -> Leaf:
    """Check a `BatchRotatingKVCache`."""
    offsets, padding = _check_batch(leaf)
    numbers = leaf.numbers
    index, size, rotated = numbers["_idx"], numbers["max_size"], numbers["rotated"]
    written, rows = numbers["_offset"], rows_of(leaf)
    need(size > 0, "its max_size is 0")
    if rotated:
        need(
            rows == size < written and 0 < index <= rows,
            f"it is rotated, with {rows} rows of {size}, index {index} after {written}",
        )
    base = size if rotated else index
    for row, (offset, pad) in enumerate(zip(offsets, padding, strict=True)):
        need(
            offset + pad >= base and pad >= -written,
            f"row {row} has offset {offset} and padding {pad}, after {written} and "
            f"with {base} rows in order",
        )
    return leaf if rotated else _cut_ring(leaf, written, index, size, wrapped=False)


def check_layer(leaf: Leaf) -> Leaf:
    """Check a `LayerCache` of DeepSeek V4.1; arrays are [batch, rows, dim]."""
    arrays, numbers = leaf.arrays, leaf.numbers
    offset, size = numbers["offset"], numbers["window_size"]
    need(size > 0, "its window_size is 0")
    need(bool(arrays) == (offset > 0), f"its offset is {offset}, arrays {len(arrays)}")
    if not arrays:
        return leaf
    need_floats(leaf, *arrays)
    need("window" in arrays, "it has no window")
    for name, array in arrays.items():
        need(array.ndim == 3, f"{name} has the shape {array.shape} and not 3 axes")
    rows = {name: array.shape[1] for name, array in arrays.items()}
    dims = {arrays[name].shape[2] for name in arrays if name != "index_k"}
    batches = {array.shape[0] for array in arrays.values()}
    need(
        len(dims) == len(batches) == 1 and min(min(dims), min(batches)) > 0,
        f"its arrays are for batches of {sorted(batches)} and dims of {sorted(dims)}",
    )
    need(
        rows["window"] == min(offset, size),
        f"its window has {rows['window']} rows of {size} at offset {offset}",
    )
    _check_groups(offset, rows)
    return leaf


def _check_groups(offset: int, rows: dict[str, int]) -> None:
    """Require `offset` to be closed groups of one size, and fewer pending rows."""
    groups, pending = rows.get("compress_kv"), rows.get("pending_kv")
    need(pending == rows.get("pending_gate"), f"pending rows differ: {rows}")
    need(rows.get("index_k") in (None, groups), f"index keys and groups differ: {rows}")
    need(groups is None or 1 <= groups <= offset, f"{groups} groups at {offset}")
    if pending is not None:
        closed = offset - pending
        fits = closed == 0 if groups is None else closed % groups == 0
        need(
            fits and (groups is None or closed // groups > pending),
            f"{groups} groups and {pending} pending rows do not make {offset} tokens",
        )
