"""Acceptance rules: token-wise rejection and block verification.

Token-wise rejection throws a coin for each drafted token. It accepts the token with
probability min(1, p / q), where p and q are the probabilities that target and draft
give to it. After the first rejection it draws the next token from the positive part of
p - q. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023, algorithm 1; Chen et al., 2023.

Block verification throws a coin for every prefix of the draft, and accepts the longest
prefix whose coin passes. On average it accepts at least as many tokens as token-wise
rejection. If k is 1, if the draft was chosen without noise, or at temperature 0, both
rules give the same result, and rejection costs less. Sun et al., "Block Verification
Accelerates Speculative Decoding", ICLR 2025, algorithm 2.

The draws of both rules are keyed by round and position, for the reason that
`samplers.noise.round_keys` states.
"""

import mlx.core as mx

from mlx_speculation.samplers.rules.probs import Odds, Rule, token_probs


def _token_odds(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> Odds:
    """Return the odds of each drafted token, given that all before it are accepted."""
    # A token whose probability in the draft is 0 was not drawn from it; `passes` then
    # lets no coin pass.
    part = token_probs(target_probs[..., :-1, :], drafted)
    shares = mx.ones(target_probs.shape[:-1], dtype=target_probs.dtype)
    return Odds(part, token_probs(draft, drafted), shares)


def _before_a_failure(passed: mx.array) -> mx.array:
    return mx.cumprod(passed.astype(mx.int32), axis=-1).sum(axis=-1)


def _block_odds(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> Odds:
    """Return h_i of the paper for i from 1 to k, and all p_i.

    h_k is p_k, and the others are S_i / (S_i + 1 - p_i). If p_i is 1, h_i is 1 too,
    even if S_i is 0.
    """
    reach = _reach(target_probs, draft, drafted)
    k = draft.shape[-2]
    last = reach[..., k:] if k else reach[..., :0]
    ahead = reach[..., 1:k, None] * target_probs[..., 1:k, :] - draft[..., 1:, :]
    left = mx.maximum(ahead, 0).sum(axis=-1)  # S_i, [..., k - 1]
    sure = reach[..., 1:k] >= 1
    part = mx.where(sure, 1, left)
    whole = mx.where(sure, 1, left + (1 - reach[..., 1:k]))
    one = mx.ones_like(last)
    part = mx.concatenate([part, last], axis=-1)
    return Odds(part, mx.concatenate([whole, one], axis=-1), reach)


def _longest_passing(passed: mx.array) -> mx.array:
    """Return the length of the longest prefix whose coin has passed; 0: none has."""
    lengths = mx.arange(1, passed.shape[-1] + 1) * passed
    none = mx.zeros((*passed.shape[:-1], 1), dtype=lengths.dtype)
    return mx.concatenate([none, lengths], axis=-1).max(axis=-1)


def _reach(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> mx.array:
    """Return p_i of the paper, i from 0 to k: p_0 = 1, p_i = min(1, p_(i-1) ratio_i).

    p_i is the probability that at least i tokens are accepted, given the first i
    drafted ones, averaged over later drafted tokens and all coins: [..., k + 1].
    """
    whole = token_probs(draft, drafted)
    drawn = whole > 0
    part = mx.where(drawn, token_probs(target_probs[..., :-1, :], drafted), 0)
    whole = mx.where(drawn, whole, 1)
    reach = [mx.ones(drafted.shape[:-1], dtype=target_probs.dtype)]
    for index in range(drafted.shape[-1]):
        # Multiply before dividing: a ratio that overflows, times 0, would be NaN.
        wanted = reach[-1] * part[..., index] / whole[..., index]
        reach.append(mx.minimum(wanted, 1))
    return mx.stack(reach, axis=-1)


REJECTION = Rule(_token_odds, _before_a_failure)
BLOCK = Rule(_block_odds, _longest_passing)
