"""The gated delta rule in chunks, so that a GPU sees matrix products.

Per head, with decay g_t = exp(log_decay_t), the state S follows
S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T and the output is S_t q_t.
Within a chunk the corrections u_t = beta_t (v_t - ...) solve a unit lower-triangular
system (the WY form; Yang et al., "Gated Delta Networks", 2024, section 3.3).
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, in float32.

    Args:
        query: Normalised and scaled, [batch, heads, n, dim].
        key: Normalised, [batch, heads, n, dim].
        value: [batch, heads, n, dim].
        log_decay: [batch, heads, n], not positive.
        beta: [batch, heads, n], from 0 to 1.
        state: [batch, heads, value dim, key dim], zero where None.
    """
    batch, heads, n, dim = value.shape
    size = CHUNK if n % CHUNK == 0 else n if n < CHUNK else 1
    if state is None:
        state = value.new_zeros(batch, heads, dim, key.shape[-1])
    parts = (batch, heads, n // size, size)
    query, key, value = (x.reshape(*parts, x.shape[-1]) for x in (query, key, value))
    beta = beta.reshape(*parts, 1)
    total = log_decay.reshape(parts).cumsum(-1)
    # [.., i, j]: the decay between positions j and i of a chunk, zero above j = i.
    lower = torch.ones(size, size, dtype=torch.bool, device=value.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf)
    between = gap.exp()
    system = (beta * (key @ key.transpose(-1, -2)) * between).tril(-1)
    grown = total.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([beta * value, beta * grown * key], -1),
        upper=False,
        unitriangular=True,
    )
    fresh, stale = solved.split([dim, key.shape[-1]], -1)
    inside = (query @ key.transpose(-1, -2)) * between
    left = (total[..., -1:] - total).exp()[..., None] * key
    queries, last = query * grown, total[..., -1].exp()
    outputs = []
    for c in range(n // size):
        update = fresh[:, :, c] - stale[:, :, c] @ state.transpose(-1, -2)
        outputs.append(
            queries[:, :, c] @ state.transpose(-1, -2) + inside[:, :, c] @ update
        )
        state = last[:, :, c, None, None] * state + (
            update.transpose(-1, -2) @ left[:, :, c]
        )
    return torch.cat(outputs, 2), state
