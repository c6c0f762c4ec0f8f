"""Filters on logits before any temperature, in mlx-lm's order, with its definitions.

mlx-lm filters log-probabilities. They differ from logits by one number per row, which
changes a filter's result by rounding only. Filtering logits saves a pass over the
vocabulary. Given log-probabilities, the result is mlx-lm's to the last bit, except for
`top_p` and ties.

A row has the same result to the last bit whether it is filtered alone, with other rows
or with padding. So ties are broken by id, where mlx-lm leaves them to a partition, and
`top_p` adds up probabilities as integers, whose sum does not depend on their order.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.samplers.logits.top_p import nucleus_edge
from mlx_speculation.samplers.sampling import Sampling


def apply_filters(
    logits: mx.array, sampling: Sampling, coins: mx.array | None = None
) -> mx.array:
    """Apply the request's filters to float32 [..., vocab]; dropped tokens get -inf.

    `coins` are XTC's coins of the rows, float32 [...] from [0, 1); None: XTC is off.
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
    """Keep the most probable tokens, up to this share of probability.

    A token stays if all more probable tokens together have less than the share; tokens
    of equal float32 probability are all kept or all dropped. (Holtzman et al., "The
    Curious Case of Neural Text Degeneration", 2020.)

    mlx-lm adds up float32 in sorted order, so results can differ for a token whose sum
    is within rounding of the share.
    """
    probs = mx.softmax(logits, axis=-1)
    return mx.where(probs < nucleus_edge(probs, share), -mx.inf, logits)


def min_p(logits: mx.array, share: float, keep: int = 1) -> mx.array:
    """Drop tokens below `share` times the largest probability; keep at least `keep`."""
    kept = logits >= logits.max(axis=-1, keepdims=True) + math.log(share)
    if keep > 1:
        kept = kept | _largest(logits, keep)
    return mx.where(kept, logits, -mx.inf)


def xtc(
    logits: mx.array, applied: mx.array, threshold: float, special: Sequence[int]
) -> mx.array:
    """Of the tokens more probable than the threshold, keep the least probable only.

    "Exclude top choices" as mlx-lm defines it: probabilities are normalized over the
    tokens that earlier filters have left. `applied`, bool [...], says for each row
    whether its coin applies XTC; mlx-lm has one coin for all rows. Ids in `special`
    stay.
    """
    probs = mx.softmax(logits, axis=-1)
    choices = mx.where(probs > threshold, probs, mx.inf)
    dropped = (probs > choices.min(axis=-1, keepdims=True)) & applied[..., None]
    ids = [token for token in special if token < logits.shape[-1]]
    if ids:
        dropped[..., mx.array(ids)] = False
    return mx.where(dropped, -mx.inf, logits)


def top_k(logits: mx.array, k: int) -> mx.array:
    """Keep the k most probable tokens of each row, the lowest ids among equals."""
    return mx.where(_largest(logits, k), logits, -mx.inf)


def _largest(values: mx.array, k: int) -> mx.array:
    """Return which k values are the largest, bool; the lowest ids among equals."""
    width = values.shape[-1]
    if k >= width:
        return mx.ones(values.shape, dtype=mx.bool_)
    # At index `width - k` a partition has the same value as a sort, in a fifth to a
    # tenth of the time. Its choice among equals can depend on the number of rows.
    edge = mx.partition(values, width - k, axis=-1)[..., width - k, None]
    above = values > edge
    equal = values == edge
    room = k - above.sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
