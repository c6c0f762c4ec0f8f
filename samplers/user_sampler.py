"""Calls of samplers that draw by themselves: mlx-lm's, and the user's own.

Such a sampler takes log-probabilities [1, vocab] and returns a token id [1]. For a
verify it is called row by row, because a sampler may draw once for all rows that it is
given, as mlx-lm's XTC does, and then they would not be independent. Where each row's
token y_i is drawn from p_i alone, and a drafted token is accepted where it equals y_i,
what is emitted is always the target's own draw: its distribution is the
sampler's.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.sampling import Sampler


def called_on_rows(sampler: Sampler, processed: mx.array) -> mx.array:
    """Return a token of each row, uint32 [rows]; ids below 0 come out huge.

    Args:
        sampler: draws by itself, from a state of its own or mlx's global one.
        processed: logits [rows, vocab].

    Raises:
        InvalidRequestError: it returned something else than one token id.
    """
    log_probs = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
    drawn = [_one(sampler(log_probs[i : i + 1])) for i in range(len(processed))]
    return mx.concatenate(drawn) if len(drawn) > 1 else drawn[0]


def _one(token: Any) -> mx.array:
    fits = isinstance(token, mx.array) and token.size == 1
    if fits and mx.issubdtype(token.dtype, mx.integer):
        one: mx.array = token.reshape(1).astype(mx.uint32)
        return one
    array = isinstance(token, mx.array)
    result = f"{token.dtype}{list(token.shape)}" if array else repr(token)
    raise InvalidRequestError(
        f"The sampler returned {result}, and one token id for log-probabilities [1, "
        "vocab] is needed, such as mx.argmax(log_probs, axis=-1) makes."
    )


def within(
    tokens: mx.array, normals: mx.array, width: int
) -> tuple[mx.array, mx.array]:
    """Return tokens that exist, and normalizers that are NaN where one did not.

    An id without a row in the embedding would be read from outside of it, and the host
    knows the ids only with the round's one read.

    Args:
        tokens: uint32 [rows], of a sampler.
        normals: [rows].
        width: how many ids there are.
    """
    exist = tokens < width
    nan = mx.array(mx.nan, normals.dtype)
    return mx.minimum(tokens, width - 1), mx.where(exist, normals, nan)
