"""In exact mode drafts change no bit of a seed's text or of its reported values."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    BatchGenerator,
    Sampling,
    SpeculativeGenerator,
    make_sampler,
    stream_generate,
)
from mlx_speculation.caches import FixedShape, KVQuantization, PrefixCache, with_slack
from mlx_speculation.engine.result import Result
from mlx_speculation.errors import (
    InvalidRequestError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("on_the_cpu", "short_steps")

KINDS = ["llama", "qwen3_5", "llama(sliding)"]
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
TOKENS = 20


@pytest.fixture(name="short_steps")
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the views of caches grow in steps so short that every text needs several."""
    monkeypatch.setattr(
        "mlx_speculation.engine.options.generator.FixedShape",
        lambda rows=6: FixedShape(rows, 16),
    )


def generator_of(model: Any, draft: Any = None, **options: Any) -> SpeculativeGenerator:
    options = {"exact": 6, "draft_length": 9 if draft is not None else None, **options}
    return SpeculativeGenerator(model, byte_tokenizer(), draft=draft, **options)


def written(
    generator: SpeculativeGenerator, prompt: Sequence[int], sampling: Sampling
) -> Result:
    return generator.generate(
        prompt,
        max_tokens=TOKENS,
        sampling=sampling,
        stop_tokens=(),
        logprobs=3,
        logprob_rows=True,
    )


@cache
def plain(name: str, length: int) -> Result:
    return written(generator_of(build(name)), prompt_of(length), SAMPLED)


def assert_same_bits(result: Result, expected: Result) -> None:
    assert result.tokens == expected.tokens
    assert result.logprobs == expected.logprobs  # none of the numbers is NaN


@settings(max_examples=2)
@given(seed=st.integers(0, 1000), right=st.sampled_from([0.0, 0.6, 0.9, 1.0]))
@pytest.mark.parametrize(("name", "chosen"), covering(KINDS, SAMPLINGS))
def test_no_draft_changes_a_bit(
    name: str, chosen: str, seed: int, right: float
) -> None:
    model, prompt = build(name), prompt_of(11 + seed % 9)
    sampling = replace(SAMPLINGS[chosen], seed=seed)
    expected = written(generator_of(model), prompt, sampling)
    text = prompt + expected.tokens
    draft = ScriptedDrafter(text, right, seed=seed, ragged=True, least=0)
    result = written(generator_of(model, draft), prompt, sampling)
    assert_same_bits(result, expected)
    assert result.stats.drafts > 0
    assert result.stats.mixer_reruns == result.stats.reruns == 0


@pytest.mark.parametrize("draft", ["model", "lookup", "adaptive"])
def test_nor_does_a_draft_of_another_kind(draft: str) -> None:
    model, prompt, expected = build("llama"), prompt_of(13), plain("llama", 13)
    other: Any = "lookup" if draft == "lookup" else build("llama", seed=1)
    length = 3 if draft == "model" else 12
    result = written(generator_of(model, other, draft_length=length), prompt, SAMPLED)
    assert_same_bits(result, expected)


def test_filters_and_processors_leave_the_bits() -> None:
    model, prompt = build("llama"), prompt_of(13)
    sampling = Sampling(
        temperature=0.8,
        top_p=0.8,
        min_p=0.01,
        top_k=40,
        xtc_probability=0.5,
        repetition_penalty=1.2,
        seed=4,
    )
    expected = written(generator_of(model), prompt, sampling)
    draft = ScriptedDrafter(prompt + expected.tokens, 0.8, seed=2, ragged=True)
    assert_same_bits(written(generator_of(model, draft), prompt, sampling), expected)


@pytest.mark.parametrize(("name", "steps"), covering(KINDS, [1, 2, 7]))
def test_a_text_that_is_closed_and_continued_is_the_same(name: str, steps: int) -> None:
    model, prompt = build(name), prompt_of(9)
    expected = plain(name, 9).tokens
    draft = ScriptedDrafter(prompt + expected, 0.8, seed=steps, ragged=True)
    generator = generator_of(model, draft)
    caches = with_slack(make_prompt_cache(model))
    options: dict[str, Any] = {"sampling": SAMPLED, "stop_tokens": ()}
    stream = generator.stream(prompt, max_tokens=30, prompt_cache=caches, **options)
    for _ in range(steps):
        next(stream)
    stream.close()
    known = stream.cached_tokens
    assert stream.result.next_token is not None
    rest = generator.generate(
        [stream.result.next_token],
        max_tokens=10,
        prompt_cache=caches,
        cached_tokens=known,
        **options,
    )
    text = [*known[len(prompt) :], stream.result.next_token, *rest.tokens]
    assert text == expected[: len(text)]


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_that_is_found_leaves_the_bits(name: str) -> None:
    model, prompt = build(name), prompt_of(30)
    expected = [written(generator_of(model), prompt[:n], SAMPLED) for n in (19, 30)]
    prefixes = PrefixCache(1 << 24, every=5)
    generator = generator_of(model, prefix_cache=prefixes)
    for short, reused in ((True, 0), (False, 14), (False, 24), (True, 14)):
        given, other = (prompt[:19], expected[0]) if short else (prompt, expected[1])
        result = written(generator, given, SAMPLED)
        assert_same_bits(result, other)
        assert result.stats.reused >= reused


def test_a_prefix_cache_belongs_to_one_shape() -> None:
    model, prefixes = build("llama"), PrefixCache(1 << 20)
    generator_of(model, prefix_cache=prefixes)
    generator_of(model, prefix_cache=prefixes)
    for exact in (False, 4):
        with pytest.raises(InvalidRequestError, match="was filled with exact=6"):
            generator_of(model, prefix_cache=prefixes, exact=exact)


@pytest.mark.parametrize("start", [0, 21])
def test_quantized_caches_leave_the_bits(start: int) -> None:
    wide = {**TINY_MODELS["llama"].args, "head_dim": 32}
    model = build_tiny(replace(TINY_MODELS["llama"], args=wide))
    options: dict[str, Any] = {
        "max_tokens": TOKENS,
        "sampling": SAMPLED,
        "stop_tokens": (),
        "kv_quantization": KVQuantization(bits=4, group_size=32, start=start),
    }
    for prompt in (prompt_of(1), prompt_of(12)):
        expected = generator_of(model).generate(prompt, **options)
        draft = ScriptedDrafter(prompt + expected.tokens, 0.9, seed=1, ragged=True)
        result = generator_of(model, draft).generate(prompt, **options)
        assert result.tokens == expected.tokens
        assert result.stats.drafts > 0


@pytest.mark.parametrize("chosen", SAMPLINGS)
def test_the_drop_in_yields_the_same_rows(chosen: str) -> None:
    model, prompt = build("llama"), prompt_of(8)
    sampler = None if chosen == "greedy" else make_sampler(temp=0.8, top_p=0.9)

    def responses(**options: Any) -> list[Any]:
        every = stream_generate(
            model,
            byte_tokenizer(),
            prompt,
            24,
            sampler=sampler,
            seed=3,
            exact=6,
            **options,
        )
        return list(every)

    expected = responses()
    drafted = responses(draft_model=build("llama", seed=1), num_draft_tokens=4)
    assert [one.token for one in drafted] == [one.token for one in expected]
    for one, other in zip(drafted, expected, strict=True):
        assert mx.array_equal(one.logprobs, other.logprobs)


def test_rows_of_a_batch_run_alone_and_keep_their_bits() -> None:
    model, prompts = build("llama"), [prompt_of(n) for n in (7, 12, 1)]
    draft = build("llama", seed=1)
    generator = generator_of(model, draft, draft_length=3)
    options: dict[str, Any] = {"max_tokens": 20, "sampling": SAMPLED, "logprobs": 2}
    with BatchGenerator(generator) as batch:
        uids = [batch.insert(prompt, **options) for prompt in prompts]
        while batch.waiting or batch.running:
            batch.next()
        for uid, prompt in zip(uids, prompts, strict=True):
            assert "it is exact" in str(batch.why_alone(uid))
            alone = generator_of(model).generate(prompt, **options)
            assert_same_bits(batch.remove(uid), alone)


def test_a_draft_is_no_longer_than_the_rows() -> None:
    model, prompt = build("llama"), prompt_of(8)
    text = prompt + written(generator_of(model), prompt, GREEDY).tokens
    result = written(generator_of(model, ScriptedDrafter(text, 1.0)), prompt, GREEDY)
    assert max(len(result.stats.accepted_per_position), 0) == 5
    assert generator_of(model).exact == 6
    assert generator_of(model, exact=False).exact is None
    assert generator_of(model, build("llama", seed=1)).lengths.longest == 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule": ({"acceptance": "rejection"}, "acceptance='rejection'"),
    "rings": ({"sliding": "native"}, "sliding='native'"),
    "one row": ({"exact": 1}, "from 2 to 64"),
    "no number": ({"exact": "yes"}, "from 2 to 64"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_options_that_cannot_keep_the_promise_are_refused(what: str) -> None:
    options, says = REFUSED[what]
    with pytest.raises(InvalidRequestError, match=says):
        generator_of(build("llama"), **options)


def test_models_caches_and_samplers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="mamba"):
        generator_of(build("mamba"))
    model = build("llama(sliding)")
    generator = generator_of(model)
    with pytest.raises(UnsupportedCacheError, match="with_slack"):
        generator.stream([1, 2], prompt_cache=make_prompt_cache(model))
    with pytest.raises(InvalidRequestError, match="a sampler: it draws once"):
        generator.stream([1, 2], sampling=Sampling(sampler=mx.argmax))
    with pytest.raises(UnsupportedCacheError, match="fixed shape"):
        stream_generate(
            build("qwen3"), byte_tokenizer(), [1, 2], 4, max_kv_size=16, exact=True
        )
