"""Samplers of mlx-lm: recognised ones, and those that draw by themselves."""

import warnings
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mlx_speculation import (
    InvalidRequestError,
    NonFiniteLogitsError,
    SamplerNotice,
    Sampling,
    SpeculativeGenerator,
    make_sampler,
    stream_generate,
)
from support.covering import others_slow
from support.drafters.scripted_drafter import ScriptedDrafter
from support.drop_in import Answer
from support.identity import prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.sampling.sampling_options import filter_options

MODELS = ("llama", "gemma3_text", "qwen3_5", "deepseek_v3(MLA)")
PROMPT = prompt_of(21)


@cache
def model_of(name: str) -> nn.Module:
    return build(name)


def answer(name: str = "llama", **options: Any) -> Answer:
    options = {"max_tokens": 30, **options}
    tokenizer = byte_tokenizer()
    return Answer.of(stream_generate(model_of(name), tokenizer, PROMPT, **options))


@pytest.mark.parametrize("name", others_slow(MODELS, ("llama", "qwen3_5")))
@settings(max_examples=5)
@given(options=filter_options(256), data=st.data())
def test_a_recognised_sampler_keeps_the_text_of_a_seed_whatever_the_draft(
    name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    sampler = make_sampler(temp=0.9, **options)
    seed = data.draw(st.integers(0, 2**64 - 1))
    plain = answer(name, sampler=sampler, seed=seed)
    drafted = answer(
        name,
        sampler=sampler,
        seed=seed,
        draft_model=model_of(name),
        num_draft_tokens=data.draw(st.integers(1, 5)),
    )
    assert drafted.tokens == plain.tokens
    assert drafted.texts == plain.texts
    assert drafted.reasons == plain.reasons


def test_the_seed_is_mlx_random_seeds_unless_it_is_passed() -> None:
    sampler = make_sampler(temp=1.0)
    model_of("llama")  # building it seeds mlx.random

    def text(**options: Any) -> list[int]:
        return answer(sampler=sampler, max_tokens=12, **options).tokens

    mx.random.seed(5)
    first, second = text(), text()
    mx.random.seed(5)
    assert text(draft_model="lookup") == first
    assert text() == second != first
    mx.random.seed(6)
    assert text() not in (first, second)
    assert text(seed=5) == text(seed=5) != text(seed=6)


def test_a_response_names_the_seed_that_repeats_the_text() -> None:
    sampler = make_sampler(temp=1.0)
    model, tokenizer = model_of("llama"), byte_tokenizer()
    responses = list(stream_generate(model, tokenizer, PROMPT, 12, sampler=sampler))
    again = answer(sampler=sampler, max_tokens=12, seed=responses[0].seed)
    assert again.tokens == [response.token for response in responses]
    assert next(stream_generate(model, tokenizer, PROMPT)).seed is None


def random_state() -> list[int]:
    state: Any = mx.random.state
    numbers: list[int] = state[0].tolist()
    return numbers


def test_greedy_text_leaves_mlx_random_alone() -> None:
    state = random_state()
    for sampler in (None, make_sampler(), sample_utils.make_sampler(temp=0.0)):
        text = answer(sampler=sampler, draft_model="lookup")
        assert text.tokens == answer().tokens
    assert random_state() == state


@given(options=filter_options(256), temp=st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_make_sampler_has_the_options_of_the_sampler_that_it_returns(
    options: dict[str, Any], temp: float
) -> None:
    sampling = make_sampler(temp, **options).sampling
    options["xtc_special_tokens"] = tuple(options["xtc_special_tokens"])
    assert sampling == Sampling(temperature=temp, **options)


def test_a_recognised_sampler_works_in_mlx_lm() -> None:
    model, tokenizer = model_of("llama"), byte_tokenizer()
    sampler = make_sampler(temp=1.0, top_p=0.9)
    mx.random.seed(1)
    texts = [
        Answer.of(mlx_lm.stream_generate(model, tokenizer, PROMPT, 9, sampler=sampler))
        for _ in range(2)
    ]
    assert texts[0].tokens != texts[1].tokens
    log_probs = mx.log(mx.softmax(mx.random.normal((3, 32)), axis=-1))
    assert make_sampler()(log_probs).tolist() == log_probs.argmax(axis=-1).tolist()


def test_without_a_draft_any_sampler_gives_mlx_lms_text_of_a_seed() -> None:
    """The sampler is called for the same rows in the same order."""
    for name in ("llama", "qwen3_5"):
        sampler = sample_utils.make_sampler(
            temp=1.0, top_p=0.95, xtc_probability=0.5, top_k=30
        )
        # Building a model seeds mlx.random, so the model is built first.
        model, tokenizer = model_of(name), byte_tokenizer()
        texts = []
        for generate in (mlx_lm.stream_generate, stream_generate):
            mx.random.seed(3)
            stream = generate(model, tokenizer, PROMPT, max_tokens=30, sampler=sampler)
            texts.append(Answer.of(stream).tokens)
        assert texts[0] == texts[1]


class Counting:
    """A sampler that draws with its own keys, and records the shape of each call."""

    def __init__(self, seed: int = 0) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.seed = seed

    def __call__(self, log_probs: mx.array) -> mx.array:
        self.shapes.append(tuple(log_probs.shape))
        key = mx.random.key(self.seed + len(self.shapes))
        return mx.random.categorical(log_probs, key=key)


def test_a_sampler_is_called_for_every_row_of_a_verify() -> None:
    sampler = Counting()
    with pytest.warns(SamplerNotice):
        responses = list(
            stream_generate(
                model_of("llama"),
                byte_tokenizer(),
                PROMPT,
                max_tokens=30,
                sampler=sampler,
                draft_model=build("llama", seed=1),
                num_draft_tokens=3,
            )
        )
    stats = responses[-1].stats
    assert stats is not None
    assert set(sampler.shapes) == {(1, 256)}
    plain = stats.rounds - stats.drafts
    assert stats.drafts > 3
    ahead = 1  # the step submitted after the last one, as in mlx-lm
    assert len(sampler.shapes) == stats.drafted + stats.drafts + plain + ahead


def test_a_sampler_of_ones_own_is_said() -> None:
    sampler = sample_utils.make_sampler(temp=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer(sampler=sampler)  # no draft, no notice
        answer(sampler=sampler, draft_model="lookup", num_draft_tokens=0)
        answer(sampler=make_sampler(temp=1.0), draft_model="lookup")
    with pytest.warns(SamplerNotice, match="make_sampler has mlx-lm's options") as said:
        answer(sampler=sampler, draft_model="lookup")
    assert said[0].filename == __file__


@pytest.mark.filterwarnings("ignore::mlx_speculation.SamplerNotice")
def test_a_greedy_sampler_of_ones_own_gives_the_greedy_text() -> None:
    expected = answer().tokens
    drafter = ScriptedDrafter(PROMPT + expected, right=0.7, ragged=True)
    got = answer(sampler=lambda x: mx.argmax(x, axis=-1), draft_model=drafter)
    assert got.tokens == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: 3,
        lambda x: mx.zeros((2,), mx.int32),
        lambda x: mx.array([0.5]),
        lambda x: x,
    ],
)
def test_a_sampler_that_returns_no_token_id_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="The sampler returned"):
        answer(sampler=wrong)


@pytest.mark.parametrize("token", [256, 10**6, -1])
def test_an_id_that_does_not_exist_is_never_fed(token: int) -> None:
    with pytest.raises(NonFiniteLogitsError, match="a sampler"):
        answer(sampler=lambda x: mx.array([token]))


def test_what_cannot_go_with_a_sampler_is_refused() -> None:
    sampler = sample_utils.make_sampler(temp=1.0)
    with pytest.raises(InvalidRequestError, match="seed is 3, but the sampler draws"):
        answer(sampler=sampler, seed=3)
    with pytest.raises(InvalidRequestError, match="passed with a temperature above"):
        Sampling(sampler=sampler, temperature=0.5)
    with pytest.raises(InvalidRequestError, match="passed with a temperature above"):
        Sampling(sampler=sampler, top_k=5)
    for rule in ("rejection", "block"):
        generator = SpeculativeGenerator(
            model_of("llama"), byte_tokenizer(), draft="lookup", acceptance=rule
        )
        with pytest.raises(InvalidRequestError, match=f"acceptance is '{rule}'"):
            generator.stream(PROMPT, sampling=Sampling(sampler=sampler))


@pytest.mark.filterwarnings("ignore::mlx_speculation.SamplerNotice")
def test_processors_come_before_a_sampler() -> None:
    seen: list[Any] = []

    def sampler(log_probs: mx.array) -> mx.array:
        seen.append(np.array(log_probs))
        return mx.argmax(log_probs, axis=-1)

    bias = sample_utils.make_logits_processors({7: 1000.0})
    got = answer(sampler=sampler, logits_processors=bias, draft_model="lookup")
    assert set(got.tokens) == {7}
    for row in seen:
        np.testing.assert_allclose(np.exp(row).sum(), 1.0, rtol=1e-5)
