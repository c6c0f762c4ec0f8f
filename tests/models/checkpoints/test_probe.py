"""Scores of conventions, and the choice of the best convention."""

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_speculation.models.checkpoints.probe import (
    FEWEST_PLACES,
    Score,
    Trials,
    log_probs,
)
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.introspect.taps import States

seeds = st.integers(0, 2**31)


def logits(seed: int, *shape: int, scale: float = 3.0) -> mx.array:
    drawn = np.random.default_rng(seed).normal(size=shape) * scale
    return mx.array(drawn.astype(np.float32))


def scored(drafted: mx.array, target: mx.array) -> Score:
    return Score.of(drafted, log_probs(target), mx.argmax(target, axis=-1))


@given(seeds, seeds)
def test_nobody_scores_above_the_distribution_itself(one: int, two: int) -> None:
    target = logits(one, 20, 12)
    truth = scored(target, target)
    assert truth.agreement == 1.0
    sure = target + mx.where(mx.greater(target, 1.0), 100.0, 0.0)
    for drafted in (logits(two, 20, 12), 2 * target, target / 2, sure):
        score = scored(drafted, target)
        assert (score.values <= truth.values + 1e-5).all()
    entropy = (np.exp(log_probs(target)) * np.array(log_probs(target))).sum(axis=-1)
    assert np.allclose(truth.values, entropy, atol=1e-5)


def test_one_who_is_too_sure_of_the_written_token_does_not_win() -> None:
    """Doubled logits make the most likely token more probable, yet score lower."""
    target = logits(3, 40, 12, scale=1.0)
    sure, truth = scored(2 * target, target), scored(target, target)
    written = mx.argmax(target, axis=-1)[:, None]
    gain = mx.take_along_axis(
        log_probs(2 * target) - log_probs(target), written, axis=-1
    )
    assert mx.all(gain.mean() > 0)
    assert truth.surely_above(sure)


@given(seeds)
def test_chance_is_what_unrelated_drafts_agree_in(seed: int) -> None:
    target, drafted = logits(seed, 30, 5), logits(seed + 1, 30, 5)
    score = scored(drafted, target)
    one, two = np.argmax(target, axis=-1), np.argmax(drafted, axis=-1)
    pairs = [a == b for a in one.tolist() for b in two.tolist()]
    assert np.isclose(score.chance, np.mean(pairs))
    assert np.isclose(score.agreement, np.mean(one == two))


def test_a_constant_guess_is_chance_however_often_it_is_right() -> None:
    often = np.zeros((40, 6), dtype=np.float32)
    often[:30, 2] = 5.0
    often[30:, 3] = 5.0
    constant = mx.zeros((40, 6)).at[:, 2].add(5.0)
    score = scored(constant, mx.array(often))
    assert score.agreement == score.chance == 0.75
    assert not score.above_chance
    assert scored(mx.array(often), mx.array(often)).above_chance


def test_few_places_and_one_token_alone_say_nothing() -> None:
    target = logits(1, FEWEST_PLACES - 1, 8)
    assert not scored(target, target).above_chance
    same = mx.repeat(target[:1], 40, axis=0)
    assert scored(same, same).agreement == 1.0
    assert scored(same, same).chance == 1.0
    assert not scored(same, same).above_chance


def test_a_guess_that_is_not_finite_is_the_worst_and_no_error() -> None:
    target = logits(1, 20, 8)
    broken = mx.where(mx.arange(8) == 3, float("nan"), target)
    nothing = mx.where(mx.arange(8) == 3, -float("inf"), target)
    for drafted in (broken, nothing):
        score = scored(drafted, target)
        assert np.isfinite(score.values).all()
        assert scored(target, target).surely_above(score)
    assert not scored(broken, target).above_chance


def fixed(values: NDArray[np.float64]) -> Score:
    return Score(values, 1.0, 0.0)


@given(seeds, st.integers(1, 6))
def test_the_best_wins_or_the_usual_stays(seed: int, count: int) -> None:
    drawn = np.random.default_rng(seed)
    scores = [
        fixed(drawn.normal(loc=drawn.normal(), size=30)) for _ in range(count + 1)
    ]
    trials: Trials[int] = Trials(lambda index: scores[index])
    winner = trials.best(0, range(1, count + 1))
    means = [score.mean for score in scores]
    if winner:
        assert means[winner] == max(means[1:])
        gains = scores[winner].values - scores[0].values
        assert gains.mean() > max(2 * gains.std() / np.sqrt(30), 0.01)
    else:
        best = scores[1 + int(np.argmax(means[1:]))]
        assert not best.surely_above(scores[0])


def test_what_cannot_be_distinguished_stays_as_usual() -> None:
    values = np.linspace(-2, -1, 30)
    scores = {"usual": fixed(values), "other": fixed(values + 0.02)}
    measured: list[str] = []

    def measure(name: str) -> Score:
        measured.append(name)
        return scores[name]

    trials = Trials(measure)
    assert trials.best("usual", ["other"]) == "other"  # better by 0.02 at every place
    for others in (values + 0.02 + np.tile([0.1, -0.1], 15), values + 0.009):
        scores["other"] = fixed(others)
        trials = Trials(measure)
        assert trials.best("usual", ["other"]) == "usual"
        trials.best("other", ["usual"])
    assert measured == ["other", "usual"] * 3


@given(seeds, st.integers(1, 3), st.integers(0, 2))
def test_what_a_text_says_again_counts_once(
    seed: int, prompt_tokens: int, later: int
) -> None:
    drawn = np.random.default_rng(seed)
    rows, steps = 3, 9
    ids = drawn.integers(0, 2, size=(rows, prompt_tokens + steps))
    target, drafted = logits(seed, rows, steps, 2), logits(seed + 1, rows, steps, 2)
    text = OwnText(mx.array(ids), prompt_tokens, log_probs(target), States(()))
    first = prompt_tokens + later
    score = text.score(drafted[:, later:], first)
    seen: list[tuple[int, ...]] = []
    values, missed = [], []
    for row in range(rows):
        for at in range(first, prompt_tokens + steps):
            key = tuple(ids[row, max(0, at - 2) : at + 1].tolist())
            if key not in seen:
                seen.append(key)
                probs = np.exp(np.array(log_probs(target[row, at - prompt_tokens])))
                guess = np.array(log_probs(drafted[row, at - prompt_tokens]))
                values.append((probs * guess).sum())
                missed.append(-50 * probs[0])  # -50: id 0 has no column
    assert np.allclose(score.values, values, atol=1e-5)
    reached = text.score(drafted[:, later:, :1], first, mx.array([1]))
    assert np.allclose(reached.values, missed, atol=1e-4)
