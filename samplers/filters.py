"""Filters on log-probabilities, in mlx-lm's order and with its definitions."""

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from mlx_speculation.samplers.sampling import Sampling


def top_k(log_probs: mx.array, k: int) -> mx.array:
    """Keep the k most probable tokens of each row, the lowest ids among equals.

    mlx-lm leaves the choice among equals to a partition, which may differ with the
    number of rows; a stable order may not.

    Args:
        log_probs: float32 [rows, vocab].
        k: from 1 on; all are kept where the row has no more.

    Returns:
        float32 [rows, vocab], -inf where a token was dropped.
    """
    if k >= log_probs.shape[-1]:
        return log_probs
    edge = mx.sort(log_probs, axis=-1)[..., -k, None]
    above = log_probs > edge
    equal = log_probs == edge
    room = k - above.sum(axis=-1, keepdims=True)
    kept = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return mx.where(kept, log_probs, -mx.inf)


def apply_filters(log_probs: mx.array, sampling: Sampling) -> mx.array:
    """Apply the request's filters to untempered log-probabilities [rows, vocab]."""
    if 0 < sampling.top_p < 1:
        log_probs = apply_top_p(log_probs, sampling.top_p)
    if sampling.min_p > 0:
        keep = min(sampling.min_tokens_to_keep, log_probs.shape[-1])
        log_probs = apply_min_p(log_probs, sampling.min_p, keep)
    if sampling.top_k > 0:
        log_probs = top_k(log_probs, sampling.top_k)
    return log_probs
