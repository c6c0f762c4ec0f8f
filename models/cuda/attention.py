"""Attention of a few rows to many keys on CUDA, in half precision.

mlx 0.32 has a kernel for single rows without a mask, and otherwise calls cuDNN, which
takes about 40 ms to plan each new pair of row count and key count. The kernel here is
compiled once for each head dimension, for any number of keys.

In the arguments a row is a position. In the kernel it is a (query head, position) pair
of one key head. A block computes a tile of sixteen such pairs. Its warps take turns at
groups of sixteen keys. Each warp keeps running maxima and sums (online softmax; Milakov
and Gimelshein 2018, "Online normalizer calculation for softmax"). If tiles alone make
too few blocks, each block gets a part of the keys, and a second kernel joins the
results of the parts (Dao et al. 2023, "Flash-Decoding").

The products with keys and with values use matrix fragments (`mma.m16n8k16`, sums in
float32) whose rows are those of the tile, and every read is of 16 adjacent bytes. In
the scores the order of the head's dimensions is free, if it is the same for queries and
keys. The results for 64 dimensions are eight fragments: column g of fragment i is
dimension 8 g + i. The scores that a thread computes are its part of the left operand of
the product with values, so no shuffle is needed.

A NaN in a key or value makes the result NaN for each row that sees it, and for no other
row. The check of the logits relies on this. A row that sees no key gets zeros. If some
row of a tile does not see all sixteen keys of a group, the product takes values that
are not finite as zeros, and the sum of each row that sees one is set to NaN.
"""

import functools
from typing import Any

import mlx.core as mx

from mlx_speculation.models.cuda.attention_source import (
    CONTIGUOUS,
    ROWS,
    SCALARS,
    TOGETHER,
    WARPS,
    constants,
    source_of,
)
from mlx_speculation.models.cuda.kernel import Kernel
from mlx_speculation.models.cuda.matmul import HALVES, TYPES_WITHOUT_HEADERS

MOST_ROWS = 32
DIMENSIONS = (64, 128, 256)
KEYS = 256  # the least number of keys of a block, if keys are split
BLOCKS = 528  # at most, if keys are split: four for each multiprocessor of a large GPU


def _names(dtype: mx.Dtype, *others: Any) -> str:
    return "_".join([str(dtype).rpartition(".")[2], *map(str, others)])


@functools.cache
def _attend_contiguous(dtype: mx.Dtype, dim: int, mask: str, parts: bool) -> Kernel:
    name = f"few_rows_attention_{_names(dtype, dim, mask, int(parts))}"
    outputs = "float* sums, float* tops" if parts else "T* out"
    masks = ", const bool* mask" if mask == "bools" else ""
    return Kernel(
        name,
        f"{TYPES_WITHOUT_HEADERS}{constants(dtype, dim)}"
        f'extern "C" __global__ void {name}(const T* q, const T* k, const T* v, '
        f"const float* scale{masks}, {outputs}, {SCALARS}) "
        f"{{{CONTIGUOUS}{source_of(mask, parts)}}}\n",
    )


@functools.cache
def _attend(dtype: mx.Dtype, dim: int, mask: str, parts: bool) -> Any:
    inputs = ["q", "k", "v", "scale", "mask"]
    return mx.fast.cuda_kernel(
        name=f"few_rows_strided_{_names(dtype, dim, mask, int(parts))}",
        input_names=inputs if mask == "bools" else inputs[:-1],
        output_names=["sums", "tops"] if parts else ["out"],
        source=source_of(mask, parts),
        header=constants(dtype, dim),
        ensure_row_contiguous=False,
    )


@functools.cache
def _together(dtype: mx.Dtype, dim: int) -> Kernel:
    name = f"few_rows_together_{_names(dtype, dim)}"
    return Kernel(
        name,
        f"{TYPES_WITHOUT_HEADERS}{constants(dtype, dim)}"
        f'extern "C" __global__ void {name}(const float* sums, const float* tops, '
        f"T* out, int parts) {{{TOGETHER}}}\n",
    )


@functools.cache
def _scale(scale: float) -> mx.array:
    made = mx.array([scale], mx.float32)
    mx.eval(made)
    return made


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    *,
    contiguous: bool = False,
) -> mx.array:
    """Return softmax(scale queries keys^T + mask) values, shaped like `queries`.

        queries    [batch, heads, rows, dim], bfloat16 or float16, dim in `DIMENSIONS`
        keys       [batch, key heads, columns, dim], of the same dtype; the last axis is
                   contiguous, other strides are multiples of dim, for reads of 16 bytes
        values     like keys
        mask       "causal": the last row sees all columns; None: all rows do;
                   bool, broadcast to [batch, 1, rows, columns], True where a row sees
                   a column

    With `contiguous`, a `Kernel` is used: its binary is kept on disk, and it copies
    inputs that are not contiguous. Else `mx.fast.cuda_kernel` is used: every process
    compiles it.
    """
    batch, heads, rows, dim = queries.shape
    key_heads, columns = keys.shape[1:3]
    given = [queries, keys, values, _scale(scale)]
    mode = "none" if mask is None else "causal"
    if isinstance(mask, mx.array):
        mode = "bools"
        batches = mask.shape[0] if mask.ndim > 3 else 1
        shape = (batches if contiguous else batch, 1, rows, columns)
        given.append(mx.broadcast_to(mask, shape))
    tiles = -(-(heads // key_heads) * rows // ROWS)
    parts = max(1, min(columns // KEYS, BLOCKS // (tiles * key_heads * batch)))
    shapes, dtype = [queries.shape], queries.dtype
    if parts > 1:
        lead = (*queries.shape[:3], parts)
        shapes, dtype = [(*lead, dim), (*lead, 2)], mx.float32
    blocks, threads = (tiles * parts, key_heads, batch), 32 * WARPS
    if contiguous:
        each = rows * columns if mode == "bools" and batches > 1 else 0
        outputs = _attend_contiguous(queries.dtype, dim, mode, parts > 1)(
            inputs=given,
            scalars=[batch, heads, rows, key_heads, columns, each],
            blocks=blocks,
            threads=threads,
            output_shapes=shapes,
            output_dtype=dtype,
        )
    else:
        outputs = _attend(queries.dtype, dim, mode, parts > 1)(
            inputs=given,
            grid=(blocks[0] * threads, key_heads, batch),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=[dtype] * len(shapes),
        )
    return _joined(outputs, parts, queries) if parts > 1 else outputs[0]


def _joined(outputs: list[mx.array], parts: int, queries: mx.array) -> mx.array:
    batch, heads, rows, dim = queries.shape
    (whole,) = _together(queries.dtype, dim)(
        inputs=outputs,
        scalars=[parts],
        blocks=(batch * heads * rows, 1, 1),
        threads=dim,
        output_shapes=[queries.shape],
        output_dtype=queries.dtype,
    )
    return whole


def shows_whole_buffer(keys: mx.array, cache: Any) -> bool:
    """Return whether `keys` is a cache's whole buffer."""
    buffer = getattr(cache, "keys", None)
    return isinstance(buffer, mx.array) and buffer.shape == keys.shape


def serves(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any
) -> bool:
    """Return whether the kernel can replace mlx-lm's function here, and is faster."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    batch, _, rows, dim = queries.shape
    bools = isinstance(mask, mx.array)
    alone = batch == rows == 1 and not bools
    if alone or rows > MOST_ROWS or dim not in DIMENSIONS:
        return False
    if bools and (mask.dtype != mx.bool_ or (mask.ndim > 2 and mask.shape[-3] != 1)):
        return False
    if values.shape != keys.shape or queries.shape[0] != keys.shape[0]:
        return False
    if queries.shape[1] % keys.shape[1] or keys.shape[-1] != dim:
        return False
    return queries.dtype in HALVES and queries.dtype == keys.dtype == values.dtype
