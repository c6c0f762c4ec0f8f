"""Probabilities for acceptance rules: distributions as rows.

Axes: `[..., k, vocab]`, with any batch axes in front. A rule gets k + 1 distributions
of the target (`target_probs`, after each verify row), k of the draft (`draft_probs`),
the drafted tokens, and uniform coins from [0, 1). All functions are lazy, read nothing
on the host, and keep the dtype of the probabilities: float32 in a round, float64 in
the proofs.

`draft_probs` must be exactly what the tokens were drawn from, after the draft's own
temperature and filters. None says that they were chosen without chance.

Rows of a batch may have drafts of unequal length. Where a draft has ended, its row of
`draft_probs` is all zeros; without `draft_probs` the drafted id is -1. That token is
never accepted, and the target's own distribution follows the accepted tokens before it.
The decision to end a draft may use the tokens before, and the distribution of the next
one, but never the next token itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class RuleOutcome:
    """Decision of a rule."""

    accepted: mx.array  # how many drafted tokens are accepted, int32 [...]
    # The distribution of the token after them, [..., vocab]: of the correction, or of
    # the bonus.
    next_probs: mx.array
    acceptance: mx.array  # what each coin was compared with, [..., k]


@dataclass(frozen=True, slots=True, eq=False)
class Odds:
    """Odds of accepting k drafted tokens, and the mass taken off the target's rows."""

    part: mx.array  # [..., k]; a coin passes below `quotient(part, whole)`
    whole: mx.array  # [..., k]
    # [..., k + 1], what each row of the target is multiplied with before the draft's is
    # subtracted.
    shares: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An acceptance rule: the accepted tokens, from probabilities and coins."""

    # From target, draft (see `draft_distributions`) and drafted
    odds: Callable[[mx.array, mx.array, mx.array], Odds]
    # How many are accepted, integer [...], by which coins have passed, bool [..., k]
    count: Callable[[mx.array], mx.array]

    def verify(
        self,
        target_probs: mx.array,  # [..., k + 1, vocab]
        # [..., k, vocab], or None for tokens chosen without chance
        draft_probs: mx.array | None,
        drafted: mx.array,  # integer [..., k]
        coins: mx.array,  # [..., k], uniform in [0, 1), independent of the drafted
    ) -> RuleOutcome:
        """Decide how many drafted tokens are accepted, and what follows them.

        Raises:
            InvalidRequestError: the shapes do not fit.
        """
        draft = draft_distributions(target_probs, draft_probs, drafted)
        odds = self.odds(target_probs, draft, drafted)
        check_shape("coins", coins, drafted.shape)
        accepted = self.count(passes(coins, odds.part, odds.whole)).astype(mx.int32)
        rest = probs_after(target_probs, draft, odds.shares, accepted)
        return RuleOutcome(accepted, rest, quotient(odds.part, odds.whole))


def draft_distributions(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return the draft's distributions, one-hot for tokens chosen without chance.

    Shapes are those of `Rule.verify`; those that do not fit are refused.
    """
    batch, k = drafted.shape[:-1], drafted.shape[-1]
    vocab = target_probs.shape[-1]
    check_shape("target_probs", target_probs, (*batch, k + 1, vocab))
    if draft_probs is None:
        one_hot = mx.arange(vocab) == drafted[..., None]
        return one_hot.astype(target_probs.dtype)
    check_shape("draft_probs", draft_probs, (*batch, k, vocab))
    return draft_probs


def token_probs(probs: mx.array, tokens: mx.array) -> mx.array:
    """Return the probability of one token per row; 0 for an id that no row has.

    [..., k, vocab] and integer [..., k] to [..., k].
    """
    known = tokens.astype(mx.uint32) < probs.shape[-1]  # -1 becomes a large number
    ids = mx.where(known, tokens, 0)[..., None]
    result = mx.take_along_axis(probs, ids, axis=-1)[..., 0]
    return mx.where(known, result, 0)


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


def row(probs: mx.array, index: mx.array) -> mx.array:
    """Pick one row of each batch entry: [..., n, vocab], [...] to [..., vocab]."""
    n, vocab = probs.shape[-2:]
    flat = probs.reshape(-1, vocab)
    first = mx.arange(0, flat.shape[0], n).reshape(index.shape)
    return mx.take(flat, first + index, axis=0)  # copies rows; along an axis, values


def residual(target_row: mx.array, draft_row: mx.array, share: mx.array) -> mx.array:
    """Return the normalized positive part of `share * target_row - draft_row`.

    Where nothing is left, which only rounding can bring about, it is the target's row.
    [..., vocab] twice and [...] to [..., vocab].
    """
    left = mx.maximum(share[..., None] * target_row - draft_row, 0)
    mass = left.sum(axis=-1, keepdims=True)
    return mx.where(mass > 0, left / mass, target_row)


def probs_after(
    target_probs: mx.array, draft: mx.array, shares: mx.array, accepted: mx.array
) -> mx.array:
    """Return the distribution of the token that follows the accepted ones.

    Args:
        target_probs: [..., k + 1, vocab].
        draft: [..., k, vocab], from `draft_distributions`.
        shares: [..., k + 1], what each row of the target is multiplied with.
        accepted: integer [...], from 0 to k.

    Returns:
        [..., vocab]: row k of the target after k, else the residual.
    """
    target_row = row(target_probs, accepted)
    k = draft.shape[-2]
    if k == 0:
        return target_row
    share = mx.take_along_axis(shares, accepted[..., None], axis=-1)[..., 0]
    draft_row = row(draft, mx.minimum(accepted, k - 1))
    left = residual(target_row, draft_row, share)
    return mx.where((accepted < k)[..., None], left, target_row)


def draw(probs: mx.array, noise: mx.array) -> mx.array:
    """Draw one token per row: the largest of log-probability plus Gumbel noise.

    It is what keyed choice does with its noise. A token without probability is never
    drawn. Rows need not be normalized. [..., vocab] twice to uint32 [...]; the noise is
    drawn for this end alone.
    """
    scores = mx.log(probs) + noise
    return mx.argmax(mx.where(probs > 0, scores, -mx.inf), axis=-1)


def check_shape(name: str, array: mx.array, shape: tuple[int, ...]) -> None:
    """Refuse an array whose shape does not fit the others'."""
    if array.shape != shape:
        raise InvalidRequestError(
            f"{name} has the shape {array.shape}, and {shape} is needed: k drafted "
            "tokens and coins, k rows of draft_probs, k + 1 of target_probs."
        )
