"""Joint distribution of two tokens drawn with the same Gumbel noise, in closed form."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def shared_noise_distribution(first: Array, second: Array) -> Array:
    """Return the probability that one noise draws x from the first, y from the second.

    The first distribution is p, the second q.
    E_z = exp(-noise_z) is exponential, and x is drawn from p if E_x / p_x is the
    smallest. For x = y the probability is 1 / sum over z of max(p_z / p_x, q_z / q_x).
    For x != y, with t = E_y / E_x, it is the integral over t from p_y / p_x to
    q_y / q_x of (1 + t + sum over other z of max(p_z / p_x, t q_z / q_y))**-2, or 0 if
    the first bound is larger. The result is [..., vocab, vocab], with x on the first
    of these axes.
    """
    first, second = np.broadcast_arrays(first, second)
    vocab = first.shape[-1]
    joint = np.zeros((*first.shape, vocab))
    with np.errstate(all="ignore"):  # divisions by zero: replaced below
        for x in range(vocab):
            for y in range(vocab):
                p, q = first / first[..., x, None], second / second[..., y, None]
                if x == y:
                    joint[..., x, x] = 1 / np.maximum(p, q).sum(-1)
                    continue
                others = [z for z in range(vocab) if z not in (x, y)]
                low, high = p[..., y], 1 / q[..., x]
                area = _integral(p[..., others], q[..., others], low, high)
                joint[..., x, y] = np.where(high > low, area, 0)
    impossible = (first[..., :, None] == 0) | (second[..., None, :] == 0)
    return np.where(impossible, 0, joint)


def _integral(flat: Array, steep: Array, low: Array, high: Array) -> Array:
    """Integrate (1 + t + sum of max(flat, t steep))**-2 over t, the sums on axis -1."""
    turns = np.where(steep > 0, flat / steep, np.inf)
    turns = np.clip(turns, low[..., None], high[..., None])
    edges = np.sort(np.concatenate([low[..., None], turns, high[..., None]], -1), -1)
    total = np.zeros_like(low)
    for start, stop in zip(
        np.moveaxis(edges[..., :-1], -1, 0),
        np.moveaxis(edges[..., 1:], -1, 0),
        strict=True,
    ):
        middle = np.where(np.isinf(stop), 2 * start + 1, (start + stop) / 2)[..., None]
        rising = steep * middle > flat
        slope = 1 + np.where(rising, steep, 0).sum(-1)
        level = 1 + np.where(rising, 0, flat).sum(-1)
        area = (1 / (level + slope * start) - 1 / (level + slope * stop)) / slope
        total += np.where(stop > start, area, 0)
    return total
