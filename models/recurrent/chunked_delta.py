"""A block of gated delta steps by matrix products, with the state after each prefix.

mlx-lm 0.32.2 runs the recurrence token by token on devices without a kernel, so k + 1
tokens take k + 1 times as long as one token. Let S be the state [Dv, Dk] of a head
before the block, g_t the decays, b_t the betas, R_ti = g_(i+1) ... g_t for i <= t, and
R_t = g_1 ... g_t. Without an index, R and b multiply row t by R_t and b_t:

    S_t = g_t S_(t-1) + u_t k_t^T      u_t = b_t (v_t - g_t S_(t-1) k_t)

    (1 + L) U = b (V - R K S^T)        L_ti = b_t R_ti k_i k_t for i < t, else 0
    Y = R Q S^T + A U                  A_ti = R_ti q_t k_i for i <= t, else 0
    S_n = R_n S + sum over i <= n of R_ni u_i k_i^T

This is the chunked form (WY, or UT transform) of Yang et al. 2024, "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length", with the decay of Yang et
al. 2025, "Gated Delta Networks", equations 8 to 10. Nothing is divided by a decay, so
decays can be 0.

Results differ from the recurrence by rounding. So products are used only where a
model's other products, too, can round a row of a block differently from the same row
alone: in float32 on a CPU with OpenBLAS. Where `models.ops` has a kernel, as on CUDA,
the kernel is used. mlx-lm's own scan runs in all other cases, and for single rows.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g

from mlx_speculation.models.device_ops import Block, RunBlock
from mlx_speculation.models.ops.dispatch import gated_delta_kernel
from mlx_speculation.models.round_context import rows_differ

# The largest block, in rows, in which products take less time than single steps.
LONGEST = 32


class _Block(NamedTuple):
    """Results of `_run`; `*heads` are key heads, and value heads for each key head."""

    y: mx.array  # [batch, rows, value heads, Dv], float32
    updates: mx.array  # u_t, [batch, *heads, rows, Dv]
    decays: mx.array  # R_ti, and 1 where i > t, [batch, *heads, rows, rows]
    total: mx.array  # R_t, [batch, *heads, rows, 1]
    keys: mx.array  # [batch, key heads, 1, rows, Dk]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The result of a block."""

    y: mx.array  # the scan's result, [batch, rows, value heads, Dv]
    start: mx.array  # the state before the block, [batch, value heads, Dv, Dk]
    block: _Block

    def after(self, keep: int) -> mx.array:
        """Return the state after the first `keep` rows, in the shape of `start`.

        `keep` is at least 1.
        """
        updates, last = self.block.updates, keep - 1
        weights = self.block.decays[..., last, :keep, None]
        added = (updates[..., :keep, :] * weights).swapaxes(-1, -2)
        added = added @ self.block.keys[..., :keep, :]  # [batch, *heads, Dv, Dk]
        total = self.block.total[..., last : last + 1, :]
        state = total * self.start.reshape(added.shape) + added
        return state.reshape(self.start.shape)


def run_chunk(
    q: mx.array,  # [batch, rows, key heads, Dk], scaled
    k: mx.array,  # the same shape, normalized
    v: mx.array,  # [batch, rows, value heads, Dv], grouped by key head
    g: mx.array,  # decays in [0, 1], [batch, rows, value heads]
    beta: mx.array,  # [batch, rows, value heads]
    # The state before the block, [batch, value heads, Dv, Dk]; None: zeros
    state: mx.array | None = None,
) -> Chunk:
    """Run a block of gated delta steps; all arrays are float32."""
    batch, rows, key_heads, dim = k.shape
    heads, width = v.shape[2:]
    if state is None:
        state = mx.zeros((batch, heads, width, dim), mx.float32)
    split = (key_heads, heads // key_heads)
    block = _run(
        k,
        q,
        v.reshape(batch, rows, *split, width),
        g.reshape(batch, rows, *split, 1),
        beta.reshape(batch, rows, *split, 1),
        state.reshape(batch, *split, width, dim),
    )
    return Chunk(block.y, state, block)


class _Pairs(NamedTuple):
    """Masks of pairs of rows (t, i), [rows, rows]."""

    below: mx.array  # i < t, bool
    diagonal: mx.array  # 1 where i = t, float32
    # Bool; level n has the pairs between the halves of each 2 ** (n + 1) rows
    levels: list[mx.array]


@functools.cache
def _pairs(rows: int) -> _Pairs:
    t, i = mx.arange(rows)[:, None], mx.arange(rows)[None]
    levels, size = [], 1
    while size < rows:
        same = t // (2 * size) == i // (2 * size)
        levels.append(same & (t // size > i // size))
        size *= 2
    result = _Pairs(t > i, mx.eye(rows), levels)
    mx.eval(result)
    return result


def _inverse(lower: mx.array, pairs: _Pairs) -> mx.array:
    """Return the inverse of 1 + `lower`, [..., rows, rows], by halves.

    [ A 0 ]^-1   [   A^-1         0   ]
    [ C D ]    = [ -D^-1 C A^-1  D^-1 ]
    """
    first, *others = pairs.levels
    result = pairs.diagonal - mx.where(first, lower, 0)
    for level in others:
        result = mx.addmm(result, result @ mx.where(level, lower, 0), result, alpha=-1)
    return result


def _run(
    k: mx.array, q: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> _Block:
    """Run a block, with the value heads of each key head on an axis of their own."""
    rows = k.shape[1]
    pairs = _pairs(rows)
    both = mx.concatenate([k, q], axis=1).swapaxes(1, 2)
    both = mx.contiguous(both)[:, :, None]  # [batch, key heads, 1, 2 rows, Dk]
    keys = both[..., :rows, :]
    products = both @ keys.swapaxes(-1, -2)  # [batch, key heads, 1, 2 rows, rows]
    from_state = both @ state.swapaxes(-1, -2)  # [batch, *heads, 2 rows, Dv]
    v, g, beta = (each.transpose(0, 2, 3, 1, 4) for each in (v, g, beta))
    decays = mx.cumprod(mx.where(pairs.below, g, 1), axis=-2)
    total = decays[..., :1] * g[..., :1, :]
    before = mx.where(pairs.below, decays, 0)
    updates = beta * (v - total * from_state[..., :rows, :])
    lower = beta * before * products[..., :rows, :]
    updates = _inverse(lower, pairs) @ updates
    weights = (before + pairs.diagonal) * products[..., rows:, :]
    y = mx.addmm(total * from_state[..., rows:, :], weights, updates)
    y = y.transpose(0, 3, 1, 2, 4).flatten(2, 3)
    return _Block(y, updates, decays, total, keys)


def gated_delta_in_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803, mlx-lm's name
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    **_: Any,
) -> Block | None:
    """Run mlx-lm's `gated_delta_update` as a block; None: mlx-lm's code has to run."""
    kernel = gated_delta_kernel(q, v)
    by_channel = a.ndim != b.ndim
    in_chunks = rows_differ(q.dtype) and not by_channel
    padded = mask is not None  # mlx-lm passes a mask for a batch with padding
    if padded or not 1 < q.shape[1] <= LONGEST or not (kernel or in_chunks):
        return None
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if lower_bound is None:
        g = compute_g(A_log, a, dt_bias)
    else:
        g = compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    run: RunBlock = kernel or run_chunk
    return run(q, k, v, g, beta, state)
