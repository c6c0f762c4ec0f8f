"""Exact enumeration: the law of what a rule emits, from the rule's own functions.

Laws come in tables: `target[d]` is [pairs, vocab**d, vocab], one law for each prefix
of d tokens, the prefixes numbered in base `vocab`. All drafts of k tokens are given to
the rule at once, as batch rows; what it returns (acceptance probabilities, the law of
the next token) is averaged with the drafts' probabilities. Nothing is sampled.

The result is the joint law of the first k + 1 tokens: what a round emits, continued
with the target's law, because a round may emit fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.samplers.acceptance import count_accepted
from mlx_speculation.samplers.rules import block, rejection
from support.sampling.shared_noise import shared_noise_law

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Counts = Callable[[Array], Array]  # acceptance [..., k] to odds of 0..k, [..., k + 1]
EXACT = 1e-12
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tables:
    """Laws of target and draft after every prefix, for several pairs of one size."""

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
    """What a round emits: the joint law of k + 1 tokens, and the mean accepted."""

    law: Array  # [pairs, vocab**(k + 1)]
    accepted: Array  # [pairs]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as it is enumerated: its functions, and how coins become a count."""

    acceptance_probs: Callable[..., mx.array]
    next_law: Callable[..., mx.array]
    counts: Counts


def first_failure(acceptance: Array) -> Array:
    """Odds of each count when the first coin that fails ends the round."""
    ones = np.ones((*acceptance.shape[:-1], 1))
    reached = np.concatenate([ones, np.cumprod(acceptance, axis=-1)], axis=-1)
    fails = np.concatenate([1 - acceptance, ones], axis=-1)
    odds: Array = reached * fails
    return odds


def last_success(acceptance: Array) -> Array:
    """Odds of each count when the last coin that passes counts."""
    ones = np.ones((*acceptance.shape[:-1], 1))
    fails = np.flip(np.cumprod(np.flip(1 - acceptance, -1), axis=-1), -1)
    after = np.concatenate([fails, ones], axis=-1)
    odds: Array = after * np.concatenate([ones, acceptance], axis=-1)
    return odds


def rule_of(module: ModuleType, counts: Counts) -> Rule:
    return Rule(module.acceptance_probs, module.next_law, counts)


TOKENWISE = rule_of(rejection, first_failure)
BLOCK = rule_of(block, last_success)


def sequences(vocab: int, length: int) -> Ids:
    """All sequences, [vocab**length, length], in the order of the tables."""
    shape = (vocab,) * length
    return np.stack(np.unravel_index(np.arange(vocab**length), shape), -1).reshape(
        vocab**length, length
    )


def chain_law(laws: list[Array]) -> Array:
    """The joint law of the tokens that the tables draw, [pairs, vocab**len(laws)]."""
    joint = np.ones((len(laws[0]) if laws else 1, 1))
    for law in laws:
        joint = (joint[..., None] * law).reshape(len(law), -1)
    return joint


def along_drafts(laws: list[Array], k: int) -> Array:
    """The laws that all drafts of k tokens meet, [pairs, vocab**k, n, vocab]."""
    vocab = laws[0].shape[-1]
    drafts = np.arange(vocab**k)
    return np.stack(
        [law[:, drafts // vocab ** (k - depth)] for depth, law in enumerate(laws)], 2
    )


def continued(target: list[Array], emitted: list[Array]) -> Array:
    """The joint law when `emitted[n]`, [pairs, vocab**n, vocab], ends a round."""
    joint = np.zeros((len(target[0]), 1))
    for law, ends in zip(target, emitted, strict=True):
        joint = (joint[..., None] * law + ends).reshape(len(law), -1)
    return joint


def ask(
    rule: Rule,
    tables: Tables,
    *,
    shown: list[Array] | None = None,
    chance: bool = True,
    dtype: mx.Dtype = mx.float64,
) -> tuple[Array, list[Array]]:
    """Give a rule all drafts of k tokens.

    Args:
        rule: the rule.
        tables: the laws.
        shown: the laws of the draft that the rule is told; the tables' when omitted.
        chance: without it the rule is told that drafts were chosen without chance.
        dtype: of the laws, and so of the rule's arithmetic.

    Returns:
        The acceptance probabilities [pairs, vocab**k, k], and for every accepted count
        the law of the next token [pairs, vocab**k, vocab].
    """
    k, vocab = tables.k, tables.vocab
    with mx.stream(mx.cpu):  # the only device with float64
        target = mx.array(along_drafts(tables.target, k), dtype=dtype)
        draft = mx.array(along_drafts(shown or tables.draft, k), dtype=dtype)
        told = draft if chance else None
        drafted = mx.array(sequences(vocab, k))
        drafted = mx.broadcast_to(drafted, (tables.pairs, *drafted.shape))
        acceptance = as_numpy(rule.acceptance_probs(target, told, drafted))
        laws = []
        for count in range(k + 1):
            counts = mx.full(drafted.shape[:-1], count, dtype=mx.int32)
            laws.append(as_numpy(rule.next_law(target, told, drafted, counts)))
    return acceptance, laws


def grouped(mass: Array, law: Array, count: int) -> Array:
    """Sum `mass` [pairs, drafts] times `law` over what follows `count` tokens.

    Returns:
        [pairs, vocab**count, vocab].
    """
    vocab = law.shape[-1]
    each = (mass[..., None] * law).reshape(len(mass), vocab**count, -1, vocab)
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
    """Enumerate one round; see `ask`. `drawn` are the laws that tokens come from."""
    acceptance, laws = ask(rule, tables, shown=shown, chance=chance, dtype=dtype)
    weights = chain_law(drawn or tables.draft)  # [pairs, vocab**k]
    odds = rule.counts(acceptance)
    emitted = [grouped(weights * odds[..., n], law, n) for n, law in enumerate(laws)]
    mean = (weights * (odds * np.arange(len(laws))).sum(-1)).sum(-1)
    return Outcome(continued(tables.target, emitted), mean)


def ended_early(tables: Tables, ends: list[Flags]) -> tuple[list[Array], list[Array]]:
    """Return drawn and shown laws of drafts that may end before k tokens.

    `ends[d]` [pairs, vocab**d] says whether a draft ends before its token d, from what
    precedes that token alone. The rule is shown a row of zeros there; token 0 stands
    for the missing one.
    """
    drawn, shown = [], []
    over = np.zeros((tables.pairs, 1), dtype=np.bool_)
    for law, now in zip(tables.draft, ends, strict=True):
        over = over | now
        nothing = np.eye(tables.vocab)[0]
        drawn.append(np.where(over[..., None], nothing, law))
        shown.append(np.where(over[..., None], 0, law))
        over = np.repeat(over, tables.vocab, axis=-1)
    return drawn, shown


def as_numpy(array: mx.array) -> Array:
    return np.array(array).astype(np.float64)


def enumerate_keyed(tables: Tables, *, emit_draft: bool = False) -> Outcome:
    """Enumerate keyed choice: drafts and target choices drawn with shared noise.

    With `emit_draft` the drafted token is emitted in place of the target's own choice.
    """
    k, vocab = tables.k, tables.vocab
    drafts, choices = sequences(vocab, k), sequences(vocab, k + 1)
    counts = count_accepted(mx.array(drafts)[:, None], mx.array(choices))
    accepted = np.array(counts)  # [drafts, choices]
    shared = [
        shared_noise_law(target, draft)  # [pairs, vocab**d, vocab, vocab]
        for target, draft in zip(tables.target[:-1], tables.draft, strict=True)
    ]
    emitted = [np.zeros((tables.pairs, vocab**d, vocab)) for d in range(k + 1)]
    means = np.zeros(tables.pairs)
    for pair in range(tables.pairs):
        weights = tables.target[k][pair][:, choices[:, k]]  # of the bonus
        for d, law in enumerate(shared):
            prefix = np.arange(vocab**k) // vocab ** (k - d)
            chosen, drafted = choices[None, :, d], drafts[:, d, None]
            weights = weights * law[pair, prefix[:, None], chosen, drafted]
        for count in range(k + 1):
            mass = np.where(accepted == count, weights, 0)
            tokens_of_draft = emit_draft and count < k
            kept = mass.sum(1 if tokens_of_draft else 0)
            emitted[count][pair] = kept.reshape(vocab**count, vocab, -1).sum(-1)
        means[pair] = (weights * accepted).sum()
    return Outcome(continued(tables.target, emitted), means)
