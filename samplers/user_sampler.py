"""Calls of samplers that draw by themselves: mlx-lm's, and the user's own.

Such a sampler takes log-probabilities [1, vocab] and returns a token id [1]. A round
calls it row by row: given several rows, it might draw once for all of them, as mlx-lm's
XTC does. Each row's token is drawn from that row alone, and a drafted token is accepted
if it equals the row's token. So the emitted tokens have the sampler's distribution.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.sampling import Sampler


def called_on_rows(sampler: Sampler, processed: mx.array) -> mx.array:
    """Return a token for each row of logits [rows, vocab], uint32 [rows].

    Raises:
        InvalidRequestError: the sampler did not return one token id.
    """
    log_probs = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
    drawn = [_one(sampler(log_probs[i : i + 1])) for i in range(len(processed))]
    return mx.concatenate(drawn) if len(drawn) > 1 else drawn[0]


def _one(token: Any) -> mx.array:
    fits = isinstance(token, mx.array) and token.size == 1
    if fits and mx.issubdtype(token.dtype, mx.integer):
        # A negative id becomes a huge one.
        one: mx.array = token.reshape(1).astype(mx.uint32)
        return one
    array = isinstance(token, mx.array)
    result = f"{token.dtype}{list(token.shape)}" if array else repr(token)
    raise InvalidRequestError(
        f"The sampler returned {result}, but has to return one token id for "
        "log-probabilities [1, vocab], as mx.argmax(log_probs, axis=-1) does."
    )


def within(
    tokens: mx.array, normals: mx.array, width: int
) -> tuple[mx.array, mx.array]:
    """Limit ids [rows] to `width` - 1; for changed ids, set the normalizers to NaN.

    A NaN becomes a NonFiniteLogitsError. Without the limit, the embedding would read
    out of bounds before that.
    """
    exist = tokens < width
    nan = mx.array(mx.nan, normals.dtype)
    return mx.minimum(tokens, width - 1), mx.where(exist, normals, nan)
