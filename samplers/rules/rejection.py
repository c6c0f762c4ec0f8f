"""Token-wise rejection: each drafted token is accepted or rejected by its own coin.

Accept with min(1, p / q), p and q the probabilities that target and draft give to the
token; after the first rejection draw from the positive part of p - q. Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1;
Chen et al., 2023. Arguments are those of `samplers.rules.probs`.
"""

import mlx.core as mx

from mlx_speculation.samplers.rules.probs import (
    RuleOutcome,
    check_shape,
    draft_distributions,
    passes,
    probs_after,
    quotient,
    token_probs,
)


def acceptance_probs(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return the probability that each drafted token is accepted, once reached.

    A token to which the draft gives no probability has 0: it was not drawn from these
    `draft_probs`.

    Returns:
        [..., k].

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_distributions(target_probs, draft_probs, drafted)
    return quotient(*_token_odds(target_probs, draft, drafted))


def next_probs(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    accepted: mx.array,
) -> mx.array:
    """Return the distribution after `accepted` [...] drafted tokens, [..., vocab]."""
    draft = draft_distributions(target_probs, draft_probs, drafted)
    return probs_after(target_probs, draft, _whole_shares(target_probs), accepted)


def verify(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    coins: mx.array,
) -> RuleOutcome:
    """Decide how many drafted tokens are accepted, and what follows them.

    Args:
        target_probs: [..., k + 1, vocab].
        draft_probs: [..., k, vocab], or None for tokens chosen without chance.
        drafted: integer [..., k].
        coins: [..., k], uniform in [0, 1), independent of the drafted tokens.

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_distributions(target_probs, draft_probs, drafted)
    part, whole = _token_odds(target_probs, draft, drafted)
    check_shape("coins", coins, drafted.shape)
    passed = passes(coins, part, whole).astype(mx.int32)
    accepted = mx.cumprod(passed, axis=-1).sum(axis=-1).astype(mx.int32)
    following = probs_after(target_probs, draft, _whole_shares(target_probs), accepted)
    return RuleOutcome(accepted, following, quotient(part, whole))


def _token_odds(
    target_probs: mx.array, draft: mx.array, drafted: mx.array
) -> tuple[mx.array, mx.array]:
    part = token_probs(target_probs[..., :-1, :], drafted)
    return part, token_probs(draft, drafted)


def _whole_shares(target_probs: mx.array) -> mx.array:
    return mx.ones(target_probs.shape[:-1], dtype=target_probs.dtype)
