"""Filters on logits before any temperature, in mlx-lm's order, with its definitions.

mlx-lm filters log-probabilities. They differ from logits by one number per row, which
no filter feels but by rounding: log-probabilities give mlx-lm's result to the last bit
(`top_p` says where it differs), and logits save a pass over the vocabulary.

Each row is filtered by itself: together or alone, beside padding or not, it comes out
the same to the last bit. Hence the ties broken by id, where mlx-lm leaves them to a
partition, and the probabilities added up as whole numbers in `top_p`.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.samplers.logits.top_p import nucleus_edge
from mlx_speculation.samplers.sampling import Sampling


def apply_filters(
    logits: mx.array, sampling: Sampling, coins: mx.array | None = None
) -> mx.array:
    """Apply the request's filters.

    Args:
        logits: float32 [..., vocab], before any temperature.
        sampling: the request's options.
        coins: float32 [...] from [0, 1), XTC's for each row; None where XTC is off.

    Returns:
        float32 [..., vocab], -inf where a token was dropped.
    """
    if 0 < sampling.top_p < 1:
        logits = top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = min_p(logits, sampling.min_p, sampling.min_tokens_to_keep)
    if sampling.xtc_probability > 0:
        assert coins is not None
        applied = coins <= sampling.xtc_probability
        special = sampling.xtc_special_tokens
        logits = xtc(logits, applied, sampling.xtc_threshold, special)
    if sampling.top_k > 0:
        logits = top_k(logits, sampling.top_k)
    return logits


def top_p(logits: mx.array, share: float) -> mx.array:
    """Keep the most probable tokens that come first to this share of probability.

    A token stays when those more probable than it have less than the share together;
    tokens of equal probability in float32 stay or go together. (Holtzman et al., "The
    Curious Case of Neural Text Degeneration", 2020.)

    The sums are of whole numbers, see `top_p`. mlx-lm adds up float32 in the sorted
    order, so a token may differ whose sum is within float32's rounding of the share.
    """
    probs = mx.softmax(logits, axis=-1)
    return mx.where(probs < nucleus_edge(probs, share), -mx.inf, logits)


def min_p(logits: mx.array, share: float, keep: int = 1) -> mx.array:
    """Drop tokens less probable than this share of the most probable one's.

    Args:
        logits: float32 [..., vocab].
        share: above 0, to 1.
        keep: how many of the most probable tokens stay at least.
    """
    kept = logits >= logits.max(axis=-1, keepdims=True) + math.log(share)
    if keep > 1:
        kept = kept | _largest(logits, keep)
    return mx.where(kept, logits, -mx.inf)


def xtc(
    logits: mx.array, applied: mx.array, threshold: float, special: Sequence[int]
) -> mx.array:
    """Drop all but the last of the tokens that are more probable than the threshold.

    "Exclude top choices", in mlx-lm's definition: probable among what earlier filters
    have left. mlx-lm tosses one coin for all rows; here each row has its own.

    Args:
        logits: float32 [..., vocab].
        applied: bool [...], whether the coin fell so for the row.
        threshold: from 0 to 0.5.
        special: ids that stay; those past the vocabulary are passed over.
    """
    probs = mx.softmax(logits, axis=-1)
    choices = mx.where(probs > threshold, probs, mx.inf)
    dropped = (probs > choices.min(axis=-1, keepdims=True)) & applied[..., None]
    ids = [token for token in special if token < logits.shape[-1]]
    if ids:
        dropped[..., mx.array(ids)] = False
    return mx.where(dropped, -mx.inf, logits)


def top_k(logits: mx.array, k: int) -> mx.array:
    """Keep the k most probable tokens of each row, the lowest ids among equals.

    mlx-lm leaves the choice among equals to a partition, which may differ with the
    number of rows; a stable order may not. A partition finds the edge in a fifth to a
    tenth of the time of a sort.

    Args:
        logits: float32 [..., vocab].
        k: from 1 on; all are kept where the row has no more.

    Returns:
        float32 [..., vocab], -inf where a token was dropped.
    """
    return mx.where(_largest(logits, k), logits, -mx.inf)


def _largest(values: mx.array, k: int) -> mx.array:
    """Return which k values are the largest, bool; the lowest ids among equals."""
    width = values.shape[-1]
    if k >= width:
        return mx.ones(values.shape, dtype=mx.bool_)
    # A partition puts the one value that is asked for in its place.
    edge = mx.partition(values, width - k, axis=-1)[..., width - k, None]
    above = values > edge
    equal = values == edge
    room = k - above.sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
