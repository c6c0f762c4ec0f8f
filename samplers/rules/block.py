"""Block verification: the drafted tokens are judged together.

A coin is thrown for every prefix of the draft, and the longest prefix whose coin
passes is accepted. On average it accepts at least as many tokens as token-wise
rejection does. Sun et al., "Block Verification Accelerates Speculative Decoding",
ICLR 2025, algorithm 2. Arguments are those of `samplers.rules.probs`.

Equal to token-wise rejection, and dearer, where k is 1, where the draft was chosen
without chance, and at temperature 0. Its draws must be keyed by the round as well as
the position (`samplers.noise.round_keys`): how many tokens are accepted depends on the
coins and drafts of every position, those given up included.
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


def reach_probs(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return p_i of the paper, i from 0 to k: p_0 = 1, p_i = min(1, p_(i-1) ratio_i).

    It is the probability that at least i tokens are accepted, given the first i
    drafted, averaged over later drafts and all coins.

    Returns:
        [..., k + 1].

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    return _reach(
        target_probs, draft_distributions(target_probs, draft_probs, drafted), drafted
    )


def acceptance_probs(
    target_probs: mx.array, draft_probs: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return h_i of the paper, i from 1 to k: with what the coins are compared.

    Returns:
        [..., k].

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_distributions(target_probs, draft_probs, drafted)
    reach = _reach(target_probs, draft, drafted)
    return quotient(*_prefix_odds(target_probs, draft, reach))


def next_probs(
    target_probs: mx.array,
    draft_probs: mx.array | None,
    drafted: mx.array,
    accepted: mx.array,
) -> mx.array:
    """Return the distribution after `accepted` [...] drafted tokens, [..., vocab]."""
    draft = draft_distributions(target_probs, draft_probs, drafted)
    reach = _reach(target_probs, draft, drafted)
    return probs_after(target_probs, draft, reach, accepted)


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
        coins: [..., k], uniform in [0, 1), independent of the drafted tokens and of
            all earlier rounds.

    Raises:
        InvalidRequestError: the shapes do not fit.
    """
    draft = draft_distributions(target_probs, draft_probs, drafted)
    reach = _reach(target_probs, draft, drafted)
    part, whole = _prefix_odds(target_probs, draft, reach)
    check_shape("coins", coins, drafted.shape)
    passed = passes(coins, part, whole)
    lengths = mx.arange(1, drafted.shape[-1] + 1) * passed
    # The empty prefix passes always; it also makes the maximum of k = 0.
    none = mx.zeros((*drafted.shape[:-1], 1), dtype=lengths.dtype)
    accepted = mx.concatenate([none, lengths], axis=-1).max(axis=-1)
    following = probs_after(target_probs, draft, reach, accepted)
    return RuleOutcome(accepted.astype(mx.int32), following, quotient(part, whole))


def _reach(target_probs: mx.array, draft: mx.array, drafted: mx.array) -> mx.array:
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


def _prefix_odds(
    target_probs: mx.array, draft: mx.array, reach: mx.array
) -> tuple[mx.array, mx.array]:
    """Return S_i and S_i + 1 - p_i, whose quotient is h_i, both [..., k].

    The last prefix has p_k itself. Where p_i is 1 the quotient is 1, S_i = 0 included.
    """
    k = draft.shape[-2]
    last = reach[..., k:] if k else reach[..., :0]
    ahead = reach[..., 1:k, None] * target_probs[..., 1:k, :] - draft[..., 1:, :]
    left = mx.maximum(ahead, 0).sum(axis=-1)  # [..., k - 1]
    sure = reach[..., 1:k] >= 1
    part = mx.where(sure, 1, left)
    whole = mx.where(sure, 1, left + (1 - reach[..., 1:k]))
    one = mx.ones_like(last)
    return (
        mx.concatenate([part, last], axis=-1),
        mx.concatenate([whole, one], axis=-1),
    )
