"""Exact distribution of two rounds of two drafted tokens.

If the first round accepts nothing, it emits one token. The first draft token of the
second round then has the position of the first round's second draft token.
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
)


def enumerate_two_rounds(rule: Rule, tables: Tables) -> Array:
    """Return the joint distribution of four tokens, [pairs, vocab**4].

    The tables have three draft distributions. The first round uses the first two, the
    second round the last two.
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
        after = _after_one_token(tables, pair)
        distribution[pair] += _second_round(rule, after, rejected)
    return distribution


def _after_one_token(tables: Tables, pair: int) -> Tables:
    """Return the tables of a pair after its first token.

    They have a pair for each token that can be the first.
    """
    vocab = tables.vocab

    def shifted(distributions: list[Array]) -> list[Array]:
        return [
            distribution[pair].reshape(vocab, -1, vocab)
            for distribution in distributions[1:]
        ]

    return Tables(shifted(tables.target), shifted(tables.draft))


def _second_round(rule: Rule, tables: Tables, mass: Array) -> Array:
    """Return the part of the distribution in which the first round emits one token.

    `mass` is [drafts of the first round, token that it emitted].
    """
    acceptance, distributions = ask(rule, tables)  # [emitted, drafts, 2]
    weights = mass.sum(0)[:, None] * chain_distribution(tables.draft)
    odds = rule.counts(acceptance)
    emitted = [
        grouped(weights * odds[..., n], distribution, n)
        for n, distribution in enumerate(distributions)
    ]
    return continued(tables.target, emitted).reshape(-1)
