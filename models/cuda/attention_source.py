"""CUDA source of attention of a few rows; `attention` says what it computes."""

import mlx.core as mx

from mlx_speculation.models.cuda.matmul import HALF_TYPES, TYPES

ROWS = 16  # (head, position) pairs of one block
WARPS = 4

_ATTEND = """
  constexpr int CHUNKS = D / 32, HALVES = D / 64;
  const int L = q_shape[2], N = k_shape[2], heads = k_shape[1];
  const int G = q_shape[1] / heads, R = G * L, tiles = (R + 15) / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x % tiles, part = blockIdx.x / tiles;
  const int parts = gridDim.x / tiles, h = blockIdx.y, b = blockIdx.z;
  const int each = (N + parts - 1) / parts;
  const int start = part * each, stop = min(N, start + each);
  __shared__ __align__(16) T sq[16][D];
  __shared__ float so[16][D + 1];
  __shared__ float sm[WARPS][16], sl[WARPS][16];
  // Rows past the end are computed from the last row, and not written.
  for (int x = threadIdx.x; x < 16 * D; x += WARPS * 32) {
    const int r = min(tile * 16 + x / D, R - 1);
    sq[x / D][x % D] = q[b * q_strides[0] + (h * G + r / L) * q_strides[1]
        + (r % L) * q_strides[2] + (x % D) * q_strides[3]];
  }
  const float log2_scale = scale[0] * 1.4426950408889634f;
  long long seen[2];  // the last visible key; for "bools" the row's offset in `mask`
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int p = min(tile * 16 + g + 8 * i, R - 1) % L;
    seen[i] = SEEN;
  }
  const T* ks = k + b * k_strides[0] + h * k_strides[1] + t * 8;
  const T* vs = v + b * v_strides[0] + h * v_strides[1] + g * 8;
  float o[HALVES][8][4], m[2] = {-1e30f, -1e30f}, l[2] = {0.0f, 0.0f};
  #pragma unroll
  for (int x = 0; x < HALVES * 32; x++) o[x / 32][x / 4 % 8][x % 4] = 0.0f;
  __syncthreads();
  for (int first = start + warp * 16; first < stop; first += WARPS * 16) {
    const T *ka = ks + min(first + g, N - 1) * k_strides[2];
    const T *kb = ks + min(first + g + 8, N - 1) * k_strides[2];
    uint4 value[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      value[i] = __ldg(reinterpret_cast<const uint4*>(
          vs + min(first + 2 * t + PLACE(i), N - 1) * v_strides[2]));
    float s[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const uint4 qa = *reinterpret_cast<const uint4*>(&sq[g][c * 32 + t * 8]);
      const uint4 qb = *reinterpret_cast<const uint4*>(&sq[g + 8][c * 32 + t * 8]);
      const uint4 ya = __ldg(reinterpret_cast<const uint4*>(ka + c * 32));
      const uint4 yb = __ldg(reinterpret_cast<const uint4*>(kb + c * 32));
      Half<T>::product(s[0], qa.x, qb.x, qa.y, qb.y, ya.x, ya.y);
      Half<T>::product(s[0], qa.z, qb.z, qa.w, qb.w, ya.z, ya.w);
      Half<T>::product(s[1], qa.x, qb.x, qa.y, qb.y, yb.x, yb.y);
      Half<T>::product(s[1], qa.z, qb.z, qa.w, qb.w, yb.z, yb.w);
    }
    // Bit 4 i + j: row g + 8 i sees key j of the thread's four.
    unsigned sights = 0;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const long long key = first + 2 * t + PLACE(j);
      #pragma unroll
      for (int i = 0; i < 2; i++)
        if (key < stop && (SEES)) sights |= 1u << (4 * i + j);
    }
    const bool whole = __all_sync(0xffffffff, sights == 0xff);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = m[i];
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        float& score = s[j / 2][2 * i + j % 2];
        score *= log2_scale;
        if (sights >> (4 * i + j) & 1) most = fmaxf(most, score);
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      const float less = exp2f(m[i] - most);
      m[i] = most;
      l[i] *= less;
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        float& score = s[j / 2][2 * i + j % 2];
        score = sights >> (4 * i + j) & 1 ? exp2f(score - most) : 0.0f;
        l[i] += score;
      }
      #pragma unroll
      for (int x = 0; x < HALVES * 8; x++) {
        o[x / 8][x % 8][2 * i] *= less;
        o[x / 8][x % 8][2 * i + 1] *= less;
      }
    }
    const unsigned p0 = Half<T>::pair(s[0][0], s[0][1]);
    const unsigned p1 = Half<T>::pair(s[0][2], s[0][3]);
    const unsigned p2 = Half<T>::pair(s[1][0], s[1][1]);
    const unsigned p3 = Half<T>::pair(s[1][2], s[1][3]);
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      if (half) {
        #pragma unroll
        for (int i = 0; i < 4; i++)
          value[i] = __ldg(reinterpret_cast<const uint4*>(
              vs + min(first + 2 * t + PLACE(i), N - 1) * v_strides[2] + half * 64));
      }
      if (!whole) {
        unsigned bad = 0;  // bit j: the thread's key j has a value that is not finite
        #pragma unroll
        for (int j = 0; j < 4; j++)
          if (Half<T>::not_finite(value[j])) bad |= 1u << j;
        #pragma unroll
        for (int w = 4; w < 32; w *= 2) bad |= __shfl_xor_sync(0xffffffff, bad, w);
        if (bad & sights) l[0] = __int_as_float(0x7FC00000);
        if (bad & sights >> 4) l[1] = __int_as_float(0x7FC00000);
        #pragma unroll
        for (int j = 0; j < 4; j++)
          if (bad >> j & 1) value[j] = make_uint4(0, 0, 0, 0);
      }
      const unsigned* words[4];
      #pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = reinterpret_cast<const unsigned*>(&value[j]);
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        const unsigned halves = i % 2 ? 0x7632 : 0x5410;
        const unsigned y0 = __byte_perm(words[0][i / 2], words[1][i / 2], halves);
        const unsigned y1 = __byte_perm(words[2][i / 2], words[3][i / 2], halves);
        Half<T>::product(o[half][i], p0, p1, p2, p3, y0, y1);
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    l[i] += __shfl_xor_sync(0xffffffff, l[i], 1);
    l[i] += __shfl_xor_sync(0xffffffff, l[i], 2);
    if (t == 0) { sm[warp][g + 8 * i] = m[i]; sl[warp][g + 8 * i] = l[i]; }
  }
  __syncthreads();
  float less[2];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    float top = sm[0][g + 8 * i];
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, sm[w][g + 8 * i]);
    less[i] = exp2f(m[i] - top);
  }
  for (int w = 0; w < WARPS; w++) {  // in a fixed order, so sums are reproducible
    if (warp == w) {
      #pragma unroll
      for (int x = 0; x < HALVES * 32; x++) {
        const int e = x % 4, i = x / 4 % 8, d = x / 32 * 64 + (2 * t + e % 2) * 8 + i;
        float& sum = so[g + e / 2 * 8][d];
        const float more = o[x / 32][i][e] * less[e / 2];
        sum = w ? sum + more : more;
      }
    }
    __syncthreads();
  }
  for (int x = threadIdx.x; x < 16 * D; x += WARPS * 32) {
    const int i = x / D, d = x % D, r = tile * 16 + i;
    if (r >= R) continue;
    float top = sm[0][i], sum = 0.0f;
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, sm[w][i]);
    for (int w = 0; w < WARPS; w++) sum += exp2f(sm[w][i] - top) * sl[w][i];
    const float out_d = so[i][d];
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
TOGETHER = """
  const int d = threadIdx.x;
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

# For each kind of mask: the value of `seen`, and the condition that a row sees a key.
_MASKS = {
    "none": ("0", "true"),
    "causal": ("N - L + p", "key <= seen[i]"),
    "bools": (
        "b * mask_strides[0] + p * mask_strides[2]",
        "mask[seen[i] + key * mask_strides[3]]",
    ),
}

# Shapes and strides of contiguous inputs, by the names that mlx gives them.
CONTIGUOUS = """
  const int q_shape[4] = {batch, q_heads, q_rows, D};
  const int k_shape[4] = {batch, k_heads, k_rows, D};
  const long long q_strides[4] = {(long long)q_heads * q_rows * D, q_rows * D, D, 1};
  const long long k_strides[4] = {
      (long long)k_heads * k_rows * D, (long long)k_rows * D, D, 1};
  const long long* v_strides = k_strides;
  const long long mask_strides[4] = {mask_batch, 0, k_rows, 1};
"""
SCALARS = "int batch, int q_heads, int q_rows, int k_heads, int k_rows, int mask_batch"


def constants(dtype: mx.Dtype, dim: int) -> str:
    """Return the constants of the kernels for a dtype and a head dimension."""
    return (
        f"{HALF_TYPES}using T = {TYPES[dtype]};\n"
        f"constexpr int D = {dim}, WARPS = {WARPS};\n"
        "#define PLACE(i) ((i) / 2 * 8 + (i) % 2)\n"
    )


def source_of(mask: str, parts: bool) -> str:
    """Return the body of the kernel for a kind of mask; `parts`: keys are split."""
    seen, sees = _MASKS[mask]
    source = _ATTEND.replace("SEEN", seen).replace("SEES", sees)
    return source.replace("WRITE", _PART if parts else _WHOLE)
