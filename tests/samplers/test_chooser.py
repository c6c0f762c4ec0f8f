"""Choices: the same noise for the same id and position, and mlx-lm's distribution."""

from collections.abc import Callable
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_top_p

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Chooser, Rows, Sampling
from mlx_speculation.samplers.acceptance import count_accepted, normalizers, peaks
from mlx_speculation.samplers.noise import gumbel as noises
from mlx_speculation.samplers.noise.gumbel import (
    CHOICE,
    GumbelNoise,
    gumbel,
    stream_key,
)

SEEDS = st.integers(0, 2**64 - 1)


def at(positions: range) -> Rows:
    """Return the rows for these positions, in a text of zeros."""
    return Rows([0] * positions[-1], count=len(positions))


def rows(key: int, count: int, vocab: int) -> mx.array:
    return 3 * mx.random.normal((count, vocab), key=mx.random.key(key))


@given(
    seed=SEEDS,
    positions=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    width=st.integers(1, 200),
)
@settings(max_examples=60)
def test_noise_depends_on_seed_position_and_id_alone(
    seed: int, positions: list[int], width: int
) -> None:
    key = stream_key(seed, CHOICE)
    together = gumbel(key, mx.array(list(positions)), width)
    assert together.dtype == mx.float32
    for row, position in zip(together, positions, strict=True):
        alone = gumbel(key, mx.array([position]), width)[0]
        assert mx.array_equal(row, alone).item()
        assert mx.isfinite(alone).all().item()


@given(
    width=st.sampled_from([3, 160, 4_200]),
    blocks=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 5)), min_size=1, max_size=4
    ),
    scattered=st.lists(st.integers(0, 300), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
@patch.object(noises, "BLOCK_VALUES", 2**12)  # blocks of 64, 25 and 1 positions
def test_noise_drawn_in_blocks_is_the_same_noise(
    width: int, blocks: list[tuple[int, int]], scattered: list[int]
) -> None:
    """Calls read one block or two; long or scattered calls draw without blocks."""
    key = stream_key(5, CHOICE)
    noise = GumbelNoise(key, width)
    for positions in [*(range(a, a + n) for a, n in blocks), scattered]:
        expected = gumbel(key, mx.array(list(positions)), width)
        assert mx.array_equal(noise.rows(positions), expected).item()


def test_noise_differs_between_positions_seeds_and_purposes() -> None:
    drawn = [
        gumbel(stream_key(seed, purpose), mx.array([position]), 64)
        for seed in (0, 1, 2**32, 2**63)
        for purpose in (1, 2)
        for position in (0, 1, 7)
    ]
    values = {tuple(np.array(noise)[0].tolist()) for noise in drawn}
    assert len(values) == len(drawn)


@given(
    key=st.integers(0, 1000),
    count=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.0, 0.3, 0.9]),
    k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=60)
def test_a_choice_depends_on_neither_the_number_of_rows_nor_the_padding(
    key: int, count: int, temperature: float, top_p: float, k: int, min_p: float
) -> None:
    sampling = Sampling(
        temperature=temperature, top_p=top_p, top_k=k, min_p=min_p, seed=key
    )
    chooser = Chooser(sampling, 50)
    logits = rows(key, count, 50)
    positions = range(7, 7 + count)
    together = chooser.choose(logits, at(positions))
    padded = mx.concatenate([logits, mx.full((count, 14), 100.0)], axis=-1)
    assert mx.array_equal(together, chooser.choose(padded, at(positions))).item()
    for index in range(count):
        one = at(positions[index : index + 1])
        alone = chooser.choose(logits[index : index + 1], one)
        assert alone.item() == together[index].item()


def test_ids_at_the_limit_and_missing_ones_are_never_chosen() -> None:
    sampling = Sampling(temperature=5.0, seed=1)
    missing = mx.array([3, 17])
    chooser = Chooser(sampling, 50, limit=40, missing=missing)
    logits = mx.zeros((400, 60))
    chosen = set(np.array(chooser.choose(logits, at(range(400)))).tolist())
    assert chosen == set(range(40)) - {3, 17}
    greedy = Chooser(Sampling(seed=0), 50, limit=40, missing=missing)
    tall = mx.zeros((1, 60)).at[:, mx.array([3, 17, 45, 55])].add(9.0)
    assert greedy.choose(tall, at(range(1))).item() == 0


def test_a_missing_id_past_the_logits_touches_no_other_row() -> None:
    chooser = Chooser(Sampling(seed=0), 256, missing=mx.array([3, 240]))
    logits = mx.zeros((2, 200)).at[1, 40].add(5.0).at[:, 3].add(9.0)
    assert chooser.choose(logits, at(range(2))).tolist() == [0, 40]


def test_a_temperature_that_overflows_is_greedy() -> None:
    logits = rows(1, 5, 40)
    tiny = Chooser(Sampling(temperature=1e-39, seed=0), 40)
    assert mx.array_equal(
        tiny.choose(logits, at(range(5))), mx.argmax(logits, axis=-1)
    ).item()


def test_a_chooser_needs_a_seed() -> None:
    with pytest.raises(InvalidRequestError, match="seed is None"):
        Chooser(Sampling(), 10)


@pytest.mark.parametrize("top_p", [0.0, 0.7])
def test_choices_follow_the_filtered_tempered_distribution(top_p: float) -> None:
    """Chi-square over 60,000 positions detects a total variation of 0.02."""
    count, vocab = 60_000, 16
    logits = mx.broadcast_to(rows(5, 1, vocab) / 3, (count, vocab))
    sampling = Sampling(temperature=0.8, top_p=top_p, seed=9)
    chosen = Chooser(sampling, vocab).choose(logits, at(range(count)))
    log_probs = logits[:1] - mx.logsumexp(logits[:1], axis=-1, keepdims=True)
    if top_p:
        log_probs = apply_top_p(log_probs, top_p)
    distribution = np.array(mx.softmax(log_probs / 0.8, axis=-1), dtype=np.float64)[0]
    observed = np.bincount(np.array(chosen), minlength=vocab)
    kept = distribution > 0
    assert observed[~kept].sum() == 0
    expected = distribution[kept] / distribution[kept].sum() * count
    chi_square = ((observed[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 64  # 15 degrees of freedom: p = 5e-8 beyond 64


def test_two_distributions_that_share_the_noise_agree_as_the_closed_form_says() -> None:
    """P(both choose x) = 1 / sum_y max(p_y / p_x, q_y / q_x), summed over x."""
    count, vocab = 60_000, 8
    distributions = [mx.softmax(rows(key, 1, vocab)[0] / 3, axis=-1) for key in (1, 2)]
    sampling = Sampling(temperature=1.0, seed=2)
    chooser = Chooser(sampling, vocab)
    drawn = [
        chooser.choose(
            mx.broadcast_to(mx.log(distribution)[None], (count, vocab)),
            at(range(count)),
        )
        for distribution in distributions
    ]
    p, q = (np.array(distribution, dtype=np.float64) for distribution in distributions)
    closed = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(vocab))
    observed = float((drawn[0] == drawn[1]).mean())
    assert abs(observed - closed) < 5 * np.sqrt(closed * (1 - closed) / count)
    assert closed > float((p * q).sum())


@given(
    drafted=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_accepted_prefix_is_what_equals_the_targets_choices(
    drafted: list[int], data: st.DataObject
) -> None:
    size = len(drafted) + 1
    choices = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    expected = 0
    while expected < len(drafted) and drafted[expected] == choices[expected]:
        expected += 1
    got = count_accepted(mx.array(drafted), mx.array(choices))
    assert got.item() == expected


def test_padding_after_a_shorter_draft_is_never_accepted() -> None:
    drafted, choices = mx.array([[5, 0], [5, 0]]), mx.array([[5, 0, 7], [5, 0, 7]])
    got = count_accepted(drafted, choices, mx.array([1, 2]))
    assert got.tolist() == [1, 2]


@pytest.mark.parametrize("mark", [normalizers, peaks])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_mark_of_a_row_without_a_choice_is_not_finite(
    dtype: mx.Dtype, mark: Callable[[mx.array], mx.array]
) -> None:
    nothing, nan, inf = -mx.inf, mx.nan, mx.inf
    largest = 65504.0 if dtype == mx.float16 else 3e38
    usable = [[1.0, 2, 3], [nothing, 1, 2], [-5, nothing, nothing], [largest] * 3]
    unusable = [[nan, 1, 2], [1, nan, 2], [1, 2, nan], [nothing] * 3, [inf, 1, 2]]
    for row in usable:
        assert mx.isfinite(mark(mx.array([row], dtype=dtype))).item()
    for row in unusable:
        assert not mx.isfinite(mark(mx.array([row], dtype=dtype))).item()
    together = mark(mx.array(usable + unusable, dtype=dtype))
    assert mx.isfinite(together).tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("width", [1, 2, 7, 8, 17, 33, 64, 257, 4096, 4099])
def test_the_mark_shows_a_nan_anywhere(width: int, dtype: mx.Dtype) -> None:
    """On a CPU the mark is the largest value, which is NaN if any value is."""
    for place in {0, 1, 8, 16, width // 2, width - 2, width - 1} & set(range(width)):
        for count, row in [(1, 0), (2, 1), (5, 3)]:
            logits = np.random.default_rng(place).normal(size=(count, width))
            logits[row, place] = np.nan
            logits[row, (place + 1) % width] = np.nan if width == 1 else np.inf
            marks = peaks(mx.array(logits, dtype=dtype))
            assert mx.isnan(marks).tolist() == [index == row for index in range(count)]


def test_normalizers_make_log_probabilities() -> None:
    logits = rows(3, 4, 30)
    log_probs = logits - normalizers(logits)[:, None]
    assert mx.allclose(mx.exp(log_probs).sum(axis=-1), mx.ones(4)).item()
