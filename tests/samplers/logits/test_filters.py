"""Filters are defined as in mlx-lm, but sum exactly; rows are independent."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_p, apply_xtc

from mlx_speculation.samplers import Sampling
from mlx_speculation.samplers.logits.filters import (
    apply_filters,
    min_p,
    top_k,
    top_p,
    xtc,
)
from mlx_speculation.samplers.logits.top_p import UNITS, nucleus_edge
from support.sampling.sampling_options import filter_options


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    """Run mlx-lm's filters without compiling them for every share."""
    mx.disable_compile()
    yield
    mx.enable_compile()


KEYS = st.integers(0, 10**6)
SHARES = st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9]) | st.floats(0.01, 0.99)


def some_log_probs(
    key: int, shape: tuple[int, ...], spread: float = 3.0, ties: bool = False
) -> mx.array:
    logits = spread * mx.random.normal(shape, key=mx.random.key(key))
    if ties:
        logits = mx.round(logits)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def kept(filtered: mx.array) -> Any:
    return np.isfinite(np.array(filtered))


def mass_above(log_probs: mx.array) -> Any:
    """Return for each token the sum of all larger probabilities, float64."""
    probs = np.exp(np.array(log_probs).astype(np.float64))
    above = np.empty_like(probs)
    for row, sums in zip(probs, above, strict=True):
        _, group = np.unique(-row, return_inverse=True)  # ties are not above each other
        mass = np.bincount(group, weights=row)
        sums[:] = (np.cumsum(mass) - mass)[group]
    return above / probs.sum(axis=-1, keepdims=True)


@example(key=810, vocab=62, share=0.999999999, at_once=1, spread=30.0, ties=False)
@given(
    key=KEYS,
    vocab=st.integers(1, 70),
    share=SHARES,
    at_once=st.sampled_from([1, 2, 3, 8, 1000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    ties=st.booleans(),
)
def test_the_edge_of_top_p_is_exact_in_whole_numbers(
    key: int, vocab: int, share: float, at_once: int, spread: float, ties: bool
) -> None:
    probs = mx.exp(some_log_probs(key, (2, 3, vocab), spread, ties))
    edges = np.array(nucleus_edge(probs, share, at_once))
    assert edges.shape == (2, 3, 1)
    for row, (edge,) in zip(
        np.array(probs).reshape(6, vocab), edges.reshape(6, 1), strict=True
    ):
        units = [round(float(p) * UNITS) for p in row]
        limit = max(-(-math.ceil(share * 2**32) * sum(units) // 2**32), 1)
        stays = [
            p
            for p in row
            if sum(u for u, q in zip(units, row, strict=True) if q > p) < limit
        ]
        assert edge == min(stays)


@pytest.mark.parametrize(
    ("probs", "share", "edge"),
    [
        # The first two together have exactly the share: the third is not needed.
        ([0.5, 0.25, 0.125, 0.125], 0.75, 0.25),
        # The sum is above 1, so the first has too little: the second is needed too.
        ([0.5, 0.375, 0.125, 2.0**-31], 0.5, 0.375),
        ([0.5, 0.375, 0.125, 0.0], 0.5, 0.5),
        # A row of zeros has the edge 0, and not a value of the other row.
        ([0.0, 0.0, 0.0, 0.0], 0.5, 0.0),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_edge_of_top_p_at_the_very_share(
    probs: list[float], share: float, edge: float, at_once: int
) -> None:
    rows = mx.array([probs, [0.4, 0.3, 0.2, 0.1]])
    assert nucleus_edge(rows, share, at_once)[0].item() == edge


# The edge falls between a group of ties and what is above it.
@example(key=7482, vocab=155, share=0.999, ties=True)
@given(key=KEYS, vocab=st.integers(1, 200), share=SHARES, ties=st.booleans())
def test_top_p_equals_mlx_lms_but_at_the_edge_of_float32_sums(
    key: int, vocab: int, share: float, ties: bool
) -> None:
    log_probs = some_log_probs(key, (3, vocab), ties=ties)
    got = top_p(log_probs, share)
    differs = kept(got) != kept(apply_top_p(log_probs, share))
    event(f"{differs.any()=}")
    assert (abs(mass_above(log_probs)[differs] - share) < vocab * 2.0**-24).all()
    assert mx.array_equal(mx.where(mx.isinf(got), log_probs, got), log_probs).item()


@pytest.mark.parametrize(("vocab", "rows", "most"), [(4096, 100, 5), (151_936, 1, 100)])
def test_how_often_top_p_differs_from_mlx_lms_for_large_vocabularies(
    vocab: int, rows: int, most: int
) -> None:
    """Float32 sums are inexact; where results differ, ours are the exact ones."""
    log_probs = some_log_probs(7, (rows, vocab))
    got, theirs = kept(top_p(log_probs, 0.9)), kept(apply_top_p(log_probs, 0.9))
    differs = got != theirs
    assert differs.sum() <= most
    exact = mass_above(log_probs) < 0.9
    assert (got != exact).sum() <= differs.sum()
    assert (got != exact).sum() <= 1


@given(key=KEYS, k=st.integers(1, 12), ties=st.booleans())
def test_top_k_keeps_k_tokens_the_lowest_ids_among_equals(
    key: int, k: int, ties: bool
) -> None:
    log_probs = some_log_probs(key, (3, 10), ties=ties)
    for row, mask in zip(np.array(log_probs), kept(top_k(log_probs, k)), strict=True):
        order = sorted(range(10), key=lambda i: (-row[i], i))
        assert set(np.flatnonzero(mask)) == set(order[: min(k, 10)])


@given(key=KEYS, share=st.sampled_from([1e-6, 0.05, 0.5, 1.0]), keep=st.integers(1, 12))
def test_min_p_equals_mlx_lms(key: int, share: float, keep: int) -> None:
    """With fewer tokens than `keep`, all are kept, but mlx-lm fails."""
    log_probs = some_log_probs(key, (3, 10))
    expected = apply_min_p(log_probs, share, min(keep, 10))
    assert mx.array_equal(min_p(log_probs, share, keep), expected).item()


def test_min_p_keeps_the_lowest_ids_among_equals() -> None:
    log_probs = mx.log(mx.array([[0.1, 0.5, 0.1, 0.1, 0.2]]))
    assert kept(min_p(log_probs, 0.9, 3)).tolist() == [[True, True, False, False, True]]


@given(
    key=KEYS,
    threshold=st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.5]),
    special=st.lists(st.integers(0, 9), max_size=3),
    spread=st.sampled_from([0.5, 1.5, 3.0]),
    ties=st.booleans(),
)
def test_xtc_equals_mlx_lms_given_the_coin(
    key: int, threshold: float, special: list[int], spread: float, ties: bool
) -> None:
    log_probs = some_log_probs(key, (4, 10), spread, ties)
    theirs = apply_xtc(log_probs, 1.0, threshold, special)
    applied = mx.array([True, False, True, False])
    got = xtc(log_probs, applied, threshold, [*special, 10, 99])
    expected = mx.where(applied[:, None], theirs, log_probs)
    assert mx.array_equal(got, expected).item()


def test_xtc_is_applied_as_often_as_asked_row_by_row() -> None:
    log_probs = mx.log(mx.array([[0.5, 0.4, 0.1]] * 4))
    coins = mx.array([0.0, 0.3, 0.31, 0.99])
    options = Sampling(xtc_probability=0.3, xtc_threshold=0.2)
    dropped = ~kept(apply_filters(log_probs, options, coins))
    assert dropped.tolist() == [[True, False, False]] * 2 + [[False] * 3] * 2


@given(
    options=filter_options(30),
    key=KEYS,
    vocab=st.sampled_from([30, 1023, 2050, 5000]),
    rows=st.integers(2, 6),
    ties=st.booleans(),
)
def test_rows_together_and_beside_padding_equal_each_row_alone(
    options: dict[str, Any], key: int, vocab: int, rows: int, ties: bool
) -> None:
    """Equal bits let a verify choose like a plain step."""
    log_probs = some_log_probs(key, (rows, vocab), 1.5, ties)
    coins = mx.random.uniform(shape=(rows,), key=mx.random.key(key))
    sampling = Sampling(**options)
    together = apply_filters(log_probs, sampling, coins)
    padding = mx.full((rows, 77), 5.0)
    padded = mx.concatenate([padding, log_probs, padding], axis=-1)
    beside = apply_filters(padded[:, 77:-77], sampling, coins)
    assert mx.array_equal(together, beside).item()
    stacked = apply_filters(log_probs[None], sampling, coins[None])
    assert mx.array_equal(together, stacked[0]).item()
    for index in range(rows):
        row = slice(index, index + 1)
        alone = apply_filters(log_probs[row], sampling, coins[row])
        assert mx.array_equal(together[row], alone).item()


@pytest.mark.parametrize("vocab", [5, 3000])
def test_a_row_without_a_choice_is_filtered_without_harm(vocab: int) -> None:
    """Other code refuses such a row; filters must not read it out of bounds."""
    options = Sampling(top_p=0.9, min_p=0.1, xtc_probability=1.0, top_k=3)
    for value in (mx.nan, -mx.inf):
        log_probs = mx.full((2, vocab), value)
        mx.eval(apply_filters(log_probs, options, mx.zeros((2,))))
