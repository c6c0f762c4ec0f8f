"""Attention of a few rows to many keys on CUDA, in half precision.

mlx 0.32 has a kernel for single rows without a mask, and asks cuDNN for the rest, which
plans for some 40 ms whenever it meets a new number of rows or keys. Here a kernel is
compiled once for a head dimension.

Rows are (head, position) pairs of one key head. A block takes four of them and a part
of the keys, its warps take turns with the keys, and each keeps running maxima and sums
(online softmax; Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"). Where there are too few blocks, keys are split among several, and a second
kernel puts their parts together (Dao et al. 2023, "Flash-Decoding").

What is not a number in a key or value that a row sees stays one in its result, as the
check of the logits needs it; a row that sees nothing gets zeros.
"""

import functools
from typing import Any

import mlx.core as mx

from mlx_speculation.models.cuda_products import TYPES

ROWS = 4  # of one block
DIMENSIONS = (64, 128, 256)
KEYS = 256  # a block has at least so many of a split
BLOCKS = 264  # two for each processor of a large GPU

_ATTEND = """
  constexpr int OWN = D / 32;  // values of a head that a thread holds
  struct __align__(sizeof(T) * OWN) Values { T v[OWN]; };
  const int L = q_shape[2], N = k_shape[2], heads = k_shape[1];
  const int G = q_shape[1] / heads, R = G * L, tiles = (R + ROWS - 1) / ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % tiles, part = blockIdx.x / tiles;
  const int parts = gridDim.x / tiles, h = blockIdx.y, b = blockIdx.z;
  const int each = (N + parts - 1) / parts;
  const int start = part * each, stop = min(N, start + each);
  __shared__ float so[WARPS][ROWS][D];
  __shared__ float sm[WARPS][ROWS], sl[WARPS][ROWS];
  float qr[ROWS][OWN], o[ROWS][OWN], m[ROWS], l[ROWS];
  long long seen[ROWS];  // the last key of a row, or where its mask begins
  #pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int r = min(tile * ROWS + i, R - 1), p = r % L;
    const T* from = q + b * q_strides[0] + (h * G + r / L) * q_strides[1]
        + p * q_strides[2];
    #pragma unroll
    for (int e = 0; e < OWN; e++) {
      const float value = static_cast<float>(from[(lane * OWN + e) * q_strides[3]]);
      qr[i][e] = value * scale[0] * 1.4426950408889634f;
      o[i][e] = 0.0f;
    }
    m[i] = -1e30f;
    l[i] = 0.0f;
    seen[i] = SEEN;
  }
  const T* ks = k + b * k_strides[0] + h * k_strides[1] + lane * OWN;
  const T* vs = v + b * v_strides[0] + h * v_strides[1] + lane * OWN;
  #pragma unroll 2
  for (int key = start + warp; key < stop; key += WARPS) {
    const Values kv = *reinterpret_cast<const Values*>(ks + key * k_strides[2]);
    const Values vv = *reinterpret_cast<const Values*>(vs + key * v_strides[2]);
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float s = 0.0f;
      #pragma unroll
      for (int e = 0; e < OWN; e++) s += qr[i][e] * static_cast<float>(kv.v[e]);
      #pragma unroll
      for (int w = 16; w > 0; w >>= 1) s += __shfl_xor_sync(0xffffffff, s, w);
      const bool sees = SEES;
      const float top = sees ? fmaxf(m[i], s) : m[i];
      const float f = exp2f(m[i] - top), weight = sees ? exp2f(s - top) : 0.0f;
      m[i] = top;
      l[i] = l[i] * f + weight;
      #pragma unroll
      for (int e = 0; e < OWN; e++)
        o[i][e] = o[i][e] * f + (sees ? weight * static_cast<float>(vv.v[e]) : 0.0f);
    }
  }
  #pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (lane == 0) { sm[warp][i] = m[i]; sl[warp][i] = l[i]; }
    #pragma unroll
    for (int e = 0; e < OWN; e++) so[warp][i][lane * OWN + e] = o[i][e];
  }
  __syncthreads();
  for (int x = threadIdx.x; x < ROWS * D; x += WARPS * 32) {
    const int i = x / D, d = x % D, r = tile * ROWS + i;
    if (r >= R) continue;
    float top = -1e30f, sum = 0.0f, out_d = 0.0f;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, sm[w][i]);
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2f(sm[w][i] - top);
      sum += f * sl[w][i];
      out_d += f * so[w][i][d];
    }
    const long long row = ((long long)b * q_shape[1] + h * G + r / L) * L + r % L;
    WRITE
  }
"""
_WHOLE = "out[row * D + d] = static_cast<T>(sum == 0.0f ? 0.0f : out_d / sum);"
_PART = """
    sums[(row * parts + part) * D + d] = out_d;
    if (d == 0) {
      tops[(row * parts + part) * 2] = top;
      tops[(row * parts + part) * 2 + 1] = sum;
    }
"""
_TOGETHER = """
  const int parts = sums_shape[3], d = threadIdx.x;
  const long long row = blockIdx.x;
  float top = -1e30f, sum = 0.0f, out_d = 0.0f;
  for (int i = 0; i < parts; i++) top = fmaxf(top, tops[(row * parts + i) * 2]);
  for (int i = 0; i < parts; i++) {
    const float f = exp2f(tops[(row * parts + i) * 2] - top);
    sum += f * tops[(row * parts + i) * 2 + 1];
    out_d += f * sums[(row * parts + i) * D + d];
  }
  out[row * D + d] = static_cast<T>(sum == 0.0f ? 0.0f : out_d / sum);
"""

# What a row notes before it meets the keys, and whether it sees one of them.
_MASKS = {
    "none": ("0", "true"),
    "causal": ("N - L + p", "key <= seen[i]"),
    "bools": (
        "b * mask_strides[0] + p * mask_strides[2]",
        "mask[seen[i] + key * mask_strides[3]]",
    ),
}


def _constants(dtype: mx.Dtype, dim: int) -> str:
    warps = 8 if dim > 128 else 16  # partial results stand in 32 KiB
    return (
        f"using T = {TYPES[dtype]};\n"
        f"constexpr int D = {dim}, WARPS = {warps}, ROWS = {ROWS};\n"
    )


@functools.cache
def _attend(dtype: mx.Dtype, dim: int, mask: str, parts: bool) -> Any:
    named = f"{str(dtype).rpartition('.')[2]}_{dim}_{mask}_{int(parts)}"
    seen, sees = _MASKS[mask]
    source = _ATTEND.replace("SEEN", seen).replace("SEES", sees)
    inputs = ["q", "k", "v", "scale", "mask"]
    return mx.fast.cuda_kernel(
        name=f"few_rows_attention_{named}",
        input_names=inputs if mask == "bools" else inputs[:-1],
        output_names=["sums", "tops"] if parts else ["out"],
        source=source.replace("WRITE", _PART if parts else _WHOLE),
        header=_constants(dtype, dim),
        ensure_row_contiguous=False,
    )


@functools.cache
def _together(dtype: mx.Dtype, dim: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"few_rows_together_{str(dtype).rpartition('.')[2]}_{dim}",
        input_names=["sums", "tops"],
        output_names=["out"],
        source=_TOGETHER,
        header=_constants(dtype, dim),
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
) -> mx.array:
    """Return softmax(scale queries keys^T + mask) values, on CUDA.

    Args:
        queries: [batch, heads, rows, dim], bfloat16 or float16; dim in `DIMENSIONS`.
        keys: [batch, key heads, columns, dim], of that dtype; dim lies together.
        values: likewise.
        scale: of the scores.
        mask: "causal": the last row sees all columns; bool, which broadcasts to
            [batch, 1, rows, columns]: a row sees where it is true; None: all see all.

    Returns:
        Like `queries`.
    """
    batch, heads, rows, dim = queries.shape
    key_heads, columns = keys.shape[1:3]
    given, mode = [queries, keys, values, _scale(scale)], "none"
    if isinstance(mask, mx.array):
        shape = (batch, 1, rows, columns)
        given.append(mx.broadcast_to(mask, shape))
        mode = "bools"
    elif mask is not None:
        mode = "causal"
    tiles = -(-(heads // key_heads) * rows // ROWS)
    parts = max(1, min(columns // KEYS, BLOCKS // (tiles * key_heads * batch)))
    threads = 32 * (8 if dim > 128 else 16)
    outputs = (*queries.shape[:3], parts)
    found = _attend(queries.dtype, dim, mode, parts > 1)(
        inputs=given,
        grid=(tiles * parts * threads, key_heads, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*outputs, dim), (*outputs, 2)]
        if parts > 1
        else [queries.shape],
        output_dtypes=[mx.float32, mx.float32] if parts > 1 else [queries.dtype],
    )
    if parts > 1:
        found = _together(queries.dtype, dim)(
            inputs=found,
            grid=(dim * batch * heads * rows, 1, 1),
            threadgroup=(dim, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[queries.dtype],
        )
    out: mx.array = found[0]
    return out
