"""Options can be compared and stored; several samples get derived seeds."""

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Sampling, derived_seed

SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, ["temperature", "-0.1", "0"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_p": 1.5}, ["top_p", "1.5", "1"]),
        ({"min_p": -1}, ["min_p", "-1"]),
        ({"top_k": -3}, ["top_k", "-3"]),
        ({"top_k": 2.0}, ["top_k", "2.0", "whole number"]),
        ({"min_tokens_to_keep": 0}, ["min_tokens_to_keep", "0", "1"]),
        ({"xtc_probability": 1.1}, ["xtc_probability", "1.1", "1"]),
        ({"xtc_threshold": 0.6}, ["xtc_threshold", "0.6", "0.5"]),
        ({"xtc_special_tokens": [3, -1]}, ["xtc_special_tokens", "-1"]),
        ({"xtc_special_tokens": 13}, ["xtc_special_tokens", "13", "list"]),
        ({"repetition_penalty": -1.0}, ["repetition_penalty", "-1.0", "0"]),
        ({"repetition_context_size": -1}, ["repetition_context_size", "-1"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty", "nan"]),
        ({"presence_context_size": 2.5}, ["presence_context_size", "2.5"]),
        ({"frequency_penalty": float("inf")}, ["frequency_penalty", "inf"]),
        ({"frequency_context_size": None}, ["frequency_context_size", "None"]),
        ({"draft_temperature": -1}, ["draft_temperature", "-1"]),
        ({"logit_bias": {-2: 1.0}}, ["logit_bias", "-2"]),
        ({"logit_bias": {"7": 1.0}}, ["logit_bias", "'7'"]),
        ({"logit_bias": {7: float("inf")}}, ["logit_bias", "7", "inf"]),
        ({"logit_bias": {7: None}}, ["logit_bias", "7", "None"]),
        ({"logit_bias": 5}, ["logit_bias", "5", "list"]),
        ({"logit_bias": [7, 8]}, ["logit_bias", "7", "{50: -2.5}"]),
        ({"logit_bias": [(7, 1.0), (7, 2.0)]}, ["logit_bias", "2 values", "1 diff"]),
        ({"logits_processors": len}, ["logits_processors", "len", "list"]),
        ({"logits_processors": ["x"]}, ["logits processor", "str", "callable"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": 2**64}, ["seed", str(2**64), str(2**64 - 1)]),
    ],
)
def test_bad_sampling_options_are_refused(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(**options)
    for word in words:
        assert word in str(caught.value)


def test_names_and_defaults_are_mlx_lms() -> None:
    options = Sampling()
    for theirs in (make_sampler, make_logits_processors):
        for name, parameter in inspect.signature(theirs).parameters.items():
            ours = getattr(options, {"temp": "temperature"}.get(name, name))
            assert ours == (() if isinstance(ours, tuple) else parameter.default)


def test_collections_are_kept_as_tuples() -> None:
    bias, special, processors = {5: -1, 2: -math.inf}, [3, 4], [max]
    options = Sampling(
        logit_bias=bias, xtc_special_tokens=special, logits_processors=processors
    )
    bias[9] = 1
    special.append(9)
    processors.append(min)
    assert options.biases == ((5, -1.0), (2, -math.inf))
    assert options.xtc_special_tokens == (3, 4)
    assert options.logits_processors == (max,)
    again = Sampling(
        logit_bias=[(5, -1.0), (2, -math.inf)],
        xtc_special_tokens=(3, 4),
        logits_processors=(max,),
    )
    assert again == options
    assert hash(again) == hash(options)
    assert replace(options, top_k=3).biases == options.biases
    assert Sampling(logit_bias=None).biases == ()


def test_zero_and_none_are_off() -> None:
    off = Sampling(repetition_penalty=0, presence_penalty=None, frequency_penalty=0.0)
    assert not off.filters
    assert not replace(off, top_p=1.0, xtc_threshold=0.5).filters
    for options in ({"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 1}):
        assert Sampling(**options).filters
    assert Sampling(xtc_probability=0.1).filters


@given(seed=SEEDS, other=SEEDS)
def test_derived_seeds_differ_between_samples_and_between_requests(
    seed: int, other: int
) -> None:
    """The first sample keeps the request's seed."""
    assert derived_seed(seed, 0) == seed
    derived = {derived_seed(seed, index) for index in range(300)}
    assert len(derived) == 300
    assert all(0 <= value < 2**64 for value in derived)
    if other != seed:
        assert not derived & {derived_seed(other, index) for index in range(300)}


def test_many_derived_seeds_differ() -> None:
    """A weak hash would repeat seeds that are derived from consecutive numbers."""
    derived = {derived_seed(seed, i) for seed in range(200) for i in range(1000)}
    assert len(derived) == 200_000


def test_derived_seeds_stay_what_they_are() -> None:
    """Another hash would change the texts of all derived seeds."""
    assert derived_seed(1, 1) == PINNED[0]
    assert derived_seed(2**64 - 1, 7) == PINNED[1]


PINNED = (3836683324925129187, 17750248655755693033)


@pytest.mark.parametrize(
    ("seed", "index", "words"),
    [(-1, 0, "seed is -1"), (0, -1, "index is -1"), (2**64, 1, "seed is 184467")],
)
def test_seeds_and_indexes_out_of_range_are_refused(
    seed: int, index: int, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        derived_seed(seed, index)
