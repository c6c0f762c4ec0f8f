"""A few steps of the gated delta rule on CUDA, in one kernel.

mlx-lm has a kernel for Metal only. Elsewhere it loops over the tokens with about ten
operations each, and the host submits these one by one. Let S be the state [Dv, Dk] of a
head, g a decay and b a beta. Each token computes

    S' = g S      u = b (v - S' k)      S = S' + u k^T      y = S q

The rows of S are independent. So a warp keeps one row in registers for all tokens, and
its lanes divide Dk among themselves. Results differ from the loop's by rounding.
"""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

WARPS = 8  # of a thread block; each warp has a row of the state
WIDEST = 512  # the largest Dk; a lane holds a 32nd of it

_SOURCE = r"""
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  const int head = blockIdx.y, b = blockIdx.z;
  const int tokens = q_shape[1], heads = v_shape[2], rows = v_shape[3];
  if (row >= rows) return;
  const int shared = head / (heads / q_shape[2]);
  const long place = ((long(b) * heads + head) * rows + row) * DK + lane;
  float held[N], next[N];
  for (int i = 0; i < N; ++i)
    held[i] = static_cast<float>(state[place + 32 * i]);
  for (int t = 0; t < tokens; ++t) {
    const auto* keys = k + b * k_strides[0] + t * k_strides[1]
        + shared * k_strides[2];
    const auto* queries = q + b * q_strides[0] + t * q_strides[1]
        + shared * q_strides[2];
    const long gate = (long(b) * tokens + t) * heads + head;
    float inside = 0;
    for (int i = 0; i < N; ++i) {
      const int c = lane + 32 * i;
      next[i] = held[i] * static_cast<float>(g[GATE]);
      inside += next[i] * static_cast<float>(keys[c * k_strides[3]]);
    }
    for (int far = 16; far; far /= 2)
      inside += __shfl_xor_sync(0xffffffff, inside, far);
    const float value = static_cast<float>(v[b * v_strides[0] + t * v_strides[1]
        + head * v_strides[2] + row * v_strides[3]]);
    const float update = (value - inside) * static_cast<float>(beta[gate]);
    float answer = 0;
    for (int i = 0; i < N; ++i) {
      const int c = lane + 32 * i;
      next[i] += update * static_cast<float>(keys[c * k_strides[3]]);
      answer += next[i] * static_cast<float>(queries[c * q_strides[3]]);
    }
    for (int far = 16; far; far /= 2)
      answer += __shfl_xor_sync(0xffffffff, answer, far);
    if (lane == 0)
      y[((long(b) * tokens + t) * heads + head) * rows + row] = answer;
    for (int i = 0; i < N; ++i) held[i] = next[i];
  }
  for (int i = 0; i < N; ++i) after[place + 32 * i] = held[i];
"""


@functools.cache
def _kernel(dim: int, by_channel: bool) -> Any:
    return mx.fast.cuda_kernel(
        name=f"gated_delta_{dim}_{int(by_channel)}",
        input_names=["q", "k", "v", "g", "beta", "state"],
        output_names=["y", "after"],
        source=_SOURCE.replace("GATE", "gate * DK + c" if by_channel else "gate"),
        header=f"constexpr int WARPS = {WARPS}, DK = {dim}, N = {dim // 32};\n",
        ensure_row_contiguous=False,
    )


def _run(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
) -> list[mx.array]:
    """Return y [batch, tokens, heads, Dv] and the state after the tokens, float32."""
    (batch, tokens, _, dim), (heads, width) = q.shape, v.shape[2:]
    together = [mx.contiguous(array) for array in (g, beta, state)]
    result: list[mx.array] = _kernel(dim, g.ndim == 4)(
        inputs=[q, k, v, *together],
        grid=(-(-width // WARPS) * WARPS * 32, heads, batch),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(batch, tokens, heads, width), state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return result


@dataclass(frozen=True, slots=True)
class Steps:
    """Result of some tokens, from which states after fewer tokens can be computed."""

    y: mx.array  # the output for each token, [batch, tokens, heads, Dv]
    last: mx.array  # the state after all tokens, [batch, heads, Dv, Dk]
    inputs: tuple[mx.array, ...]
    start: mx.array

    def after(self, keep: int) -> mx.array:
        """Return the state after `keep` tokens, at least 1, in the dtype of `start`."""
        if keep == self.y.shape[1]:
            return self.last
        q, k, v, g, beta = (each[:, :keep] for each in self.inputs)
        _, state = _run(q, k, v, g, beta, self.start)
        return state.astype(self.start.dtype)


def serves(q: mx.array, v: mx.array) -> bool:
    """Return whether the kernel supports the dimensions of q and v."""
    dim, heads, shared = q.shape[-1], v.shape[2], q.shape[2]
    return dim % 32 == 0 and dim <= WIDEST and heads % shared == 0


def run_steps(
    q: mx.array,  # [batch, tokens, key heads, Dk], scaled
    k: mx.array,  # the same shape, normalized
    v: mx.array,  # [batch, tokens, heads, Dv], grouped by key head
    # Decays in [0, 1], [batch, tokens, heads] or [batch, tokens, heads, Dk]
    g: mx.array,
    beta: mx.array,  # [batch, tokens, heads]
    # The state before the block, [batch, heads, Dv, Dk]; None: zeros, float32
    state: mx.array | None = None,
) -> Steps:
    """Run a block of gated delta steps on CUDA; `serves` has to be true for q and v."""
    if state is None:
        batch, heads, width = q.shape[0], *v.shape[2:]
        state = mx.zeros((batch, heads, width, q.shape[-1]), mx.float32)
    y, last = _run(q, k, v, g, beta, state)
    last = last.astype(state.dtype)
    return Steps(y.astype(q.dtype), last, (q, k, v, g, beta), state)
