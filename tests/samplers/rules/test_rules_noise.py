"""Draws of a round depend on seed, round, position and purpose, and nothing else."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation.samplers.noise import round_keys as round_noise
from mlx_speculation.samplers.noise.gumbel import CHOICE, gumbel_of, stream_key
from mlx_speculation.samplers.noise.round_keys import (
    COIN,
    DRAFT,
    RESIDUAL,
    XTC,
    coins,
    round_keys,
)

SEEDS = st.integers(0, 2**64 - 1)
PLACES = st.integers(0, 2**32 - 1)


def distinct(keys: mx.array) -> int:
    return len({tuple(key) for key in np.array(keys).reshape(-1, 2).tolist()})


def test_purposes_differ() -> None:
    assert sorted([CHOICE, COIN, RESIDUAL, DRAFT, XTC]) == [1, 2, 3, 4, 5]


def test_no_two_rounds_and_positions_share_a_key() -> None:
    """Keys differ for all pairs of a round and a position, small and large ones."""
    stream = stream_key(7, COIN)
    places = mx.array([*range(300), 2**16, 2**16 + 1, 2**24, 2**31, 2**32 - 1])
    starts = mx.repeat(places, places.size)
    positions = mx.tile(places, places.size)
    keys = round_keys(stream, starts.astype(mx.uint32), positions.astype(mx.uint32))
    assert keys.dtype == mx.uint32
    assert distinct(keys) == places.size**2


@given(
    pairs=st.lists(st.tuples(PLACES, PLACES), min_size=1, max_size=8),
    seed=SEEDS,
    width=st.integers(1, 200),
)
@settings(max_examples=50)
def test_a_draw_depends_on_no_other_row(
    pairs: list[tuple[int, int]], seed: int, width: int
) -> None:
    stream = stream_key(seed, RESIDUAL)
    starts, positions = mx.array(pairs, dtype=mx.uint32).T
    keys = round_keys(stream, starts, positions)
    assert keys.shape == (len(pairs), 2)
    together, noise = coins(keys), gumbel_of(keys, width)
    assert together.dtype == noise.dtype == mx.float32
    assert noise.shape == (len(pairs), width)
    for row, (start, position) in enumerate(pairs):
        one, other = (mx.array([n], dtype=mx.uint32) for n in (start, position))
        alone = round_keys(stream, one, other)
        assert coins(alone).item() == together[row].item()
        assert mx.array_equal(gumbel_of(alone, width)[0], noise[row]).item()
        assert mx.random.uniform(key=alone[0]).item() == together[row].item()
        row_noise = mx.random.gumbel((width,), key=alone[0])
        assert mx.array_equal(row_noise, noise[row]).item()
    assert ((together >= 0) & (together < 1)).all().item()


def test_one_round_is_broadcast_over_its_positions_and_every_row_has_a_seed() -> None:
    stream = stream_key(3, COIN)
    whole = round_keys(stream, mx.array(5), mx.arange(5, 9))
    each = round_keys(stream, mx.array([5, 5, 5, 5]), mx.arange(5, 9))
    assert mx.array_equal(whole, each).item()
    seeds = mx.stack([stream_key(seed, COIN) for seed in (3, 4)])
    rows = round_keys(seeds, mx.array([5, 6]), mx.array([7, 7]))
    for row, seed in enumerate((3, 4)):
        alone = round_keys(stream_key(seed, COIN), mx.array(5 + row), mx.array([7]))
        assert mx.array_equal(rows[row], alone[0]).item()


def test_draws_differ_by_seed_purpose_round_and_position() -> None:
    keys = [
        round_keys(stream_key(seed, purpose), mx.array([start]), mx.array([position]))
        for seed in (0, 1, 2**32, 2**63)
        for purpose in (CHOICE, COIN, RESIDUAL, DRAFT, XTC)
        for start in (0, 1, 2)
        for position in (0, 1, 2)
    ]
    together = mx.concatenate(keys)
    assert np.unique(np.array(coins(together))).size == len(keys)
    rows = np.array(gumbel_of(together, 20)).tolist()
    assert len({tuple(row) for row in rows}) == len(keys)


def test_coins_are_uniform_and_gumbel_rows_follow_their_distribution() -> None:
    """Kolmogorov-Smirnov of 90,000 coins and of 200,000 values, at odds of 1e-6."""
    starts, positions = mx.repeat(mx.arange(300), 300), mx.tile(mx.arange(300), 300)
    keys = round_keys(stream_key(1, COIN), starts, positions)
    noise = np.array(gumbel_of(keys[:2000], 100), dtype=np.float64).ravel()
    for values in (np.array(coins(keys), dtype=np.float64), np.exp(-np.exp(-noise))):
        observed = (np.arange(values.size) + 0.5) / values.size
        assert np.abs(np.sort(values) - observed).max() < 2.7 / np.sqrt(values.size)


def test_neighbouring_draws_are_uncorrelated() -> None:
    """Correlations are below 5 standard errors, also if round + position is equal."""

    def drawn(purpose: int, round_step: int, step: int) -> np.ndarray:
        starts = mx.repeat(mx.arange(300), 300) + round_step
        positions = mx.tile(mx.arange(300), 300) + step
        keys = round_keys(stream_key(1, purpose), starts, positions)
        return np.array(coins(keys), dtype=np.float64)

    first = drawn(COIN, 0, 0)
    others = [(COIN, 1, 0), (COIN, 0, 1), (COIN, 1, 1), (COIN, 1, -1), (DRAFT, 0, 0)]
    for other in others[:3] + others[4:]:
        correlation = np.corrcoef(first, drawn(*other))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(first.size)
    inner = first.reshape(300, 300)[:-1, 1:].ravel()
    assert abs(np.corrcoef(inner, first.reshape(300, 300)[1:, :-1].ravel())[0, 1]) < (
        5 / np.sqrt(inner.size)
    )


def test_keys_are_made_on_the_device() -> None:
    """The position, the end of the accepted tokens, is not known to the host."""

    def keys(accepted: mx.array) -> mx.array:
        return round_keys(stream_key(2, RESIDUAL), mx.array(10), 10 + accepted)

    mx.vmap(keys)(mx.array([0, 3, 5]))  # tracing refuses any evaluation
    together = keys(mx.array([0, 3, 5]))
    for row, accepted in zip(together, (0, 3, 5), strict=True):
        assert mx.array_equal(row, keys(mx.array([accepted]))[0]).item()


def test_the_purposes_are_listed_in_one_place() -> None:
    named = {n: v for n, v in vars(round_noise).items() if n.isupper()}
    assert named == {"COIN": 2, "RESIDUAL": 3, "DRAFT": 4, "XTC": 5}
