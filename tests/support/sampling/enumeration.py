"""Exact distribution of the tokens that a rule emits, without sampling.

A table has several pairs of a target and a draft. `target[d]` is [pairs, vocab**d,
vocab]: a distribution for each prefix of d tokens, numbered in base `vocab`. The rule
gets all drafts of k tokens as batch rows. Its results are averaged, weighted by the
drafts' probabilities.

The result is the joint distribution of the first k + 1 tokens. If a round emits fewer,
the target's distribution continues them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.samplers.acceptance import count_accepted
from mlx_speculation.samplers.rules import probs, verification
from mlx_speculation.samplers.rules.probs import (
    draft_distributions,
    probs_after,
    quotient,
)
from support.sampling.shared_noise import shared_noise_distribution

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
# Acceptance [..., k] to the probabilities of 0..k accepted tokens, [..., k + 1]
Counts = Callable[[Array], Array]
EXACT = 1e-12
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tables:
    """Distributions of target and draft after every prefix, for pairs of one size."""

    target: list[Array]  # k + 1 of them, [pairs, vocab**d, vocab]
    draft: list[Array]  # k of them

    @property
    def k(self) -> int:
        return len(self.draft)

    @property
    def vocab(self) -> int:
        return int(self.target[0].shape[-1])

    @property
    def pairs(self) -> int:
        return int(self.target[0].shape[0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Output of a round: distribution of k + 1 tokens, and mean accepted count."""

    distribution: Array  # [pairs, vocab**(k + 1)]
    accepted: Array  # [pairs]


@dataclass(frozen=True, slots=True)
class Rule:
    """Functions of a rule, and the conversion of its coins to an accepted count."""

    acceptance_probs: Callable[..., mx.array]
    next_probs: Callable[..., mx.array]
    counts: Counts


def first_failure(acceptance: Array) -> Array:
    """Probability of each accepted count if the first failing coin ends the round."""
    ones = np.ones((*acceptance.shape[:-1], 1))
    reached = np.concatenate([ones, np.cumprod(acceptance, axis=-1)], axis=-1)
    fails = np.concatenate([1 - acceptance, ones], axis=-1)
    odds: Array = reached * fails
    return odds


def last_success(acceptance: Array) -> Array:
    """Probability of each accepted count if the last passing coin decides it."""
    ones = np.ones((*acceptance.shape[:-1], 1))
    fails = np.flip(np.cumprod(np.flip(1 - acceptance, -1), axis=-1), -1)
    after = np.concatenate([fails, ones], axis=-1)
    odds: Array = after * np.concatenate([ones, acceptance], axis=-1)
    return odds


def acceptance_probs(
    rule: probs.Rule, target: mx.array, draft: mx.array | None, drafted: mx.array
) -> mx.array:
    """Return the acceptance probabilities of a rule, [..., k]."""
    odds = rule.odds(target, draft_distributions(target, draft, drafted), drafted)
    return quotient(odds.part, odds.whole)


def next_probs(
    rule: probs.Rule,
    target: mx.array,
    draft: mx.array | None,
    drafted: mx.array,
    accepted: mx.array,
) -> mx.array:
    """Return the distribution after `accepted` tokens, [..., vocab]."""
    rows = draft_distributions(target, draft, drafted)
    return probs_after(target, rows, rule.odds(target, rows, drafted).shares, accepted)


def rule_of(rule: probs.Rule, counts: Counts) -> Rule:
    return Rule(partial(acceptance_probs, rule), partial(next_probs, rule), counts)


TOKENWISE = rule_of(verification.REJECTION, first_failure)
BLOCK = rule_of(verification.BLOCK, last_success)


def sequences(vocab: int, length: int) -> Ids:
    """All sequences, [vocab**length, length], in the order of the tables."""
    shape = (vocab,) * length
    return np.stack(np.unravel_index(np.arange(vocab**length), shape), -1).reshape(
        vocab**length, length
    )


def chain_distribution(distributions: list[Array]) -> Array:
    """The joint distribution of tokens drawn by the tables, [pairs, vocab**n]."""
    joint = np.ones((len(distributions[0]) if distributions else 1, 1))
    for distribution in distributions:
        joint = (joint[..., None] * distribution).reshape(len(distribution), -1)
    return joint


def along_drafts(distributions: list[Array], k: int) -> Array:
    """Return distributions along all drafts, [pairs, vocab**k, n, vocab]."""
    vocab = distributions[0].shape[-1]
    drafts = np.arange(vocab**k)
    return np.stack(
        [
            distribution[:, drafts // vocab ** (k - depth)]
            for depth, distribution in enumerate(distributions)
        ],
        2,
    )


def continued(target: list[Array], emitted: list[Array]) -> Array:
    """The joint distribution, if rounds of n + 1 tokens have the mass `emitted[n]`."""
    # emitted[n]: [pairs, vocab**n, vocab]
    joint = np.zeros((len(target[0]), 1))
    for distribution, ends in zip(target, emitted, strict=True):
        joint = (joint[..., None] * distribution + ends).reshape(len(distribution), -1)
    return joint


def ask(
    rule: Rule,
    tables: Tables,
    *,
    shown: list[Array] | None = None,
    chance: bool = True,
    dtype: mx.Dtype = mx.float64,
) -> tuple[Array, list[Array]]:
    """Give a rule all drafts; return acceptance probabilities and distributions.

    The probabilities are [pairs, vocab**k, k]. The distributions are of the next token,
    one array [pairs, vocab**k, vocab] for each accepted count. As distributions of the
    draft, the rule gets `shown` (default: `tables.draft`), or None if not `chance`.
    """
    k, vocab = tables.k, tables.vocab
    with mx.stream(mx.cpu):  # the only device with float64
        target = mx.array(along_drafts(tables.target, k), dtype=dtype)
        draft = mx.array(along_drafts(shown or tables.draft, k), dtype=dtype)
        draft_probs = draft if chance else None
        drafted = mx.array(sequences(vocab, k))
        drafted = mx.broadcast_to(drafted, (tables.pairs, *drafted.shape))
        acceptance = as_numpy(rule.acceptance_probs(target, draft_probs, drafted))
        distributions = []
        for count in range(k + 1):
            counts = mx.full(drafted.shape[:-1], count, dtype=mx.int32)
            distributions.append(
                as_numpy(rule.next_probs(target, draft_probs, drafted, counts))
            )
    return acceptance, distributions


def grouped(mass: Array, distribution: Array, count: int) -> Array:
    """Sum `mass * distribution` over the drafts with the same first `count` tokens.

    `mass` is [pairs, drafts]; the sum is [pairs, vocab**count, vocab].
    """
    vocab = distribution.shape[-1]
    each = (mass[..., None] * distribution).reshape(len(mass), vocab**count, -1, vocab)
    summed: Array = each.sum(2)
    return summed


def enumerate_rule(
    rule: Rule,
    tables: Tables,
    *,
    drawn: list[Array] | None = None,
    shown: list[Array] | None = None,
    chance: bool = True,
    dtype: mx.Dtype = mx.float64,
) -> Outcome:
    """Enumerate one round; see `ask`. Drafts come from the distributions `drawn`."""
    acceptance, distributions = ask(
        rule, tables, shown=shown, chance=chance, dtype=dtype
    )
    weights = chain_distribution(drawn or tables.draft)  # [pairs, vocab**k]
    odds = rule.counts(acceptance)
    emitted = [
        grouped(weights * odds[..., n], distribution, n)
        for n, distribution in enumerate(distributions)
    ]
    mean = (weights * (odds * np.arange(len(distributions))).sum(-1)).sum(-1)
    return Outcome(continued(tables.target, emitted), mean)


def ended_early(tables: Tables, ends: list[Flags]) -> tuple[list[Array], list[Array]]:
    """Return drawn and shown distributions of drafts that may end before k tokens.

    `ends[d]` [pairs, vocab**d] says which drafts end before their token d. In place
    of a missing token the rule gets id 0, with a row of zeros.
    """
    drawn, shown = [], []
    over = np.zeros((tables.pairs, 1), dtype=np.bool_)
    for distribution, now in zip(tables.draft, ends, strict=True):
        over = over | now
        nothing = np.eye(tables.vocab)[0]
        drawn.append(np.where(over[..., None], nothing, distribution))
        shown.append(np.where(over[..., None], 0, distribution))
        over = np.repeat(over, tables.vocab, axis=-1)
    return drawn, shown


def as_numpy(array: mx.array) -> Array:
    return np.array(array).astype(np.float64)


def enumerate_keyed(tables: Tables) -> Outcome:
    """Enumerate keyed choice, in which draft and target share their noise."""
    k, vocab = tables.k, tables.vocab
    drafts, choices = sequences(vocab, k), sequences(vocab, k + 1)
    counts = count_accepted(mx.array(drafts)[:, None], mx.array(choices))
    accepted = np.array(counts)  # [drafts, choices]
    shared = [
        shared_noise_distribution(target, draft)  # [pairs, vocab**d, vocab, vocab]
        for target, draft in zip(tables.target[:-1], tables.draft, strict=True)
    ]
    emitted = [np.zeros((tables.pairs, vocab**d, vocab)) for d in range(k + 1)]
    means = np.zeros(tables.pairs)
    for pair in range(tables.pairs):
        weights = tables.target[k][pair][:, choices[:, k]]  # of the bonus token
        for d, distribution in enumerate(shared):
            prefix = np.arange(vocab**k) // vocab ** (k - d)
            chosen, drafted = choices[None, :, d], drafts[:, d, None]
            weights = weights * distribution[pair, prefix[:, None], chosen, drafted]
        for count in range(k + 1):
            mass = np.where(accepted == count, weights, 0)
            kept = mass.sum(0)
            emitted[count][pair] = kept.reshape(vocab**count, vocab, -1).sum(-1)
        means[pair] = (weights * accepted).sum()
    return Outcome(continued(tables.target, emitted), means)
