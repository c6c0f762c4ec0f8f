"""All options together give mlx-lm's distribution, for any number of rows."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_xtc,
    make_logits_processors,
    make_sampler,
)

from mlx_speculation.samplers import Chooser, Rows, Sampling
from mlx_speculation.samplers.logits.filters import top_p
from mlx_speculation.samplers.noise.gumbel import CHOICE, position_keys, stream_key
from mlx_speculation.samplers.noise.round_keys import XTC, coins
from support.sampling.sampling_options import filter_options, penalty_options
from support.sampling.scripted_rows import alternating

VOCAB = 40
KEYS = st.integers(0, 10**6)
TEMPERATURES = st.sampled_from([0.0, 0.5, 1.0, 1.7])


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    """Run mlx-lm's filters without compiling them for every option."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    ids = st.integers(0, VOCAB - 1)
    known = draw(st.lists(ids, min_size=1, max_size=12))
    drafted = draw(st.lists(ids, max_size=5))
    ahead = mx.array(drafted, dtype=mx.uint32) if drafted else None
    return Rows(known, ahead, len(drafted) + 1, draw(st.sampled_from([0, 5])))


def some_logits(key: int, count: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    drawn = 2 * mx.random.normal((count, VOCAB), key=mx.random.key(key))
    return drawn.astype(dtype)


@given(
    penalties=penalty_options(VOCAB),
    filters=filter_options(VOCAB),
    temperature=TEMPERATURES,
    rows=some_rows(),
    key=KEYS,
    limit=st.sampled_from([VOCAB, VOCAB - 3]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_rows_together_and_beside_padding_score_as_each_row_alone(
    penalties: dict[str, Any],
    filters: dict[str, Any],
    temperature: float,
    rows: Rows,
    key: int,
    limit: int,
    dtype: mx.Dtype,
) -> None:
    """Scores with noise and coins are equal, with drafts in `ahead` or in `known`."""
    sampling = Sampling(
        **penalties,
        **filters,
        temperature=temperature,
        logits_processors=[alternating],
        seed=key,
    )
    chooser = Chooser(sampling, limit, limit=VOCAB)
    logits = some_logits(key, rows.count, dtype)
    together = chooser.scores(chooser.processed(logits, rows), rows)
    padding = mx.full((rows.count, 9), 50.0, dtype=dtype)
    padded = mx.concatenate([logits[:, :limit], padding], axis=-1)[:, :VOCAB]
    plain = Sampling(**penalties, **filters, temperature=temperature, seed=key)
    unpadded = Chooser(plain, limit, limit=VOCAB)
    beside, without = (
        unpadded.scores(unpadded.processed(wide, rows), rows)
        for wide in (padded, logits)
    )
    assert mx.array_equal(beside, without).item()
    drafted: Any = [] if rows.ahead is None else rows.ahead.tolist()
    for index in range(rows.count):
        one = Rows([*rows.known, *drafted[:index]], start=rows.start)
        assert list(one.positions) == [rows.positions[index]]
        alone = chooser.processed(logits[index : index + 1], one)
        assert mx.array_equal(together[index], chooser.scores(alone, one)[0]).item()


def mlx_lms_kept(processed: mx.array, filters: dict[str, Any], coin: float) -> mx.array:
    """Return which ids are kept by mlx-lm's filters, given a coin.

    The filters run in the order of `make_sampler`. The top-p is ours; test_filters.py
    compares it with mlx-lm's.
    """
    left = processed
    if 0 < filters["top_p"] < 1:
        left = top_p(left, filters["top_p"])
    if filters["min_p"]:
        keep = filters["min_tokens_to_keep"]
        left = apply_min_p(left, filters["min_p"], keep)
    if filters["xtc_probability"] and coin <= filters["xtc_probability"]:
        special = filters["xtc_special_tokens"]
        left = apply_xtc(left, 1.0, filters["xtc_threshold"], special)
    if filters["top_k"]:
        left = apply_top_k(left, filters["top_k"])
    return left > -mx.inf


@given(
    penalties=penalty_options(VOCAB),
    filters=filter_options(VOCAB),
    temperature=TEMPERATURES,
    rows=some_rows(),
    key=KEYS,
)
def test_the_distribution_is_mlx_lms(
    penalties: dict[str, Any],
    filters: dict[str, Any],
    temperature: float,
    rows: Rows,
    key: int,
) -> None:
    """Processors, filters and temperature, in this order, give mlx-lm's bits."""
    sampling = Sampling(**penalties, **filters, temperature=temperature, seed=key)
    chooser = Chooser(sampling, VOCAB)
    logits = some_logits(key, rows.count)
    processed = chooser.processed(logits, rows)
    greedy = chooser.choose(logits, rows)
    thrown: Any = coins(
        position_keys(stream_key(key, XTC), mx.array(list(rows.positions)))
    ).tolist()
    for index in range(rows.count):
        expected = logits[index : index + 1]
        text = rows.some(index).prefixes()[0]
        for processor in make_logits_processors(**penalties):
            expected = processor(text, expected)
        assert mx.array_equal(processed[index], expected[0]).item()
        if temperature == 0:
            log_probs = expected - mx.logsumexp(expected, keepdims=True)
            token = make_sampler(temp=0, **filters)(log_probs)
            assert token.item() == greedy[index].item()
            continue
        kept = mlx_lms_kept(expected, filters, thrown[index])
        distribution = mx.where(kept, expected, -mx.inf) * (1 / temperature)
        got = chooser.log_probs(processed[index : index + 1], rows.some(index))
        assert mx.array_equal(got, distribution).item()


def test_a_coin_belongs_to_its_position() -> None:
    """A coin is the same for any number of rows, and for draft and target."""
    chooser = Chooser(
        Sampling(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.2, seed=4), 3
    )
    logits = mx.log(mx.array([[0.5, 0.4, 0.1]] * 2000))
    rows = Rows([0] * 2000, count=2000)
    dropped = np.isinf(np.array(chooser.log_probs(logits, rows)))[:, 0]
    assert abs(dropped.mean() - 0.3) < 4.9 * np.sqrt(0.3 * 0.7 / 2000)
    for first, count in ((1, 1), (7, 3), (1990, 11)):
        some = Rows([0] * (first + count - 1), count=count)
        again = np.isinf(np.array(chooser.log_probs(logits[:count], some)))[:, 0]
        assert again.tolist() == dropped[first - 1 : first - 1 + count].tolist()
    for other in (stream_key(4, CHOICE), stream_key(5, XTC)):
        keys = position_keys(other, mx.arange(1, 2001))
        applied = np.array(coins(keys)) <= 0.3
        assert 0.4 < (applied == dropped).mean() < 0.76  # 0.58 if independent
