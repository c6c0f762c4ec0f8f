"""Values that must not change between versions: the noise of a seed, and defaults."""

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Chooser, Rows, Sampling, Verifier
from mlx_speculation.samplers.noise import gumbel as noise_module
from mlx_speculation.samplers.noise.gumbel import (
    CHOICE,
    GumbelNoise,
    gumbel,
    stream_key,
)
from mlx_speculation.samplers.sampling import SMALLEST_TEMPERATURE

# Noise at three positions, for the seed 12345678901234567890 (more than 32 bits).
NOISE = [
    [0.7725138, 0.3329537, 0.8681505, 0.1716988, 0.3652563],
    [-1.139361, 0.4156085, 0.9692146, -0.06572006, -0.8915141],
    [0.1171993, -0.2081227, 0.3983995, 2.321512, 0.7018868],
]
CHOSEN = {
    "keyed": [21, 21, 18, 18, 16, 16, 41, 41, 8, 8, 31, 31, 29, 29, 25, 25],
    "rejection": [7, 12, 39, 12, 44, 40, 21, 9, 15, 4, 19, 31, 47, 11, 0, 21],
    "block": [7, 12, 39, 12, 44, 40, 21, 9, 15, 4, 19, 31, 47, 11, 0, 21],
}


def test_a_seed_has_the_noise_that_it_always_had() -> None:
    """Other noise would change every sampled text of every user."""
    key = stream_key(12345678901234567890, CHOICE)
    noise = gumbel(key, mx.array([0, 1, 100_000]), 5)
    np.testing.assert_allclose(np.array(noise), np.array(NOISE), rtol=1e-5)


@pytest.mark.parametrize("acceptance", ["keyed", "rejection", "block"])
def test_a_seed_chooses_what_it_always_chose(acceptance: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    verifier = Verifier(Chooser(sampling, 50), acceptance)
    chosen: list[int] = []
    for position in range(8):
        rows = Rows([0] * position)
        draft = verifier.propose(mx.zeros((1, 50)), rows).tokens
        plain = verifier.verify(mx.zeros((1, 50)), rows).tokens
        chosen += [draft.item(), plain.item()]  # type: ignore[list-item]
    assert chosen == CHOSEN[acceptance]


def test_defaults_are_mlx_lms() -> None:
    """0, None and an empty collection all mean off."""
    ours = {field.name: getattr(Sampling(), field.name) for field in fields(Sampling)}
    renamed = {"temp": "temperature"}
    for function in (make_sampler, make_logits_processors):
        for name, parameter in inspect.signature(function).parameters.items():
            value = ours[renamed.get(name, name)]
            assert value == parameter.default or not (value or parameter.default), name


@pytest.mark.parametrize(
    "value",
    [
        Sampling(),
        Rows([1]),
        Verifier(Chooser(Sampling(seed=0), 3)).propose(mx.zeros((1, 3)), Rows([1])),
        Verifier(Chooser(Sampling(seed=0), 3)).verify(mx.zeros((1, 3)), Rows([1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_passed_around_cannot_be_changed(value: Any) -> None:
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize("name", ["top_p", "min_p", "xtc_probability"])
@pytest.mark.parametrize("wrong", [-0.01, 1.01])
def test_a_share_is_from_0_to_1(name: str, wrong: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is {wrong}"):
        Sampling(**{name: wrong})  # type: ignore[arg-type]


def test_the_smallest_temperature_draws_by_chance() -> None:
    assert not Sampling(temperature=SMALLEST_TEMPERATURE).greedy
    assert Sampling(temperature=SMALLEST_TEMPERATURE * 0.999).greedy


@pytest.mark.parametrize("width", [40, 4096, 32_768])
def test_noise_of_a_long_text_is_forgotten(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow, and each block of positions is drawn once."""
    drawn: list[int] = []

    def counted(key: mx.array, positions: mx.array, width: int) -> mx.array:
        drawn.append(positions.shape[0])
        return gumbel(key, positions, width)

    monkeypatch.setattr(noise_module, "gumbel", counted)
    noise = GumbelNoise(stream_key(1, CHOICE), width)
    for start in range(500):
        noise.rows(range(start, start + 5))
        assert len(noise._drawn) <= 2
    assert set(drawn) == {min(noise_module.MOST_ROWS, 2**20 // width)}
    assert len(drawn) <= 504 / drawn[0] + 1
