"""Token-wise rejection and block verification, the rules by which drafts are accepted.

Rejection: each drafted token is accepted or rejected by its own coin. Accept with
min(1, p / q), p and q the probabilities that target and draft give to the token; after
the first rejection draw from the positive part of p - q. Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023, algorithm 1; Chen et al.,
2023.

Block verification: a coin is thrown for every prefix of the draft, and the longest
prefix whose coin passes is accepted. On average it accepts at least as many tokens as
token-wise rejection does. Sun et al., "Block Verification Accelerates Speculative
Decoding", ICLR 2025, algorithm 2. It is equal to rejection, and dearer, where k is 1,
where the draft was chosen without chance, and at temperature 0. Its draws must be keyed
by the round as well as the position (`samplers.noise.round_keys`): how many tokens are
accepted depends on the coins and drafts of every position, those given up included.
Coins have to be independent of all earlier rounds too.
"""

import mlx.core as mx

from mlx_speculation.samplers.rules.probs import Odds, Rule, token_probs


def _token_odds(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> Odds:
    """Return the odds that each drafted token is accepted, once reached.

    A token to which the draft gives no probability is never accepted: it was not drawn
    from these `draft_probs`.
    """
    part = token_probs(target_probs[..., :-1, :], drafted)
    shares = mx.ones(target_probs.shape[:-1], dtype=target_probs.dtype)
    return Odds(part, token_probs(draft, drafted), shares)


def _before_a_failure(passed: mx.array) -> mx.array:
    return mx.cumprod(passed.astype(mx.int32), axis=-1).sum(axis=-1)


def _block_odds(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> Odds:
    """Return h_i of the paper, S_i / (S_i + 1 - p_i) for i from 1 to k, and all p_i.

    The last prefix has p_k itself. Where p_i is 1 the quotient is 1, S_i = 0 included.
    """
    reach = _reach(target_probs, draft, drafted)
    k = draft.shape[-2]
    last = reach[..., k:] if k else reach[..., :0]
    ahead = reach[..., 1:k, None] * target_probs[..., 1:k, :] - draft[..., 1:, :]
    left = mx.maximum(ahead, 0).sum(axis=-1)  # [..., k - 1]
    sure = reach[..., 1:k] >= 1
    part = mx.where(sure, 1, left)
    whole = mx.where(sure, 1, left + (1 - reach[..., 1:k]))
    one = mx.ones_like(last)
    part = mx.concatenate([part, last], axis=-1)
    return Odds(part, mx.concatenate([whole, one], axis=-1), reach)


def _longest_passing(passed: mx.array) -> mx.array:
    """Count the tokens of the longest prefix whose coin has passed; 0: none has."""
    lengths = mx.arange(1, passed.shape[-1] + 1) * passed
    none = mx.zeros((*passed.shape[:-1], 1), dtype=lengths.dtype)
    return mx.concatenate([none, lengths], axis=-1).max(axis=-1)


def _reach(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> mx.array:
    """Return p_i of the paper, i from 0 to k: p_0 = 1, p_i = min(1, p_(i-1) ratio_i).

    It is the probability that at least i tokens are accepted, given the first i
    drafted, averaged over later drafts and all coins: [..., k + 1].
    """
    whole = token_probs(draft, drafted)
    drawn = whole > 0
    part = mx.where(drawn, token_probs(target_probs[..., :-1, :], drafted), 0)
    whole = mx.where(drawn, whole, 1)
    reach = [mx.ones(drafted.shape[:-1], dtype=target_probs.dtype)]
    for index in range(drafted.shape[-1]):
        # Multiplied first: a ratio that overflows, times 0, is no number.
        wanted = reach[-1] * part[..., index] / whole[..., index]
        reach.append(mx.minimum(wanted, 1))
    return mx.stack(reach, axis=-1)


REJECTION = Rule(_token_odds, _before_a_failure)
BLOCK = Rule(_block_odds, _longest_passing)
