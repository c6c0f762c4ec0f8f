"""Products of a few rows with a large weight on CUDA, in half precision.

mlx 0.32 has a kernel for one row, and calls cuBLASLt for more. Each of these calls
takes the host 20 to 40 microseconds, so a forward over 5 rows waits for the host. If
weights have 4 bits and there are 2 to 7 rows, mlx reads the weights once for each row.
The kernels here read weights once and are submitted as fast as mlx's own.

The result of `mma.m16n8k16`, in float32, has sixteen outputs as rows, and eight rows of
x as columns. The order of k is free, if it is the same for weight and x, so a thread
reads 16 adjacent bytes of k and uses them as two fragments.
The warps of a block divide k among themselves, and add their sums in shared memory. The
result of a row does not depend on the other rows.

One kernel can multiply the same x with several weights. So there is less to build and
submit, and weights with few outputs leave no multiprocessor idle.

Weights q of 4 bits become half floats by setting bits: 0x4300 | q is 128 + q in
bfloat16, 0x6400 | q is 1024 + q in float16. Let s and b be the scale and the bias of a
group of weights along k, and z be 128 or 1024. With sums over this group,

    y = s sum(q x) + b sum(x) = s sum((z + q) x) + (b - z s) sum(x)

A product with a fragment of ones gives sum(x) in the thread that needs it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_speculation.models.cuda.kernel import Kernel

WARPS = 8
OUTPUTS = 16
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
HALVES = tuple(TYPES)
MOST_ROWS = 32

_HALF_TYPE = """
template <> struct Half<TYPE> {
  static __device__ void product(float* c, unsigned a0, unsigned a1, unsigned a2,
                                 unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.NAME.NAME.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  static __device__ unsigned pair(float low, float high) {
    __align__(4) const TYPE both[2] = {
        static_cast<TYPE>(low), static_cast<TYPE>(high)};
    return *reinterpret_cast<const unsigned*>(both);
  }
  static __device__ bool not_finite(uint4 v) {
    constexpr unsigned low = EXPONENT, high = low << 16;
    return (v.x & low) == low || (v.x & high) == high || (v.y & low) == low
        || (v.y & high) == high || (v.z & low) == low || (v.z & high) == high
        || (v.w & low) == low || (v.w & high) == high;
  }
  static constexpr unsigned magic = MAGIC, ones = ONES;
  static constexpr float zero = ZERO;
};
"""


def _half_type(**values: str) -> str:
    text = _HALF_TYPE.strip("\n")
    for place, value in values.items():
        text = text.replace(place, value)
    return text + "\n"


# Operations and constants of the two types, as `Half<T>`.
HALF_TYPES = (
    "\ntemplate <typename H> struct Half;\n"
    + _half_type(
        TYPE="__nv_bfloat16",
        NAME="bf16",
        MAGIC="0x43004300u",
        ONES="0x3F803F80u",
        ZERO="128.0f",
        EXPONENT="0x7F80u",
    )
    + _half_type(
        TYPE="__half",
        NAME="f16",
        MAGIC="0x64006400u",
        ONES="0x3C003C00u",
        ZERO="1024.0f",
        EXPONENT="0x7C00u",
    )
)

# Replaces the parts of cuda_bf16.h and cuda_fp16.h that the kernels need.
_TYPE = """
struct TYPE {
  unsigned short bits;
  TYPE() = default;
  __device__ explicit TYPE(float value) {
    asm("cvt.rn.NAME.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  __device__ explicit operator float() const { TO_FLOAT }
};
"""
TYPES_WITHOUT_HEADERS = _TYPE.replace("TYPE", "__nv_bfloat16").replace(
    "NAME", "bf16"
).replace("TO_FLOAT", "return __uint_as_float((unsigned)bits << 16);") + _TYPE.replace(
    "TYPE", "__half"
).replace("NAME", "f16").replace(
    "TO_FLOAT",
    'float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits)); return value;',
)

# Chooses the weight and the first output of a block.
_CHOOSE = """
  if (block >= 0 && block < (outputsI + 15) / 16) {
    w = wI; out = outI; N = outputsI; first = block * 16;
  }
  block -= (outputsI + 15) / 16;
"""
_CHOOSE_QUANTIZED = _CHOOSE.replace(
    "w = wI;", "w = wI; scales = scalesI; biases = biasesI;"
)

_NOT_CHOSEN = """
  T* out = nullptr;
  int block = blockIdx.x, first = 0, N = 0;
"""

_BEGIN = """
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  __shared__ float sums[WARPS][16][8 * TILES + 1];
  float acc[TILES][4];
  #pragma unroll
  for (int r = 0; r < TILES; r++)
    acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = 0.0f;
  // Outputs and rows past the end are computed from the last one, not written.
  const long long na = min(first + g, N - 1), nb = min(first + g + 8, N - 1);
"""

_END = """
  #pragma unroll
  for (int r = 0; r < TILES; r++) {
    sums[warp][g][r * 8 + 2 * t] = acc[r][0];
    sums[warp][g][r * 8 + 2 * t + 1] = acc[r][1];
    sums[warp][g + 8][r * 8 + 2 * t] = acc[r][2];
    sums[warp][g + 8][r * 8 + 2 * t + 1] = acc[r][3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * 8 * TILES; i += WARPS * 32) {
    const int o = i % 16, r = i / 16;
    if (r >= rows || first + o >= N) continue;
    float sum = 0.0f;
    #pragma unroll
    for (int v = 0; v < WARPS; v++) sum += sums[v][o][r];
    out[(long long)r * N + first + o] = static_cast<T>(sum);
  }
"""

_HALF = f"""
  const T* w = nullptr;
  CHOSEN
{_BEGIN}
  const uint4* wa = reinterpret_cast<const uint4*>(w + na * K) + t;
  const uint4* wb = reinterpret_cast<const uint4*>(w + nb * K) + t;
  const uint4* xs[TILES];
  #pragma unroll
  for (int r = 0; r < TILES; r++)
    xs[r] = reinterpret_cast<const uint4*>(
        x + (long long)min(r * 8 + g, rows - 1) * K) + t;
  #pragma unroll 8
  for (int c = warp; c < K / 32; c += WARPS) {{
    const uint4 a = __ldg(wa + c * 4), b = __ldg(wb + c * 4);
    #pragma unroll
    for (int r = 0; r < TILES; r++) {{
      const uint4 y = __ldg(xs[r] + c * 4);
      Half<T>::product(acc[r], a.x, b.x, a.y, b.y, y.x, y.y);
      Half<T>::product(acc[r], a.z, b.z, a.w, b.w, y.z, y.w);
    }}
  }}
{_END}"""

_FOUR_BITS = f"""
  const unsigned* w = nullptr;
  const T *scales = nullptr, *biases = nullptr;
  CHOSEN
{_BEGIN}
  constexpr int CHUNK = GROUP < 64 ? GROUP : 64;  // of k, all of one group
  constexpr int OWN = CHUNK / 4, WORDS = OWN / 8;  // of one thread
  const unsigned* wa = w + na * (K / 8) + t * WORDS;
  const unsigned* wb = w + nb * (K / 8) + t * WORDS;
  const T *sa = scales + na * (K / GROUP), *sb = scales + nb * (K / GROUP);
  const T *ba = biases + na * (K / GROUP), *bb = biases + nb * (K / GROUP);
  const uint4* xs[TILES];
  #pragma unroll
  for (int r = 0; r < TILES; r++)
    xs[r] = reinterpret_cast<const uint4*>(
        x + (long long)min(r * 8 + g, rows - 1) * K + t * OWN);
  const unsigned m = Half<T>::magic, one = Half<T>::ones, low = 0x000F000Fu;
  #pragma unroll 4
  for (int c = warp; c < K / CHUNK; c += WARPS) {{
    const int group = c * CHUNK / GROUP;
    unsigned qa[WORDS], qb[WORDS];
    #pragma unroll
    for (int i = 0; i < WORDS; i++) {{
      qa[i] = __ldg(wa + c * (CHUNK / 8) + i);
      qb[i] = __ldg(wb + c * (CHUNK / 8) + i);
    }}
    const float s0 = static_cast<float>(sa[group]), s1 = static_cast<float>(sb[group]);
    const float b0 = static_cast<float>(ba[group]) - Half<T>::zero * s0;
    const float b1 = static_cast<float>(bb[group]) - Half<T>::zero * s1;
    #pragma unroll
    for (int r = 0; r < TILES; r++) {{
      float p[4] = {{0, 0, 0, 0}}, u[4] = {{0, 0, 0, 0}};
      #pragma unroll
      for (int i = 0; i < WORDS; i++) {{
        const uint4 y = __ldg(xs[r] + c * (CHUNK / 8) + i);
        // Pairs values j and j + 4 of each eight of x, as `& low` pairs the weights.
        const unsigned y0 = __byte_perm(y.x, y.z, 0x5410);
        const unsigned y1 = __byte_perm(y.x, y.z, 0x7632);
        const unsigned y2 = __byte_perm(y.y, y.w, 0x5410);
        const unsigned y3 = __byte_perm(y.y, y.w, 0x7632);
        Half<T>::product(p, (qa[i] & low) | m, (qb[i] & low) | m,
                         ((qa[i] >> 4) & low) | m, ((qb[i] >> 4) & low) | m, y0, y1);
        Half<T>::product(p, ((qa[i] >> 8) & low) | m, ((qb[i] >> 8) & low) | m,
                         ((qa[i] >> 12) & low) | m, ((qb[i] >> 12) & low) | m, y2, y3);
        Half<T>::product(u, one, one, one, one, y0, y1);
        Half<T>::product(u, one, one, one, one, y2, y3);
      }}
      acc[r][0] += s0 * p[0] + b0 * u[0];
      acc[r][1] += s0 * p[1] + b0 * u[1];
      acc[r][2] += s1 * p[2] + b1 * u[2];
      acc[r][3] += s1 * p[3] + b1 * u[3];
    }}
  }}
{_END}"""


class Weight(NamedTuple):
    """A weight of a product, transposed."""

    # [n, k] of the dtype of x; or the three of `mx.quantize` with 4 bits: uint32
    # [n, k / 8], scales and biases of the dtype of x, [n, k / group]
    arrays: tuple[mx.array, ...]
    group: int  # 32, 64 or 128, a divisor of k; 0: not quantized, and 32 divides k


@functools.cache
def _kernel(dtype: mx.Dtype, tiles: int, group: int, count: int) -> Kernel:
    """Return the kernel for 8 x `tiles` rows and `count` weights."""
    parts = {"w": "unsigned", "scales": "T", "biases": "T"} if group else {"w": "T"}
    numbers = range(count)
    parameters = [
        "const T* x",
        *(f"const {t}* {part}{i}" for i in numbers for part, t in parts.items()),
        *(f"T* out{i}" for i in numbers),
        "int rows",
        "int K",
        *(f"int outputs{i}" for i in numbers),
    ]
    name = f"few_rows_{str(dtype).rpartition('.')[2]}_{tiles}_{group}_{count}"
    choose = _CHOOSE_QUANTIZED if group else _CHOOSE
    chosen = "".join(choose.replace("I", str(i)) for i in numbers)
    source = (_FOUR_BITS if group else _HALF).replace("CHOSEN", _NOT_CHOSEN + chosen)
    return Kernel(
        name,
        f"{TYPES_WITHOUT_HEADERS}{HALF_TYPES}using T = {TYPES[dtype]};\n"
        f"constexpr int TILES = {tiles}, WARPS = {WARPS}, GROUP = {group};\n"
        f'extern "C" __global__ void {name}({", ".join(parameters)}) {{{source}}}\n',
    )


def products(x: mx.array, weights: Sequence[Weight]) -> list[mx.array]:
    """Return x @ weight.T for each weight, on CUDA.

    `x` is [..., k], bfloat16 or float16, with at most `MOST_ROWS` rows. All weights
    have the same `group`.
    """
    *lead, width = x.shape
    rows = x.size // width
    outputs = [weight.arrays[0].shape[0] for weight in weights]
    tiles = 1 << ((rows - 1) // 8).bit_length()
    kernel = _kernel(x.dtype, tiles, weights[0].group, len(weights))
    return kernel(
        inputs=[x, *[array for weight in weights for array in weight.arrays]],
        scalars=[rows, width, *outputs],
        blocks=(sum([-(-count // OUTPUTS) for count in outputs]), 1, 1),
        threads=WARPS * 32,
        output_shapes=[(*lead, count) for count in outputs],
        output_dtype=x.dtype,
    )
