"""`stream_generate` gives the same responses as mlx-lm's for the same keywords."""

import inspect
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils
from mlx_lm.generate import (
    GenerationResponse,
    generate_step,
    speculative_generate_step,
)
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from mlx_speculation import (
    InvalidRequestError,
    ModelFolderError,
    NonFiniteLogitsError,
    Sampling,
    SpeculativeGenerator,
    SpeculativeResponse,
    generate,
    make_sampler,
    stream_generate,
)
from mlx_speculation.caches import KVQuantization
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser
from support.covering import covering, others_slow
from support.drafters.scripted_drafter import ScriptedDrafter
from support.drop_in import Answer, assert_same_answer, assert_same_caches, both
from support.identity import ROUNDING, plain_text, prompt_of
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer
from support.sampling.sampling_options import penalty_options

# Full attention, a window of 16 that wraps, recurrent layers with attention or without.
MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba")
# At least one model for each kind of cache.
COUNTED = (
    *(*MODELS, "lfm2", "recurrent_gemma", "rwkv7", "bailing_moe_v3"),
    *("deepseek_v3(MLA)", "gpt_oss", "gemma4_text", "llama(sliding)"),
)
PROMPT = prompt_of(21)
TOKENS = 24


@cache
def known(name: str) -> tuple[nn.Module, list[int]]:
    model = build(name)
    return model, plain_text(model, PROMPT, TOKENS + 16)


def drafter_of(text: list[int], seed: int = 1) -> ScriptedDrafter:
    return ScriptedDrafter(PROMPT + text, right=0.7, ragged=True, seed=seed)


def ending_with(*ids: int) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_ids = ids
    return tokenizer


def check_same(
    model: nn.Module,
    drafter: ScriptedDrafter,
    *,
    bitwise: bool,
    tokenizer: Any = None,
    caches: list[Any] | None = None,
    make_lane: Any = Lane,
    rounding: float = ROUNDING,
    **options: Any,
) -> Answer:
    """Require the answer and the caches of mlx-lm's generation; return our answer."""
    ours, theirs = caches or make_prompt_cache(model), make_prompt_cache(model)
    expected, got = both(
        model,
        tokenizer or byte_tokenizer(),
        PROMPT,
        ours={"draft_model": drafter, "prompt_cache": ours},
        theirs={"prompt_cache": theirs},
        **{"max_tokens": TOKENS} | options,
    )
    same: dict[str, Any] = {"bitwise": bitwise, "rounding": rounding}
    if assert_same_answer(model, PROMPT, expected, got, make_lane=make_lane, **same):
        assert_same_caches(theirs, ours, **same)
    return got


@pytest.mark.parametrize("name", others_slow(TINY_MODELS, COUNTED))
def test_text_counts_and_caches_are_those_of_mlx_lm(name: str) -> None:
    model, text = known(name)
    bitwise = TINY_MODELS[name].bitwise
    got = check_same(model, drafter_of(text), bitwise=bitwise, num_draft_tokens=4)
    assert got.reasons[-1] == "length"


@pytest.mark.parametrize(
    ("name", "at"), covering(MODELS, [0, 1, 9, TOKENS - 1, TOKENS])
)
def test_an_end_token_ends_the_text_as_in_mlx_lm(name: str, at: int) -> None:
    model, text = known(name)
    tokenizer, bitwise = ending_with(text[at]), TINY_MODELS[name].bitwise
    got = check_same(model, drafter_of(text), bitwise=bitwise, tokenizer=tokenizer)
    assert got.reasons[-1] == ("length" if text.index(text[at]) >= TOKENS else "stop")


def test_the_first_space_is_dropped_as_in_mlx_lm_and_here_alone() -> None:
    model, tokenizer = known("llama")[0], byte_tokenizer()
    bias = {tokenizer.encode(" ")[0]: 1e4}
    processors = sample_utils.make_logits_processors(bias)
    expected, got = both(
        model, tokenizer, PROMPT, max_tokens=3, ours={}, logits_processors=processors
    )
    assert "".join(got.texts) == "".join(expected.texts) == "  "
    ours = SpeculativeGenerator(model, tokenizer)
    result = ours.generate(PROMPT, max_tokens=3, sampling=Sampling(logit_bias=bias))
    assert result.text == tokenizer.decode(got.tokens) == "   "


@pytest.mark.parametrize("name", [*MODELS, "lfm2"])
def test_a_stream_closed_early_leaves_the_yielded_tokens(name: str) -> None:
    """A close undoes the tokens of a committed round that were not yielded."""
    model, text = known(name)
    right, bitwise = ScriptedDrafter(PROMPT + text, 1.0), TINY_MODELS[name].bitwise
    for limit, counts in ((TOKENS, (1, 5, 6)), (7, (6, 7))):
        for count in counts:
            check_same(model, right, bitwise=bitwise, count=count, max_tokens=limit)


def test_limited_caches_equal_those_of_mlx_lm_long_after_they_have_wrapped() -> None:
    """qwen3 has no make_cache, so it gets rings that keep the first four tokens."""
    model, _ = known("qwen3")
    for size, length in ((8, 1), (16, 4), (40, 6)):
        options: dict[str, Any] = {"max_tokens": 40, "max_kv_size": size}
        plain = mlx_lm.stream_generate(model, byte_tokenizer(), PROMPT, **options)
        text = [response.token for response in plain]
        drafted = {"draft_model": drafter_of(text), "num_draft_tokens": length}
        expected, got = both(model, byte_tokenizer(), PROMPT, ours=drafted, **options)
        assert_same_answer(
            model,
            PROMPT,
            expected,
            got,
            bitwise=False,
            make_lane=lambda model, size=size: Lane(  # type: ignore[misc]
                model, make_prompt_cache(model, size)
            ),
        )


def test_nothing_runs_before_the_first_response_is_asked_for() -> None:
    model, _ = known("llama")
    caches = make_prompt_cache(model)
    responses = stream_generate(
        model, byte_tokenizer(), PROMPT, prompt_cache=caches, draft_model="lookup"
    )
    responses.close()
    assert all(cache.empty() for cache in caches)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5", "lfm2"])
@settings(max_examples=5)
@given(data=st.data())
def test_any_keywords_do_as_in_mlx_lm(name: str, data: st.DataObject) -> None:
    model, text = known(name)
    both_get: dict[str, Any] = {"max_tokens": data.draw(st.integers(1, 30))}
    if data.draw(st.booleans(), "short steps"):
        both_get["prefill_step_size"] = data.draw(st.integers(1, 30))
    length = data.draw(st.integers(0, 6), "num_draft_tokens")
    drafter = drafter_of(text, data.draw(st.integers(0, 99), "the drafter's seed"))
    ours: dict[str, Any] = {"draft_model": drafter, "num_draft_tokens": length}
    theirs: dict[str, Any] = {}
    cached = data.draw(st.sampled_from([None, 0, 1, 5, 18]), "tokens in the caches")
    pair: list[list[Any]] = []
    processors: list[Any] = []
    size: int | None = None
    if cached is not None:
        pair = [make_prompt_cache(model), make_prompt_cache(model)]
        theirs["prompt_cache"], ours["prompt_cache"] = pair
        for caches in pair:
            if cached:
                model(mx.array([PROMPT[:cached]]), cache=caches)
    elif name == "qwen3" and data.draw(st.booleans(), "limit the caches"):
        # Other models have make_cache, which takes no limit.
        size = both_get["max_kv_size"] = data.draw(st.integers(8, 40), "max_kv_size")
    if not cached and data.draw(st.booleans(), "processors"):
        options = data.draw(penalty_options(256))
        processors = sample_utils.make_logits_processors(**options)
        both_get["logits_processors"] = processors
    expected, got = both(
        model,
        byte_tokenizer(),
        data.draw(st.sampled_from([list, mx.array]), "as")(PROMPT[cached or 0 :]),
        count=data.draw(st.none() | st.integers(1, 20), "close after"),
        ours=ours,
        theirs=theirs,
        **both_get,
    )
    bitwise = TINY_MODELS[name].bitwise and size is None
    same = assert_same_answer(
        model,
        PROMPT,
        expected,
        replace(got, prompt_tokens=expected.prompt_tokens),
        bitwise=bitwise,
        chooser=Chooser(Sampling(seed=0, logits_processors=processors), 256),
        make_lane=lambda model: Lane(model, make_prompt_cache(model, size)),
    )
    assert got.prompt_tokens == {len(PROMPT) - (cached or 0)}
    if same and pair:
        assert_same_caches(*pair, bitwise=bitwise)


@cache
def with_wide_heads(name: str) -> tuple[nn.Module, list[int]]:
    """Return a model with heads of 32 numbers, the fewest that mlx can quantize."""
    tiny = TINY_MODELS[name]
    wide = {"head_dim": 32}
    args = tiny.args | wide
    if "text_config" in args:
        args = tiny.args | {"text_config": tiny.args["text_config"] | wide}
    model = build_tiny(replace(tiny, args=args))
    return model, plain_text(model, PROMPT, TOKENS + 16)


class Quantizing(Lane):
    """A lane that quantizes its caches from `start` on."""

    def __init__(self, model: nn.Module, start: int, bits: int) -> None:
        super().__init__(model)
        self.quantization = KVQuantization(bits, 32, start)


@pytest.mark.parametrize(
    ("quantized", "start"),
    covering(
        [("llama", 4), ("llama", 8), ("qwen3_5", 4), ("nemotron_h", 8)],
        [0, 13, len(PROMPT), 30, 33, 200],
    ),
)
def test_caches_are_quantized_where_mlx_lm_quantizes_them(
    quantized: tuple[str, int], start: int
) -> None:
    """Quantization starts in the prefill, at its end, or in the middle of a round."""
    name, bits = quantized
    model, text = with_wide_heads(name)
    caches = make_prompt_cache(model)
    old = list(caches)
    check_same(
        model,
        ScriptedDrafter(PROMPT + text, 0.9),
        bitwise=TINY_MODELS[name].bitwise,
        caches=caches,
        make_lane=lambda model: Quantizing(model, start, bits),
        rounding=0.2,  # a quantized number can differ if a bit of its input differs
        prefill_step_size=8,
        kv_bits=bits,
        kv_group_size=32,
        quantized_kv_start=start,
    )
    for before, after in zip(old, caches, strict=True):
        replaced = isinstance(before, KVCache) and start < 200
        assert (after is not before) == replaced
        assert isinstance(after, QuantizedKVCache) == replaced


def test_a_failed_step_puts_back_the_caches_that_it_has_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step at which quantization starts is committed before its logits are read."""
    model, text = with_wide_heads("llama")
    caches, start = make_prompt_cache(model), len(PROMPT) + 3
    old, native = list(caches), type(model).__call__
    replaced: list[bool] = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = native(self, *args, **kwargs)
        replaced.append(caches[0] is not old[0])
        kept = kwargs["cache"][0].offset
        return logits * mx.nan if kept == start else logits

    monkeypatch.setattr(type(model), "__call__", failing)
    responses = stream_generate(
        model,
        byte_tokenizer(),
        PROMPT,
        max_tokens=30,
        prompt_cache=caches,
        kv_bits=8,
        kv_group_size=32,
        quantized_kv_start=start,
    )
    with pytest.raises(NonFiniteLogitsError):
        list(responses)
    assert replaced[-1]
    assert caches == old
    monkeypatch.undo()
    twin = Lane(model)
    twin.feed((PROMPT + text)[: start - 1], step=1)
    assert_same_caches(twin.caches, caches, bitwise=True)


def test_the_draft_models_caches_may_follow_the_targets_in_one_list() -> None:
    model, text = with_wide_heads("llama")
    small = build("llama", seed=1)
    ours = [*make_prompt_cache(model), *make_prompt_cache(small)]
    start = len(PROMPT) + 12
    quantizing = Quantizing(model, start, 8)
    written: list[int] = []
    prompt = PROMPT
    for budget in (9, 12, 5):
        responses = list(
            stream_generate(
                model,
                byte_tokenizer(),
                prompt,
                max_tokens=budget,
                draft_model=small,
                num_draft_tokens=3,
                prompt_cache=ours,
                kv_bits=8,
                kv_group_size=32,
                quantized_kv_start=start,
            )
        )
        written += [response.token for response in responses]
        assert {cache.offset for cache in ours} == {len(PROMPT) + len(written)}
        count = len(model.layers)
        kinds = {type(cache) for cache in ours[:count]}
        assert kinds == {QuantizedKVCache if len(written) > 12 else KVCache}
        assert {type(cache) for cache in ours[count:]} == {KVCache}
        written.append(text[len(written)])
        prompt = written[-1:]
    quantizing.feed([*PROMPT, *written[:-1]], step=1)
    assert_same_caches(quantizing.caches, ours[:count], bitwise=False, rounding=0.2)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", None), ("llama", 8), ("gemma3_text", None), ("qwen3_5", None)],
)
def test_caches_go_round_through_mlx_lms_files(
    name: str, bits: int | None, tmp_path: Path
) -> None:
    """Our turns and mlx-lm's alternate; each loads what the turn before has saved."""
    model, text = with_wide_heads(name)
    tokenizer = byte_tokenizer()
    file = str(tmp_path / "caches.safetensors")
    options: dict[str, Any] = {"max_tokens": 8}
    if bits is not None:
        options |= {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 25}
    uninterrupted = make_prompt_cache(model)
    expected: list[int] = []
    written: list[int] = []
    drafter = ScriptedDrafter(PROMPT + text, 0.9)
    caches = make_prompt_cache(model)
    prompt = PROMPT
    for turn in range(4):
        plain = mlx_lm.stream_generate(
            model, tokenizer, prompt, prompt_cache=uninterrupted, **options
        )
        expected += [response.token for response in plain]
        ours = turn % 2 == 0
        turns: Any = stream_generate if ours else mlx_lm.stream_generate
        more = {"draft_model": drafter, "num_draft_tokens": 3} if ours else {}
        responses = turns(
            model, tokenizer, prompt, prompt_cache=caches, **options, **more
        )
        written += [response.token for response in responses]
        save_prompt_cache(file, caches, {"turn": str(turn)})
        caches, metadata = load_prompt_cache(file, return_metadata=True)
        assert metadata == {"turn": str(turn)}
        prompt = [text[8 * turn + 8]]  # the text's next token
    assert len(written) == len(expected) == 32
    if written == expected:
        bitwise = TINY_MODELS[name].bitwise
        assert_same_caches(uninterrupted, caches, bitwise=bitwise, rounding=0.2)
    else:
        assert not TINY_MODELS[name].bitwise


def test_progress_is_reported_as_by_mlx_lm() -> None:
    model, text = known("llama")
    for tokens, step in ((21, 8), (21, 5), (1, 8), (2, 8), (17, 16)):
        mlx_lms: list[tuple[int, int]] = []
        reported: list[tuple[int, int]] = []
        common: dict[str, Any] = {"max_tokens": 3, "prefill_step_size": step}
        ours = {
            "prompt_progress_callback": lambda *at, reported=reported: reported.append(
                at
            )
        }
        theirs = {"prompt_progress_callback": lambda *at, t=mlx_lms: t.append(at)}
        drafted = {"draft_model": drafter_of(text)}
        prompt = PROMPT[:tokens]
        tokenizer = byte_tokenizer()
        both(model, tokenizer, prompt, ours=ours | drafted, theirs=theirs, **common)
        assert reported == mlx_lms
        assert reported[-1] == (tokens, tokens)


@pytest.mark.parametrize(("length", "end"), covering([1, 3, 6], [0, 5, 30]))
def test_tokens_are_from_the_draft_where_mlx_lm_says_so(length: int, end: int) -> None:
    model, text = known("llama")
    small = build("llama", seed=1)
    for draft in (model, small):
        for budget in (1, length + 1, 24):
            options: dict[str, Any] = {
                "max_tokens": budget,
                "draft_model": draft,
                "num_draft_tokens": length,
            }
            tokenizer = ending_with(text[end])
            theirs = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, **options))
            ours = list(stream_generate(model, tokenizer, PROMPT, **options))
            assert [r.token for r in ours] == [r.token for r in theirs]
            flags = [[r.from_draft for r in responses] for responses in (ours, theirs)]
            if len(theirs) == budget:  # our last token is not drafted
                assert ours[-1].from_draft is False
                flags = [each[:-1] for each in flags]
            assert flags[0] == flags[1]


def test_a_text_without_a_limit_goes_on_until_it_is_closed() -> None:
    model, text = known("llama")
    options: dict[str, Any] = {"max_tokens": -1, "draft_model": drafter_of(text)}
    answer = Answer.of(stream_generate(model, byte_tokenizer(), PROMPT, **options), 40)
    assert answer.tokens == text[:40]
    assert answer.reasons == [None] * 40


def test_a_response_is_mlx_lms_with_our_statistics() -> None:
    model, text = known("llama")
    right = ScriptedDrafter(PROMPT + text, right=1.0)
    responses = list(
        stream_generate(
            model,
            byte_tokenizer(),
            PROMPT,
            max_tokens=20,
            draft_model=right,
            num_draft_tokens=4,
        )
    )
    for response in responses:
        assert isinstance(response, GenerationResponse)
        assert isinstance(response, SpeculativeResponse)
        assert response.prompt_tps > 0
        assert response.generation_tps > 0
        assert response.peak_memory > 0
    stats = responses[-1].stats
    assert stats is not None
    assert stats.acceptance_rate == 1.0
    assert sum(response.from_draft for response in responses) == stats.accepted
    flags = [response.from_draft for response in responses[:10]]
    assert flags == [True, True, True, True, False] * 2


def test_log_probabilities_are_as_wide_as_the_targets() -> None:
    """Ids that the tokenizer lacks cannot be chosen, and have minus infinity."""
    model = build("llama", vocab=300)
    theirs = next(mlx_lm.stream_generate(model, byte_tokenizer(), PROMPT))
    ours = next(stream_generate(model, byte_tokenizer(), PROMPT))
    assert ours.logprobs.shape == theirs.logprobs.shape == (300,)
    assert np.isneginf(np.array(ours.logprobs)[256:]).all()


def test_a_long_text_does_not_hold_the_log_probabilities_of_all_its_rows() -> None:
    model, _ = known("llama")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft="lookup")
    stream = generator.stream(PROMPT, max_tokens=9, logprobs=2, logprob_rows=True)
    rows = [chunk.logprob.row for chunk in stream if chunk.logprob is not None]
    assert [row.shape for row in rows if row is not None] == [(256,)] * 9
    kept = stream.result.logprobs
    assert kept is not None
    assert [logprob.row for logprob in kept] == [None] * 9
    assert all(len(logprob.top) == 2 for logprob in kept)


def test_generate_returns_the_text_and_prints_what_mlx_lm_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, text = known("llama")
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {"max_tokens": 12}
    expected = mlx_lm.generate(model, tokenizer, PROMPT, **options)
    options["draft_model"] = drafter_of(text)
    assert capsys.readouterr().out == ""
    assert generate(model, tokenizer, PROMPT, **options) == expected
    assert capsys.readouterr().out == ""
    mlx_lm.generate(model, tokenizer, PROMPT, verbose=True, max_tokens=12)
    theirs = capsys.readouterr().out.splitlines()
    assert generate(model, tokenizer, PROMPT, verbose=True, **options) == expected
    ours = capsys.readouterr().out.splitlines()
    assert ours[:-4] == theirs[:-3]
    starts = [line.split(":")[0] for line in ours[-4:]]
    assert starts == ["Prompt", "Generation", "Peak memory", "Drafts"]


def test_generate_lets_standard_output_alone_unless_it_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`generate` works without `sys.stdout`, as in a server."""
    model, _ = known("llama")
    monkeypatch.setattr("sys.stdout", None)
    assert generate(model, byte_tokenizer(), PROMPT, max_tokens=3)


def test_a_text_prompt_is_encoded_as_mlx_lm_encodes_it() -> None:
    model, _ = known("llama")
    expected, got = both(model, byte_tokenizer(), "def fib(n):", max_tokens=9, ours={})
    assert got.tokens == expected.tokens
    assert got.prompt_tokens == expected.prompt_tokens == {11}


def test_a_given_stream_of_mlx_is_worked_on() -> None:
    model, text = known("llama")
    stream = mx.new_stream(mx.default_device())
    responses = stream_generate(
        model, byte_tokenizer(), PROMPT, 9, drafter_of(text), stream
    )
    assert Answer.of(responses).tokens == text[:9]


# Keywords and responses of mlx-lm 0.32.2. For a new version read its generate.py again,
# and adapt `stream_generate`.
KEYWORDS = {
    "max_tokens",
    "draft_model",
    "stream",
    "sampler",
    "logits_processors",
    "max_kv_size",
    "prompt_cache",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "prompt_progress_callback",
    "input_embeddings",
    "num_draft_tokens",
}
FIELDS = [
    "text",
    "token",
    "logprobs",
    "from_draft",
    "prompt_tokens",
    "prompt_tps",
    "generation_tokens",
    "generation_tps",
    "peak_memory",
    "finish_reason",
]


def parameters(*functions: Any) -> dict[str, inspect.Parameter]:
    by_name: dict[str, inspect.Parameter] = {}
    for function in functions:
        by_name |= inspect.signature(function).parameters
    skipped = {"model", "tokenizer", "prompt", "kwargs"}
    return {name: p for name, p in by_name.items() if name not in skipped}


def test_the_keywords_are_mlx_lms() -> None:
    loops = (speculative_generate_step, generate_step, mlx_lm.stream_generate)
    theirs = parameters(*loops)
    ours = parameters(stream_generate)
    assert set(theirs) == KEYWORDS
    assert set(ours) - {"seed", "exact", "unknown"} == KEYWORDS
    # None: adaptive length, and the default stream.
    assert ours["num_draft_tokens"].default is ours["stream"].default is None
    assert theirs["num_draft_tokens"].default == 2
    for name in KEYWORDS - {"num_draft_tokens", "stream"}:
        assert ours[name].default == theirs[name].default, name
    order = list(parameters(mlx_lm.stream_generate))
    assert list(ours)[: len(order)] == order
    assert (
        list(inspect.signature(generate).parameters)[:4]
        == list(inspect.signature(mlx_lm.generate).parameters)[:4]
    )
    assert (
        parameters(make_sampler).keys() == parameters(sample_utils.make_sampler).keys()
    )
    for name, parameter in parameters(make_sampler).items():
        other = parameters(sample_utils.make_sampler)[name]
        assert (parameter.default, parameter.kind) == (other.default, other.kind)


def test_the_fields_of_a_response_are_mlx_lms() -> None:
    assert [field.name for field in fields(GenerationResponse)] == FIELDS
    assert [field.name for field in fields(SpeculativeResponse)] == [
        *FIELDS,
        "stats",
        "seed",
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"max_tokens": 0}, "max_tokens is 0, and a whole number of at"),
    "fewer": ({"max_tokens": -2}, "max_tokens is -2"),
    "a fraction": ({"max_tokens": 1.5}, "max_tokens is 1.5"),
    "embeddings": (
        {"input_embeddings": mx.zeros((3, 64))},
        r"input_embeddings of shape \[3, 64\] were passed, and only token ids",
    ),
    "step": ({"prefill_step_size": 0}, "prefill_step_size is 0"),
    "size": ({"max_kv_size": 4}, "max_kv_size is 4, and a whole number of at least 5"),
    "bits": ({"kv_bits": 7, "quantized_kv_start": 0}, "kv_bits is 7 and kv_group_size"),
    "no bits": ({"kv_bits": 0}, "kv_bits is 0, and a whole number of at least 1"),
    "group": (
        {"kv_bits": 4, "kv_group_size": 48, "quantized_kv_start": 0},
        "kv_group_size 48, and mlx_lm.models.qwen3 cannot read such quantized caches",
    ),
    "start": ({"kv_bits": 4, "quantized_kv_start": -1}, "quantized_kv_start is -1"),
    "a window": (
        {"kv_bits": 4, "max_kv_size": 16, "quantized_kv_start": 30},
        "kv_bits is 4, and mlx-lm cannot quantize a RotatingKVCache",
    ),
    "sampler": ({"sampler": 0.7}, "sampler is a float, and a callable"),
    "processors": ({"logits_processors": [3]}, "A logits processor is a int"),
    "seed": ({"seed": -1}, "seed is -1"),
    "caches": ({"prompt_cache": ()}, "prompt_cache is a tuple, and the list that"),
    "a path": ({"draft_model": "no/such/folder"}, "There is no folder"),
}


def random_state() -> list[int]:
    state: Any = mx.random.state
    numbers: list[int] = state[0].tolist()
    return numbers


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_before_anything_is_touched(case: str) -> None:
    model, _ = known("qwen3")
    options, message = REFUSED[case]
    caches = make_prompt_cache(model)
    if not options.keys() & {"prompt_cache", "max_kv_size"}:
        options = {**options, "prompt_cache": caches}
    before = random_state()
    with pytest.raises((InvalidRequestError, ModelFolderError), match=message):
        stream_generate(model, byte_tokenizer(), PROMPT, **options)
    assert all(cache.empty() for cache in caches)
    assert random_state() == before


def test_unknown_keywords_are_named() -> None:
    model, _ = known("llama")
    for function in (stream_generate, generate):
        with pytest.raises(TypeError, match="no keyword 'temp', 'top_k'"):
            function(model, byte_tokenizer(), PROMPT, temp=0.7, top_k=3)


def test_caches_that_are_never_quantized_need_not_be_able_to() -> None:
    """Only a text that can reach quantized_kv_start is an error, as in mlx-lm."""
    model, text = known("gemma3_text")
    options: dict[str, Any] = {"max_tokens": 9, "kv_bits": 4}
    start = len(PROMPT) + 10
    expected, got = both(
        model, byte_tokenizer(), PROMPT, ours={}, quantized_kv_start=start, **options
    )
    assert got.tokens == expected.tokens == text[:9]
    with pytest.raises(InvalidRequestError, match=r"cannot quantize a \w+KVCache"):
        stream_generate(
            model, byte_tokenizer(), PROMPT, quantized_kv_start=start - 1, **options
        )
    responses = mlx_lm.stream_generate(
        model, byte_tokenizer(), PROMPT, quantized_kv_start=start - 1, **options
    )
    with pytest.raises(NotImplementedError):
        list(responses)


def test_rows_that_are_decided_one_by_one_have_their_log_probabilities() -> None:
    """A processor not marked `pure` is called row by row, for emitted tokens only."""
    model, text = known("llama")
    calls: list[int] = []

    def counting(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(len(tokens))
        return logits

    expected, got = both(
        model,
        byte_tokenizer(),
        PROMPT,
        max_tokens=20,
        logits_processors=[counting],
        ours={"draft_model": ScriptedDrafter(PROMPT + text, right=1.0)},
    )
    assert_same_answer(model, PROMPT, expected, got, bitwise=True)
    assert calls[21:] == list(range(len(PROMPT), len(PROMPT) + 20))
