"""Rules emit exactly the target's distribution, by enumeration in float64.

Distributions depend on the whole prefix; see support/sampling/enumeration.py.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.samplers.rules import verification
from support.sampling.closed_form import (
    block_accepted,
    keyed_acceptance,
    keyed_agreement,
    tokenwise_acceptance,
)
from support.sampling.distribution_pairs import KINDS, tables
from support.sampling.enumeration import (
    BLOCK,
    EXACT,
    TOKENWISE,
    Array,
    Outcome,
    Rule,
    Tables,
    ask,
    chain_distribution,
    ended_early,
    enumerate_keyed,
    enumerate_rule,
)
from support.sampling.reused_noise import enumerate_two_rounds
from support.sampling.shared_noise import shared_noise_distribution

SIZES = [(vocab, k) for vocab in (2, 3, 4) for k in (1, 2, 3, 4)]
RULES = {"token-wise": TOKENWISE, "block": BLOCK}
BOTH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
EVERY_SIZE = pytest.mark.parametrize(("vocab", "k"), SIZES)
MANY = range(1, 31)


def check_lossless(
    distribution: Array, distributions: Tables, within: float = EXACT
) -> None:
    np.testing.assert_allclose(
        distribution, chain_distribution(distributions.target), rtol=0, atol=within
    )


def check_accepted(outcome: Outcome, expected: Array) -> None:
    np.testing.assert_allclose(outcome.accepted, expected, rtol=0, atol=EXACT)


def exact(function: Callable[..., mx.array], *arrays: Array) -> Array:
    with mx.stream(mx.cpu):
        return np.array(function(*(mx.array(a, dtype=mx.float64) for a in arrays)))


def tokenwise_closed_form(distributions: Tables) -> Array:
    """Return the mean accepted count: over prefixes, the sum of prod(min(p, q))."""
    both = [
        np.minimum(p, q)
        for p, q in zip(distributions.target, distributions.draft, strict=False)
    ]
    total = np.zeros(distributions.pairs)
    for depth in range(distributions.k):
        reached = chain_distribution(both[:depth])
        accepts = exact(
            tokenwise_acceptance,
            distributions.target[depth],
            distributions.draft[depth],
        )
        total += (reached * accepts).sum(-1)
    return total


def keyed_closed_form(distributions: Tables) -> Array:
    both = [
        exact(keyed_agreement, p, q)
        for p, q in zip(distributions.target, distributions.draft, strict=False)
    ]
    total = np.zeros(distributions.pairs)
    for depth in range(distributions.k):
        reached = chain_distribution(both[:depth])
        accepts = exact(
            keyed_acceptance, distributions.target[depth], distributions.draft[depth]
        )
        total += (reached * accepts).sum(-1)
    return total


def block_closed_form(distributions: Tables) -> Array:
    """Return the mean accepted count: the sum of the values of all prefixes.

    A value is the smaller one of the prefix's draft probability, and the parent's value
    times the target's probability of the last token.
    """
    reached = np.ones((distributions.pairs, 1))
    total = np.zeros(distributions.pairs)
    for depth in range(distributions.k):
        wanted = (reached[..., None] * distributions.target[depth]).reshape(
            distributions.pairs, -1
        )
        reached = np.minimum(
            chain_distribution(distributions.draft[: depth + 1]), wanted
        )
        total += reached.sum(-1)
    return total


def check_rule(rule: Rule, distributions: Tables) -> None:
    outcome = enumerate_rule(rule, distributions)
    check_lossless(outcome.distribution, distributions)
    closed = tokenwise_closed_form if rule is TOKENWISE else block_closed_form
    check_accepted(outcome, closed(distributions))


def test_at_least_200_pairs_of_distributions_are_enumerated() -> None:
    assert sum(tables(vocab, k, seed=0).pairs for vocab, k in SIZES) >= 200
    assert len(KINDS) == 17


@BOTH
@EVERY_SIZE
def test_the_emitted_distribution_is_the_targets(
    rule: Rule, vocab: int, k: int
) -> None:
    check_rule(rule, tables(vocab, k, seed=0))


@pytest.mark.slow
@BOTH
@EVERY_SIZE
def test_the_emitted_distribution_is_the_targets_for_many_pairs(
    rule: Rule, vocab: int, k: int
) -> None:
    for seed in MANY:
        check_rule(rule, tables(vocab, k, seed))


@EVERY_SIZE
def test_keyed_choice_emits_the_targets_distribution(vocab: int, k: int) -> None:
    distributions = tables(vocab, k, seed=0)
    outcome = enumerate_keyed(distributions)
    check_lossless(outcome.distribution, distributions)
    check_accepted(outcome, keyed_closed_form(distributions))


@pytest.mark.slow
@EVERY_SIZE
def test_keyed_choice_emits_the_targets_distribution_for_many_pairs(
    vocab: int, k: int
) -> None:
    for seed in MANY:
        distributions = tables(vocab, k, seed)
        outcome = enumerate_keyed(distributions)
        check_lossless(outcome.distribution, distributions)
        check_accepted(outcome, keyed_closed_form(distributions))


@EVERY_SIZE
def test_one_noise_draws_each_of_two_tokens_from_its_own_distribution(
    vocab: int, k: int
) -> None:
    """Summed over one token, the closed form is the distribution of the other."""
    distributions = tables(vocab, k, seed=0)
    for target, draft in zip(distributions.target, distributions.draft, strict=False):
        both = shared_noise_distribution(target, draft)
        assert both.min() >= 0
        np.testing.assert_allclose(both.sum(-1), target, rtol=0, atol=EXACT)
        np.testing.assert_allclose(both.sum(-2), draft, rtol=0, atol=EXACT)
        np.testing.assert_allclose(
            np.diagonal(both, axis1=-2, axis2=-1),
            exact(keyed_agreement, target, draft),
            rtol=0,
            atol=EXACT,
        )


def test_shared_noise_follows_its_closed_form() -> None:
    """In 400,000 draws every cell is within 5 standard deviations."""
    count = 400_000
    first, second = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    noise = np.random.default_rng(1).gumbel(size=(count, 4))
    with np.errstate(divide="ignore"):
        one, other = (
            np.argmax(np.log(distribution) + noise, -1)
            for distribution in (first, second)
        )
    observed = np.bincount(one * 4 + other, minlength=16).reshape(4, 4) / count
    expected = shared_noise_distribution(first, second)
    bound = 5 * np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(observed - expected) <= bound).all()


@BOTH
def test_drafts_chosen_without_chance_keep_the_distribution(rule: Rule) -> None:
    """The draft is any function of the prefix; the rule gets no draft distributions."""
    for vocab, k in SIZES:
        distributions = tables(vocab, k, 1, ["one-hot draft", "one-hot both"], each=4)
        outcome = enumerate_rule(rule, distributions, chance=False)
        check_lossless(outcome.distribution, distributions)
        check_accepted(outcome, enumerate_rule(rule, distributions).accepted)
        check_accepted(outcome, tokenwise_closed_form(distributions))


@BOTH
def test_a_rule_without_the_drafts_distributions_accepts_fewer(
    rule: Rule,
) -> None:
    """Any token independent of the target's draw can be verified in this way."""
    for vocab, k in SIZES:
        distributions = tables(vocab, k, 1)
        outcome = enumerate_rule(rule, distributions, chance=False)
        check_lossless(outcome.distribution, distributions)
        assert (outcome.accepted <= tokenwise_closed_form(distributions) + EXACT).all()


@BOTH
def test_drafts_that_end_early_keep_the_distribution(rule: Rule) -> None:
    """Drafts end where their largest probability is below 0.55, or at random."""
    for vocab, k in SIZES:
        distributions = tables(vocab, k, 2)
        whim = np.random.default_rng(k)
        unsure = [distribution.max(-1) < 0.55 for distribution in distributions.draft]
        at_random = [
            whim.random(distribution.shape[:-1]) < 0.3
            for distribution in distributions.draft
        ]
        for ends in (unsure, at_random):
            drawn, shown = ended_early(distributions, ends)
            outcome = enumerate_rule(rule, distributions, drawn=drawn, shown=shown)
            check_lossless(outcome.distribution, distributions)


@EVERY_SIZE
def test_block_verification_accepts_at_least_as_many(vocab: int, k: int) -> None:
    distributions = tables(vocab, k, seed=3)
    gain = block_closed_form(distributions) - tokenwise_closed_form(distributions)
    assert gain.min() > -EXACT
    if k == 1:
        assert gain.max() < EXACT
    else:
        assert gain.max() > 0.01


def test_block_verification_equals_token_wise_where_it_cannot_gain() -> None:
    for vocab, k, kinds in [
        *[(vocab, 1, list(KINDS)) for vocab in (2, 3, 4)],
        *[(3, k, ["one-hot draft", "one-hot both", "equal"]) for k in (2, 4)],
    ]:
        distributions = tables(vocab, k, 4, kinds)
        ours, theirs = (
            enumerate_rule(rule, distributions) for rule in (BLOCK, TOKENWISE)
        )
        check_accepted(ours, theirs.accepted)


def test_the_papers_example_accepts_10_and_11_ninths() -> None:
    """Sun et al., section 2: target 1/3 and 2/3, draft 2/3 and 1/3; two are drafted."""
    target, draft = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    distributions = Tables(
        [np.broadcast_to(target, (1, 2**d, 2)) for d in range(3)],
        [np.broadcast_to(draft, (1, 2**d, 2)) for d in range(2)],
    )
    check_accepted(enumerate_rule(TOKENWISE, distributions), np.array([10 / 9]))
    check_accepted(enumerate_rule(BLOCK, distributions), np.array([11 / 9]))


def test_what_a_benchmark_expects_of_block_verification_is_its_mean() -> None:
    distributions = tables(3, 3, seed=5)

    def expected(target: mx.array, draft: mx.array, drafted: mx.array) -> mx.array:
        accepted = block_accepted(target, draft, drafted)
        reach = verification.BLOCK.odds(target, draft, drafted).shares
        assert accepted.shape == reach.shape[:-1]
        return accepted[..., None]

    values, _ = ask(Rule(expected, BLOCK.next_probs, BLOCK.counts), distributions)
    mean = (chain_distribution(distributions.draft) * values[..., 0]).sum(-1)
    check_accepted(Outcome(mean, mean), block_closed_form(distributions))


@BOTH
@EVERY_SIZE
def test_in_float32_the_distribution_is_off_by_rounding_alone(
    rule: Rule, vocab: int, k: int
) -> None:
    distributions = tables(vocab, k, seed=6)
    outcome = enumerate_rule(rule, distributions, dtype=mx.float32)
    check_lossless(outcome.distribution, distributions, within=3e-7)


@pytest.mark.parametrize("vocab", [2, 3])
def test_two_rounds_with_draws_of_their_own_emit_the_targets_distribution(
    vocab: int,
) -> None:
    distributions = tables(vocab, 3, seed=8)
    for rule in RULES.values():
        check_lossless(enumerate_two_rounds(rule, distributions), distributions)
