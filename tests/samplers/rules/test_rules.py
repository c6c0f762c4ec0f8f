"""Acceptance rules: coins, edge cases, shapes, batches and laziness."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.rules.probs import Rule, RuleOutcome, draw, residual
from mlx_speculation.samplers.rules.verification import BLOCK, REJECTION
from support.each import each
from support.sampling.closed_form import (
    block_accepted,
)
from support.sampling.distribution_pairs import KINDS
from support.sampling.enumeration import acceptance_probs, next_probs

Array = NDArray[np.float64]
RULES = pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["token-wise", "block"])
BELOW_1 = {mx.float32: 1 - 2.0**-24, mx.float64: 1 - 2.0**-53}
DTYPES = pytest.mark.parametrize("dtype", BELOW_1, ids=str)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> object:
    with mx.stream(mx.cpu):  # the only device with float64
        yield


def distributions(
    kind: str, batch: tuple[int, ...], k: int, vocab: int, seed: int = 0
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return distributions of a kind, and tokens drawn from the draft's."""
    draws = np.random.default_rng([seed, k, vocab])
    target, draft = KINDS[kind](draws, (*batch, k + 1, vocab))
    draft = draft[..., :k, :]
    scores = np.log(np.maximum(draft, 1e-300)) + draws.gumbel(size=draft.shape)
    return target, draft, scores.argmax(-1)


def arrays(dtype: mx.Dtype, *values: Array) -> list[mx.array]:
    return [mx.array(value, dtype=dtype) for value in values]


def count(rule: Rule, passed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the accepted counts by the rule's definition, given which coins passed."""
    rows = passed.reshape(-1, passed.shape[-1])
    if rule is REJECTION:
        counts = [[*row, False].index(False) for row in rows]
    else:
        counts = [int(max(np.flatnonzero(row) + 1, default=0)) for row in rows]
    return np.array(counts).reshape(passed.shape[:-1])


@each(k=[1, 2, 3], kind=KINDS, dtype=BELOW_1, rule=[REJECTION, BLOCK])
def test_coins_pass_below_the_acceptance_probability(
    rule: Rule, dtype: mx.Dtype, kind: str, k: int
) -> None:
    """The coins lie from 0 to just below 1, and on both sides of every threshold."""
    target, draft, drafted = distributions(kind, (6,), k, 4)
    t, d = arrays(dtype, target, draft)
    x = mx.array(drafted)
    acceptance = acceptance_probs(rule, t, d, x)
    exact = np.array(acceptance).astype(np.float64)
    epsilon = 4e-7 if dtype == mx.float32 else 1e-15
    levels = [0.0, 1e-30, 1 / 3, 0.5, 0.75, BELOW_1[dtype]]
    grid = np.array(np.meshgrid(*[levels] * k)).reshape(k, -1).T  # [combinations, k]
    coins = np.broadcast_to(grid[:, None], (len(grid), 6, k))
    near = [exact * (1 - epsilon), np.minimum(exact * (1 + epsilon), BELOW_1[dtype])]
    coins = np.concatenate([coins, *(n[None] for n in near)])
    p, q, ids = (mx.broadcast_to(a, (len(coins), *a.shape)) for a in (t, d, x))
    thrown = mx.array(coins, dtype=dtype)
    verdict = rule.verify(p, q, ids, thrown)
    thrown_values = np.array(thrown).astype(np.float64)
    expected = count(rule, (thrown_values < exact) | (exact == 1))
    assert np.array_equal(np.array(verdict.accepted), expected)
    assert len({verdict, rule.verify(t, d, x, thrown[0])}) == 2  # hashed by identity
    next_choice = next_probs(rule, p, q, ids, verdict.accepted)
    assert mx.array_equal(verdict.next_probs, next_choice).item()
    assert (verdict.acceptance == acceptance).all().item()
    assert verdict.accepted.dtype == mx.int32
    assert verdict.next_probs.dtype == verdict.acceptance.dtype == dtype


@each(dtype=BELOW_1, rule=[REJECTION, BLOCK])
def test_every_coin_passes_where_the_quotient_is_1(rule: Rule, dtype: mx.Dtype) -> None:
    """The largest coin times the draft's probability q does not round up to q."""
    target, _, drafted = distributions("equal", (500,), 3, 4)
    t = mx.array(target, dtype=dtype)
    coins = mx.full(drafted.shape, BELOW_1[dtype], dtype=dtype)
    x = mx.array(drafted)
    verdict = rule.verify(t, t[:, :3], x, coins)
    assert (verdict.acceptance == 1).all().item()  # 0 / 0 in the block's formula
    assert (verdict.accepted == 3).all().item()
    assert mx.array_equal(verdict.next_probs, t[:, 3]).item()


@RULES
def test_a_token_without_probability_is_never_accepted(rule: Rule) -> None:
    coins = mx.zeros((1,))
    half = mx.array([0.5, 0.5, 0])
    impossible = rule.verify(
        mx.stack([half, half]), mx.array([[0, 0, 1.0]]), mx.array([2]), coins
    )
    assert impossible.accepted.item() == 0
    assert mx.array_equal(impossible.next_probs, half).item()
    never_drawn = mx.array([[0, 1.0, 0]])
    verdict = rule.verify(mx.stack([half, half]), never_drawn, mx.array([0]), coins)
    assert verdict.accepted.item() == 0
    assert verdict.acceptance.item() == 0
    assert verdict.next_probs.tolist() == [1, 0, 0]


@RULES
def test_nothing_after_a_token_that_was_never_drawn_is_accepted(
    rule: Rule,
) -> None:
    t = mx.full((4, 2), 0.5)
    d = mx.array([[0.5, 0.5], [0, 1], [0.5, 0.5]])
    verdict = rule.verify(t, d, mx.array([0, 0, 0]), mx.zeros((3,)))
    assert verdict.accepted.item() == 1
    assert verdict.next_probs.tolist() == [1, 0]


@each(token=[4, 5, 1000, -1], rule=[REJECTION, BLOCK])
def test_an_id_that_no_distribution_has_is_never_accepted(
    rule: Rule, token: int
) -> None:
    target, draft, _ = distributions("spread", (), 2, 4)
    t, d = arrays(mx.float32, target, draft)
    for draft_probs in (d, None):
        drafted = mx.array([token, 0])
        verdict = rule.verify(t, draft_probs, drafted, mx.zeros((2,)))
        assert verdict.accepted.item() == 0
        assert verdict.acceptance[0].item() == 0


@RULES
def test_distributions_that_are_not_numbers_accept_nothing(rule: Rule) -> None:
    target, draft, drafted = distributions("spread", (), 3, 4)
    t, d = arrays(mx.float32, target, draft)
    x, coins = mx.array(drafted), mx.zeros((3,))
    nan = mx.full(d.shape, mx.nan)
    assert rule.verify(t, nan, x, coins).accepted.item() == 0
    assert rule.verify(mx.full(t.shape, mx.nan), d, x, coins).accepted.item() == 0


def test_where_no_residual_is_left_the_targets_distribution_follows() -> None:
    distribution = mx.array([[0.25, 0.75, 0], [0.25, 0.75, 0]])
    less = distribution * mx.array([[1.0], [0.0]])
    left = residual(distribution, less, mx.ones((2,)))
    assert mx.array_equal(left, distribution).item()
    nothing = residual(distribution, mx.ones((2, 3)), mx.ones((2,)))
    assert mx.array_equal(nothing, distribution).item()


@each(batch=[(), (3,)], rule=[REJECTION, BLOCK])
def test_without_drafted_tokens_the_targets_distribution_follows(
    rule: Rule, batch: tuple[int, ...]
) -> None:
    target, _, _ = distributions("spread", batch, 0, 5)
    (t,) = arrays(mx.float32, target)
    for draft in (mx.zeros((*batch, 0, 5)), None):
        drafted = mx.zeros((*batch, 0), dtype=mx.uint32)
        verdict = rule.verify(t, draft, drafted, mx.zeros((*batch, 0)))
        assert verdict.acceptance.shape == (*batch, 0)
        assert mx.array_equal(verdict.accepted, mx.zeros(batch)).item()
        assert mx.array_equal(verdict.next_probs, t[..., 0, :]).item()
        assert verdict.accepted.dtype == mx.int32


@each(kind=KINDS, rule=[REJECTION, BLOCK])
def test_no_distributions_are_the_same_as_one_hot_distributions(
    rule: Rule, kind: str
) -> None:
    target, _, drafted = distributions(kind, (20,), 3, 4)
    t, one_hot = arrays(mx.float32, target, np.eye(4)[drafted])
    coins = mx.random.uniform(shape=drafted.shape, key=mx.random.key(1))
    x = mx.array(drafted)
    check_same(rule.verify(t, None, x, coins), rule.verify(t, one_hot, x, coins))


def check_same(ours: RuleOutcome, theirs: RuleOutcome) -> None:
    assert mx.array_equal(ours.accepted, theirs.accepted).item()
    assert mx.array_equal(ours.next_probs, theirs.next_probs).item()
    assert mx.array_equal(ours.acceptance, theirs.acceptance).item()


@each(known=[True, False], rule=[REJECTION, BLOCK])
def test_a_draft_that_has_ended_is_a_shorter_draft(rule: Rule, known: bool) -> None:
    """In a batch a draft ends with rows of zeros, or with the id -1."""
    target, draft, drafted = distributions("spread", (40,), 4, 3)
    t, d = arrays(mx.float32, target, draft)
    x = mx.array(drafted)
    coins = mx.random.uniform(shape=drafted.shape, key=mx.random.key(2))
    for length in range(4):
        there = mx.arange(4) < length
        ended = mx.where(there, x, -1)
        distributions_there = d * there[:, None]
        long = rule.verify(t, distributions_there if known else None, ended, coins)
        short = rule.verify(
            t[:, : length + 1],
            d[:, :length] if known else None,
            x[:, :length],
            coins[:, :length],
        )
        assert mx.array_equal(long.accepted, short.accepted).item()
        assert mx.allclose(
            long.next_probs, short.next_probs, rtol=1e-6, atol=1e-7
        ).item()
        assert mx.allclose(
            long.acceptance[:, :length], short.acceptance, rtol=1e-6
        ).item()
        assert (long.acceptance[:, length:] == 0).all().item()


@RULES
@pytest.mark.parametrize(
    ("target", "draft", "match"),
    [
        ((3, 5), (3, 5), r"target_probs has the shape \(3, 5\), and \(4, 5\)"),
        ((4, 5), (2, 5), r"draft_probs has the shape \(2, 5\), and \(3, 5\)"),
        ((4, 5), (3, 6), r"draft_probs has the shape \(3, 6\), and \(3, 5\)"),
        ((1, 4, 5), (3, 5), r"target_probs has the shape \(1, 4, 5\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    rule: Rule, target: tuple[int, ...], draft: tuple[int, ...], match: str
) -> None:
    t, d, x = mx.zeros(target), mx.zeros(draft), mx.zeros((3,), dtype=mx.uint32)
    with pytest.raises(InvalidRequestError, match=match):
        rule.verify(t, d, x, mx.zeros((3,)))
    with pytest.raises(InvalidRequestError, match=match):
        acceptance_probs(rule, t, d, x)
    with pytest.raises(InvalidRequestError, match=match):
        next_probs(rule, t, d, x, mx.array(0))


@each(coins=[(2,), (4,), (1,), (3, 1)], rule=[REJECTION, BLOCK])
def test_coins_of_another_shape_are_refused(rule: Rule, coins: tuple[int, ...]) -> None:
    t, x = mx.zeros((4, 5)), mx.zeros((3,), dtype=mx.uint32)
    with pytest.raises(InvalidRequestError, match="coins has the shape"):
        rule.verify(t, None, x, mx.zeros(coins))


@each(dtype=[mx.bfloat16, mx.float16, mx.float32, mx.float64], rule=[REJECTION, BLOCK])
def test_distributions_keep_their_dtype(rule: Rule, dtype: mx.Dtype) -> None:
    target, draft, drafted = distributions("spread", (2,), 3, 4)
    t, d = arrays(dtype, target, draft)
    x = mx.array(drafted)
    for draft_probs in (d, None):
        verdict = rule.verify(t, draft_probs, x, mx.zeros(drafted.shape))
        assert verdict.next_probs.dtype == verdict.acceptance.dtype == dtype
        assert draw(verdict.next_probs, mx.zeros((2, 4))).dtype == mx.uint32


def test_a_ratio_that_overflows_after_an_impossible_token_is_no_chance() -> None:
    t = mx.array([[0, 1.0], [1, 0], [1, 0]])
    d = mx.array(
        [
            [1.0, 0],
            [1e-39, 1],
        ]
    )
    verdict = BLOCK.verify(t, d, mx.array([0, 0]), mx.zeros((2,)))
    assert verdict.accepted.item() == 0
    assert verdict.acceptance.tolist() == [0, 0]
    assert verdict.next_probs.tolist() == [0, 1]


@each(kind=["spread", "zeros", "mixed", "tiny parts"], rule=[REJECTION, BLOCK])
def test_batch_rows_are_judged_as_if_alone(rule: Rule, kind: str) -> None:
    target, draft, drafted = distributions(kind, (2, 3), 3, 4)
    t, d = arrays(mx.float32, target, draft)
    x = mx.array(drafted)
    coins = mx.random.uniform(shape=drafted.shape, key=mx.random.key(3))
    together = rule.verify(t, d, x, coins)
    for index in np.ndindex(2, 3):
        alone = rule.verify(t[index], d[index], x[index], coins[index])
        check_same(
            alone,
            RuleOutcome(
                together.accepted[index],
                together.next_probs[index],
                together.acceptance[index],
            ),
        )


@RULES
def test_nothing_is_read_on_the_host(rule: Rule) -> None:
    """Tracing refuses any evaluation, so a rule that can be traced reads nothing."""
    target, draft, drafted = distributions("spread", (5,), 3, 4)
    t, d = arrays(mx.float32, target, draft)
    x, coins = mx.array(drafted), mx.zeros(drafted.shape)

    def judge(t: mx.array, d: mx.array, x: mx.array, c: mx.array) -> list[mx.array]:
        verdicts = [rule.verify(t, draft_probs, x, c) for draft_probs in (d, None)]
        drawn = [draw(v.next_probs, t[0]) for v in verdicts]
        return [
            *drawn,
            *(v.acceptance for v in verdicts),
            block_accepted(t, d, x),
        ]

    def read(t: mx.array, d: mx.array, x: mx.array, c: mx.array) -> mx.array:
        rule.verify(t, d, x, c).accepted.item()
        return t

    assert len(mx.vmap(judge)(t, d, x, coins)) == 5
    with pytest.raises(ValueError, match="eval"):
        mx.vmap(read)(t, d, x, coins)


@each(kind=KINDS, rule=[REJECTION, BLOCK])
def test_float32_is_near_float64(rule: Rule, kind: str) -> None:
    """Both get the same float32 numbers, so a difference is the rule's rounding.

    Token-wise acceptance has a relative bound. For the distribution of the next token,
    a product has a bound: the total variation distance of the two results, times the
    mass of the residual before it is normalized.
    """
    unit = 2.0**-23
    target, draft, drafted = distributions(kind, (200,), 4, 4, seed=1)
    t, d = arrays(mx.float32, target, draft)
    x = mx.array(drafted)
    fine = t.astype(mx.float64), d.astype(mx.float64)
    short, long = (
        np.array(acceptance_probs(rule, *pair, x)).astype(np.float64)
        for pair in ((t, d), fine)
    )
    if rule is REJECTION:
        assert (np.abs(short - long) <= 8 * unit * long).all()
    for n in range(5):
        accepted = mx.full((200,), n, dtype=mx.int32)
        coarse = np.array(next_probs(rule, t, d, x, accepted)).astype(np.float64)
        exact = np.array(next_probs(rule, *fine, x, accepted))
        off = np.abs(coarse - exact).sum(-1) / 2
        mass = np.ones(200)
        if n < 4:
            share = np.ones(200)
            if rule is BLOCK:
                share = np.array(BLOCK.odds(*fine, x).shares)[:, n]
            left = share[:, None] * np.array(fine[0][:, n]) - np.array(fine[1][:, n])
            mass = np.maximum(left, 0).sum(-1)
        assert (off * mass <= 8 * unit).all()


def test_a_draw_is_the_choice_of_log_probability_plus_noise() -> None:
    probs, _ = KINDS["spread"](np.random.default_rng(1), (200, 30))
    distribution = mx.array(probs, dtype=mx.float32)
    noise = mx.random.gumbel(distribution.shape, key=mx.random.key(5))
    assert mx.array_equal(
        draw(distribution, noise), mx.argmax(mx.log(distribution) + noise, -1)
    ).item()
    assert mx.array_equal(
        draw(distribution * 7, noise), draw(distribution, noise)
    ).item()
    assert draw(distribution[0], noise[0]).shape == ()


def test_a_draw_never_gives_a_token_without_probability() -> None:
    distribution = mx.array([0.0, 1e-37, 0.0])
    for value in (-1e30, 0.0, 1e30, mx.inf):
        assert draw(distribution, mx.array([value, -5.0, value])).item() == 1


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 60,000 draws and 16 tokens; the bound has probability 1e-6."""
    size = 60_000
    distribution = KINDS["spread"](np.random.default_rng(2), (16,))[0]
    noise = mx.random.gumbel((size, 16), key=mx.random.key(6))
    drawn = np.array(draw(mx.array(distribution, dtype=mx.float32), noise))
    expected = distribution * size
    observed = np.bincount(drawn, minlength=16)
    assert ((observed - expected) ** 2 / expected).sum() < 59
