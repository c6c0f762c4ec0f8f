"""Probabilities for acceptance rules: distributions as rows.

Axes: `[..., k, vocab]`, with any batch axes in front. A rule gets k + 1 distributions
of the target (`target_probs`, one for each row), k of the draft (`draft_probs`), the
drafted tokens, and uniform coins from [0, 1). All functions are lazy and keep the dtype
of the probabilities: float32 in a round, float64 in tests.

`draft_probs` must be exactly the distributions that the tokens were drawn from: those
after the draft's temperature and filters. None: the tokens were chosen without noise.

Rows of a batch can have drafts of unequal length. After the end of a draft, rows of
`draft_probs` are all zeros; without `draft_probs` the drafted id is -1. Such padding is
never accepted. If all tokens before it are accepted, the next token has the target's
own distribution. The decision to end a draft may depend on the earlier tokens and the
distribution of the next token, but not on the next token itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class RuleOutcome:
    """Decision of a rule."""

    accepted: mx.array  # how many drafted tokens are accepted, int32 [...]
    # The distribution of the correction or bonus, [..., vocab]
    next_probs: mx.array
    acceptance: mx.array  # the value that each coin was compared with, [..., k]


@dataclass(frozen=True, slots=True, eq=False)
class Odds:
    """Probabilities of accepting k drafted tokens, and factors for the residual."""

    part: mx.array  # [..., k]; a coin below `quotient(part, whole)` passes
    whole: mx.array  # [..., k]
    # [..., k + 1], the factor of each target row in the residual, before the draft's
    # row is subtracted
    shares: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An acceptance rule: the accepted tokens, from probabilities and coins."""

    # (target_probs, draft from `draft_distributions`, drafted) -> odds
    odds: Callable[[mx.array, mx.array, mx.array], Odds]
    # (which coins have passed, bool [..., k]) -> accepted tokens, integer [...]
    count: Callable[[mx.array], mx.array]

    def verify(
        self,
        target_probs: mx.array,  # [..., k + 1, vocab]
        # [..., k, vocab], or None for tokens chosen without noise
        draft_probs: mx.array | None,
        drafted: mx.array,  # integer [..., k]
        coins: mx.array,  # [..., k], uniform in [0, 1), independent of `drafted`
    ) -> RuleOutcome:
        """Decide how many tokens are accepted, and the distribution of the next one.

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
    """Return the draft's distributions, one-hot for tokens chosen without noise."""
    batch, k = drafted.shape[:-1], drafted.shape[-1]
    vocab = target_probs.shape[-1]
    check_shape("target_probs", target_probs, (*batch, k + 1, vocab))
    if draft_probs is None:
        one_hot = mx.arange(vocab) == drafted[..., None]
        return one_hot.astype(target_probs.dtype)
    check_shape("draft_probs", draft_probs, (*batch, k, vocab))
    return draft_probs


def token_probs(probs: mx.array, tokens: mx.array) -> mx.array:
    """Return the probability [..., k] of each token; 0 for an id out of range."""
    known = tokens.astype(mx.uint32) < probs.shape[-1]  # -1 becomes a large number
    ids = mx.where(known, tokens, 0)[..., None]
    result = mx.take_along_axis(probs, ids, axis=-1)[..., 0]
    return mx.where(known, result, 0)


def quotient(part: mx.array, whole: mx.array) -> mx.array:
    """Return min(1, part / whole), and 0 where `whole` is 0."""
    return mx.where(whole > 0, mx.minimum(part / whole, 1), 0)


def passes(coins: mx.array, part: mx.array, whole: mx.array) -> mx.array:
    """Compare coins with `quotient(part, whole)`, without the division.

    If `part` is 0, not even a coin of 0 passes. If the quotient is 1, every coin
    passes: coins are below 1, so `coins * whole` rounds to less than `whole`. No coin
    passes if a value is NaN, or if `whole` is 0.
    """
    return (coins * whole < part) & (whole > 0)


def row(probs: mx.array, index: mx.array) -> mx.array:
    """Pick one row of each batch entry: [..., n, vocab], [...] to [..., vocab]."""
    n, vocab = probs.shape[-2:]
    flat = probs.reshape(-1, vocab)
    first = mx.arange(0, flat.shape[0], n).reshape(index.shape)
    return mx.take(flat, first + index, axis=0)  # copies rows as a whole


def residual(target_row: mx.array, draft_row: mx.array, share: mx.array) -> mx.array:
    """Return the normalized positive part of `share * target_row - draft_row`.

    If nothing is positive, which only rounding can cause, return the target's row. The
    rows and the result are [..., vocab], and `share` is [...].
    """
    left = mx.maximum(share[..., None] * target_row - draft_row, 0)
    mass = left.sum(axis=-1, keepdims=True)
    return mx.where(mass > 0, left / mass, target_row)


def probs_after(
    target_probs: mx.array, draft: mx.array, shares: mx.array, accepted: mx.array
) -> mx.array:
    """Return the distribution [..., vocab] of the token that follows the accepted ones.

    It is the target's row k if all k are accepted, else the residual. `accepted` is
    integer [...], from 0 to k; for `shares` see `Odds`.
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

    Both arguments are [..., vocab], and the result is uint32 [...]. A token of
    probability 0 is never drawn. Rows need not be normalized. The noise must not be
    used for anything else.
    """
    scores = mx.log(probs) + noise
    return mx.argmax(mx.where(probs > 0, scores, -mx.inf), axis=-1)


def check_shape(name: str, array: mx.array, shape: tuple[int, ...]) -> None:
    """Refuse an array that does not have this shape."""
    if array.shape != shape:
        raise InvalidRequestError(
            f"{name} has the shape {array.shape}, and {shape} is needed: k drafted "
            "tokens and coins, k rows of draft_probs, k + 1 of target_probs."
        )
