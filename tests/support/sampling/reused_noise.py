"""Two rounds of two drafted tokens, exactly, whose draws may be shared between them.

A first round that accepts nothing emits one token, and the second round's first draft
stands where the first round's second draft stood. Keyed by position alone, that
position's coin, or its noise, is the one that the first round gave up.
"""

import numpy as np

from support.sampling.enumeration import (
    Array,
    Rule,
    Tables,
    ask,
    chain_distribution,
    continued,
    grouped,
    last_success,
)
from support.sampling.shared_noise import shared_noise_distribution


def enumerate_two_rounds(
    rule: Rule, tables: Tables, *, same_coin: bool = False, same_noise: bool = False
) -> Array:
    """Return the joint distribution of four tokens, [pairs, vocab**4].

    Args:
        rule: the rule of both rounds.
        tables: of k = 3, so that the second round has its distributions.
        same_coin: the second round's first coin is the first round's second coin.
        same_noise: the second round's first draft is drawn with the noise of the first
            round's second draft.
    """
    first = Tables(tables.target[:3], tables.draft[:2])
    acceptance, distributions = ask(rule, first)
    weights = chain_distribution(first.draft)  # [pairs, drafts]
    odds = rule.counts(acceptance)
    emitted = [
        grouped(weights * odds[..., n], distribution, n)
        for n, distribution in enumerate(distributions)
    ]
    emitted[0] = np.zeros_like(emitted[0])  # goes to the second round
    ended = continued(first.target, emitted)
    distribution = (ended[..., None] * tables.target[3]).reshape(tables.pairs, -1)
    for pair in range(tables.pairs):
        rejected = (weights * odds[..., 0])[pair, :, None] * distributions[0][pair]
        # The first round ends at its first failure, or has all coins fail.
        least = acceptance[pair, :, 1] if rule.counts is last_success else 0.0
        before = _draft_again(tables, pair, same_noise)
        distribution[pair] += _second_round(
            rule,
            _after_one_token(tables, pair),
            rejected,
            before,
            np.asarray(least) if same_coin else None,
        )
    return distribution


def _after_one_token(tables: Tables, pair: int) -> Tables:
    """The distributions of one pair after each first token, as pairs."""
    vocab = tables.vocab

    def shifted(distributions: list[Array]) -> list[Array]:
        return [
            distribution[pair].reshape(vocab, -1, vocab)
            for distribution in distributions[1:]
        ]

    return Tables(shifted(tables.target), shifted(tables.draft))


def _draft_again(tables: Tables, pair: int, same_noise: bool) -> Array:
    """The distribution of the second round's first draft.

    Returns:
        [drafts of the first round, token that it emitted, drafted token].
    """
    vocab = tables.vocab
    distribution = tables.draft[1][pair]  # [first token, second token]
    if not same_noise:
        return np.broadcast_to(distribution, (vocab**2, vocab, vocab))
    both = shared_noise_distribution(distribution[:, None, :], distribution[None, :, :])
    given = np.moveaxis(both, 2, 1)  # [x1, x2, y1, z1]
    odds = distribution[:, :, None, None]
    given = np.where(odds > 0, given / np.where(odds > 0, odds, 1), 0)
    return given.reshape(vocab**2, vocab, vocab)


def _second_round(
    rule: Rule, tables: Tables, mass: Array, first_draft: Array, least: Array | None
) -> Array:
    """The distribution of four tokens, beginning with the first round's correction.

    Args:
        rule: the rule.
        tables: after each token of the first round.
        mass: [drafts of the first round, token that it emitted].
        first_draft: from `_draft_again`.
        least: what the first coin is known to be at least, per draft of the first
            round; None for a fresh coin.
    """
    vocab = tables.vocab
    acceptance, distributions = ask(rule, tables)  # [emitted, drafts, 2]
    second_draft = tables.draft[1]  # [emitted, first draft, second draft]
    weights = first_draft[..., None] * second_draft
    weights = mass[..., None] * weights.reshape(len(mass), vocab, -1)
    coins = np.broadcast_to(acceptance, (len(mass), *acceptance.shape)).copy()
    if least is not None:
        floor = np.broadcast_to(least, len(mass))[:, None, None]
        room = np.where(floor < 1, 1 - floor, 1)
        coins[..., 0] = np.maximum(coins[..., 0] - floor, 0) / room
    odds = rule.counts(coins)
    emitted = [
        grouped((weights * odds[..., n]).sum(0), distribution, n)
        for n, distribution in enumerate(distributions)
    ]
    return continued(tables.target, emitted).reshape(-1)
