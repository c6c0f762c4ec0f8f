"""Token-wise rejection: each drafted token is accepted or rejected by its own coin.

Accept with min(1, p / q), p and q the probabilities that target and draft give to the
token; after the first rejection draw from the positive part of p - q. Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1;
Chen et al., 2023. Arguments are those of `samplers.rules.probs`.
"""

import mlx.core as mx

from mlx_speculation.samplers.rules.probs import (
    Verdict,
    check_shape,
    draft_laws,
    law_after,
    passes,
    quotient,
    token_probs,
)


def acceptance_probs(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return the probability that each drafted token is accepted, once reached.

    A token that the draft's law cannot draw has 0: such a law is not the one that the
    token was drawn from.

    Returns:
        [..., k].

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_laws(target_probs, draft_probs, drafted)
    return quotient(*_token_odds(target_probs, draft, drafted))


def next_law(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    accepted: mx.array,
) -> mx.array:
    """Return the law of the token after `accepted` [...] drafted ones, [..., vocab]."""
    draft = draft_laws(target_probs, draft_probs, drafted)
    return law_after(target_probs, draft, _whole_shares(target_probs), accepted)


def verify(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    coins: mx.array,
) -> Verdict:
    """Decide how many drafted tokens are accepted, and what law comes next.

    Args:
        target_probs: [..., k + 1, vocab].
        draft_probs: [..., k, vocab], or None for tokens chosen without chance.
        drafted: integer [..., k].
        coins: [..., k], uniform in [0, 1), independent of the drafted tokens.

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_laws(target_probs, draft_probs, drafted)
    part, whole = _token_odds(target_probs, draft, drafted)
    check_shape("coins", coins, drafted.shape)
    passed = passes(coins, part, whole).astype(mx.int32)
    accepted = mx.cumprod(passed, axis=-1).sum(axis=-1).astype(mx.int32)
    following = law_after(target_probs, draft, _whole_shares(target_probs), accepted)
    return Verdict(accepted, following, quotient(part, whole))


def _token_odds(
    target_probs: mx.array, draft: mx.array, drafted: mx.array
) -> tuple[mx.array, mx.array]:
    part = token_probs(target_probs[..., :-1, :], drafted)
    return part, token_probs(draft, drafted)


def _whole_shares(target_probs: mx.array) -> mx.array:
    return mx.ones(target_probs.shape[:-1], dtype=target_probs.dtype)
