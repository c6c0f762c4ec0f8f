"""Token-wise rejection: each drafted token is accepted or rejected by its own coin.

Accept with min(1, p / q), p and q the probabilities that target and draft give to the
token; after the first rejection draw from the positive part of p - q. Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1;
Chen et al., 2023. Arguments are those of `samplers.rules.probs`.
"""

import mlx.core as mx

from mlx_speculation.samplers.rules.probs import Odds, RuleOutcome, judged, token_probs


def odds(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> Odds:
    """Return the odds that each drafted token is accepted, once reached.

    A token to which the draft gives no probability is never accepted: it was not drawn
    from these `draft_probs`.
    """
    part = token_probs(target_probs[..., :-1, :], drafted)
    shares = mx.ones(target_probs.shape[:-1], dtype=target_probs.dtype)
    return Odds(part, token_probs(draft, drafted), shares)


def verify(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    coins: mx.array,
) -> RuleOutcome:
    """Decide how many drafted tokens are accepted, and what follows; see `judged`."""
    return judged(odds, _before_a_failure, target_probs, draft_probs, drafted, coins)


def _before_a_failure(passed: mx.array) -> mx.array:
    return mx.cumprod(passed.astype(mx.int32), axis=-1).sum(axis=-1)
