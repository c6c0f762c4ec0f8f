"""What the acceptance rules share: laws as rows of probabilities.

A law is a row of probabilities over token ids. Axes: `[..., k, vocab]`, with any batch
axes in front. A rule gets k + 1 laws of the target (`target_probs`, the law after each
verify row), k laws of the draft (`draft_probs`), the drafted tokens, and uniform coins
from [0, 1). All functions are lazy, read nothing on the host, and keep the dtype of
the laws: float32 in a round, float64 in the proofs.

`draft_probs` must be exactly the laws that the tokens were drawn from, after the
draft's own temperature and filters. None says that they were chosen without chance.

Rows of a batch may have drafts of unequal length. Where a draft has ended, its row of
`draft_probs` is all zeros; without `draft_probs` the drafted id is -1. That token is
never accepted, and the target's own law follows the accepted tokens before it. The
decision to end a draft may use the tokens before, and the law of the next one, but
never the next token itself.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What a rule decided.

    Attributes:
        accepted: how many drafted tokens are accepted, int32 [...].
        next_law: the law of the token after them, [..., vocab]: of the correction, or
            of the bonus.
        acceptance: what each coin was compared with, [..., k].
    """

    accepted: mx.array
    next_law: mx.array
    acceptance: mx.array


def draft_laws(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return the laws of the draft, one-hot where it was chosen without chance.

    Args:
        target_probs: [..., k + 1, vocab].
        draft_probs: [..., k, vocab], or None.
        drafted: integer [..., k].

    Returns:
        [..., k, vocab].

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    batch, k = drafted.shape[:-1], drafted.shape[-1]
    vocab = target_probs.shape[-1]
    check_shape("target_probs", target_probs, (*batch, k + 1, vocab))
    if draft_probs is None:
        one_hot = mx.arange(vocab) == drafted[..., None]
        return one_hot.astype(target_probs.dtype)
    check_shape("draft_probs", draft_probs, (*batch, k, vocab))
    return draft_probs


def token_probs(laws: mx.array, tokens: mx.array) -> mx.array:
    """Return the probability of one token per law; 0 for an id that no law has.

    Args:
        laws: [..., k, vocab].
        tokens: integer [..., k].

    Returns:
        [..., k].
    """
    known = tokens.astype(mx.uint32) < laws.shape[-1]  # -1 becomes a large number
    ids = mx.where(known, tokens, 0)[..., None]
    probs = mx.take_along_axis(laws, ids, axis=-1)[..., 0]
    return mx.where(known, probs, 0)


def quotient(part: mx.array, whole: mx.array) -> mx.array:
    """Return min(1, part / whole), and 0 where `whole` is 0."""
    return mx.where(whole > 0, mx.minimum(part / whole, 1), 0)


def passes(coins: mx.array, part: mx.array, whole: mx.array) -> mx.array:
    """Compare coins with `quotient(part, whole)`, without the division.

    A coin of 0 passes nothing that has no probability, and every coin passes where the
    quotient is 1: a product with a number below 1 rounds to below `whole`. A NaN, and
    a `whole` of 0, pass nothing.
    """
    return (coins * whole < part) & (whole > 0)


def row(laws: mx.array, index: mx.array) -> mx.array:
    """Return one law of each batch row: [..., n, vocab], [...] to [..., vocab]."""
    n, vocab = laws.shape[-2:]
    flat = laws.reshape(-1, vocab)
    first = mx.arange(0, flat.shape[0], n).reshape(index.shape)
    return mx.take(flat, first + index, axis=0)  # copies rows; along an axis, values


def residual(target_law: mx.array, draft_law: mx.array, share: mx.array) -> mx.array:
    """Return the normalized positive part of `share * target_law - draft_law`.

    Where nothing is left, which only rounding can bring about, it is the target's law.

    Args:
        target_law: [..., vocab].
        draft_law: [..., vocab].
        share: [...].

    Returns:
        [..., vocab].
    """
    left = mx.maximum(share[..., None] * target_law - draft_law, 0)
    mass = left.sum(axis=-1, keepdims=True)
    return mx.where(mass > 0, left / mass, target_law)


def law_after(
    target_probs: mx.array, draft: mx.array, shares: mx.array, accepted: mx.array
) -> mx.array:
    """Return the law of the token that follows the accepted ones.

    Args:
        target_probs: [..., k + 1, vocab].
        draft: [..., k, vocab], from `draft_laws`.
        shares: [..., k + 1], what each target law is multiplied with.
        accepted: integer [...], from 0 to k.

    Returns:
        [..., vocab]: row k of the target after k, else the residual.
    """
    target_law = row(target_probs, accepted)
    k = draft.shape[-2]
    if k == 0:
        return target_law
    share = mx.take_along_axis(shares, accepted[..., None], axis=-1)[..., 0]
    draft_law = row(draft, mx.minimum(accepted, k - 1))
    left = residual(target_law, draft_law, share)
    return mx.where((accepted < k)[..., None], left, target_law)


def draw(law: mx.array, noise: mx.array) -> mx.array:
    """Draw one token per law: the largest of log-probability plus Gumbel noise.

    It is what keyed choice does with its noise. A token without probability is never
    drawn. Laws need not be normalized.

    Args:
        law: [..., vocab].
        noise: float32 [..., vocab], drawn for this end alone.

    Returns:
        uint32 [...].
    """
    scores = mx.log(law) + noise
    return mx.argmax(mx.where(law > 0, scores, -mx.inf), axis=-1)


def check_shape(name: str, array: mx.array, shape: tuple[int, ...]) -> None:
    """Refuse an array whose shape does not fit the others'."""
    if array.shape != shape:
        raise InvalidRequestError(
            f"{name} has the shape {array.shape}, and {shape} is needed: k drafted "
            "tokens and coins, k laws of the draft, k + 1 laws of the target."
        )
