"""Answers of the server to the real openai client over loopback."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from string import ascii_uppercase as ALPHABET  # noqa: N812
from typing import Any

import mlx.core as mx
import openai
import pytest

from mlx_speculation import (
    InvalidRequestError,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    derived_seed,
)
from mlx_speculation.engine.mlx_lm_compat.prompt_cache import limited
from mlx_speculation.engine.result import Result
from mlx_speculation.option_fields import KvLimits
from mlx_speculation.server import Server
from mlx_speculation.server.apis.base import speculative
from mlx_speculation.server.routes import POSTED
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import (
    byte_tokenizer,
    letter_tokenizer,
    sentencepiece_tokenizer,
)
from support.processes.servers import (
    LETTERS,
    NAME,
    client_of,
    get,
    letters,
    make_tiny,
    nearly,
    post,
    serving,
    tiny_pair,
)

OTHER = "LAZYDOG"
SEEDED = Sampling(temperature=0.8, seed=5, top_p=1.0)
PROMPT = "THEQUICKBROWNFOX"
DRAWN: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 0.8, "seed": 5}


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[Server]:
    with serving(prefixes=PrefixCache(1 << 26, every=4)) as server:
        yield server


def test_the_root_says_what_this_is(server: Server) -> None:
    page = get(server, "/").json
    assert page["server"].startswith("mlx-speculation-")
    for path in page["paths"]:
        posted = path in POSTED
        answer = post(server, {"model": 0}, path=path) if posted else get(server, path)
        assert answer.status == (400 if posted else 200), path


@pytest.fixture(name="client", scope="module")
def _client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(name="plain", scope="module")
def _plain() -> SpeculativeGenerator:
    return SpeculativeGenerator(tiny_pair()[0], letter_tokenizer(LETTERS))


@cache
def expected(plain: SpeculativeGenerator, tokens: int = 16, **options: Any) -> Result:
    """Return the result of plain decoding for the request `DRAWN`."""
    sampling = Sampling(temperature=0.8, seed=5)
    return plain.generate(PROMPT, max_tokens=tokens, sampling=sampling, **options)


def test_a_text_is_that_of_its_seed(
    client: openai.OpenAI, plain: SpeculativeGenerator
) -> None:
    answer = client.completions.create(**DRAWN)
    assert answer.choices[0].text == expected(plain).text
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == NAME
    other = client.completions.create(**{**DRAWN, "seed": 6})
    assert other.choices[0].text != answer.choices[0].text


def test_seeds_below_zero_count_from_the_top(client: openai.OpenAI) -> None:
    low = client.completions.create(**{**DRAWN, "seed": -1})
    high = client.completions.create(**{**DRAWN, "seed": 2**64 - 1})
    assert low.choices[0].text == high.choices[0].text


def test_a_drawn_seed_is_reported_and_repeats_the_text(client: openai.OpenAI) -> None:
    request = {**DRAWN, "seed": None}
    first = client.completions.create(**request)
    assert first.usage is not None
    seed = first.usage.model_extra["speculative"]["seed"]
    again = client.completions.create(**{**DRAWN, "seed": seed})
    assert again.choices[0].text == first.choices[0].text


def test_a_stream_has_the_same_text_and_ends_with_its_usage(
    client: openai.OpenAI, plain: SpeculativeGenerator
) -> None:
    chunks = list(
        client.completions.create(
            **DRAWN, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected(plain).text
    assert len([text for text in texts if text]) > 2
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 16


def test_a_stop_string_cuts_the_text(
    client: openai.OpenAI, plain: SpeculativeGenerator
) -> None:
    text = expected(plain).text
    stop = text[7:9]
    for stream in (False, True):
        request = {**DRAWN, "stop": ["0", stop], "stream": stream}
        answer: Any = client.completions.create(**request)
        parts = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in parts) == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_usage_says_what_was_drafted_and_accepted(client: openai.OpenAI) -> None:
    usage = client.completions.create(**DRAWN).usage
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.total_tokens == len(PROMPT) + 16
    counts = usage.model_extra["speculative"]
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == counts["accepted"] > 0
    assert (
        details.rejected_prediction_tokens == counts["drafted"] - counts["accepted"] > 0
    )
    assert counts["draft"] == "near"
    assert 0 < counts["acceptance_rate"] < 1


def test_usage_of_auto_names_what_has_drafted(plain: SpeculativeGenerator) -> None:
    generator = SpeculativeGenerator(
        plain.model, plain.tokenizer, draft="lookup", draft_length=2
    )
    prompt = 4 * PROMPT
    drafted = generator.generate(prompt, max_tokens=16)
    assert drafted.stats.drafts > 0
    assert speculative([drafted], "auto")["draft"] == "lookup"
    assert speculative([drafted], "near")["draft"] == "near"
    plainly = plain.generate(prompt, max_tokens=4)
    assert speculative([plainly], "auto")["draft"] is None


def test_the_log_says_why_nothing_was_drafted(
    server: Server, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "mlx_speculation.server"):
        client.completions.create(**DRAWN, max_tokens=1)
        assert "s; drafting paused: the text is short" in caplog.text
        caplog.clear()
        client.completions.create(**DRAWN, max_tokens=8)
        assert "drafting paused" not in caplog.text


@pytest.mark.parametrize(
    ("speculative", "number", "draft", "drafts"),
    [
        ({"off": True}, None, "near", 0),
        ({"max_draft": 0}, None, "near", 0),
        ({"max_draft": 2}, None, "near", 2),
        ({"max_draft": 50}, None, "near", 4),  # the server drafts up to 4
        ({"draft": "near"}, None, "near", 4),
        ({"draft": "lookup", "max_draft": 3}, None, "lookup", 3),
        ({}, 3, "near", 3),
        ({"max_draft": 2}, 3, "near", 2),
        ({"max_draft": 2}, 1, "near", 1),
    ],
)
def test_a_request_chooses_what_drafts_and_its_text_stays(
    client: openai.OpenAI,
    plain: SpeculativeGenerator,
    speculative: dict[str, Any],
    number: int | None,
    draft: str,
    drafts: int,
) -> None:
    body = {"speculative": speculative, "num_draft_tokens": number}
    answer: Any = client.completions.create(**DRAWN, extra_body=body)
    assert answer.choices[0].text == expected(plain).text
    counts = answer.usage.model_extra["speculative"]
    assert counts["draft"] == draft
    places = len(counts["accepted_per_position"])
    assert places == drafts or (draft == "lookup" and places <= drafts)


@pytest.mark.parametrize("more", [{}, {"off": True}, {"draft": "lookup"}])
def test_a_request_in_exact_mode_has_one_text(
    client: openai.OpenAI, plain: SpeculativeGenerator, more: dict[str, Any]
) -> None:
    """Log-probabilities are also the same to the bit with every draft."""
    exact = SpeculativeGenerator(plain.model, plain.tokenizer, exact=True)
    known = expected(exact, logprobs=2)
    body = {"speculative": {"exact": True, **more}}
    answer: Any = client.completions.create(**DRAWN, logprobs=2, extra_body=body)
    assert answer.choices[0].text == known.text
    assert known.logprobs is not None
    values = [one.value for one in known.logprobs]
    assert answer.choices[0].logprobs.token_logprobs == values


def test_log_probabilities_are_those_of_the_library(
    client: openai.OpenAI, plain: SpeculativeGenerator
) -> None:
    known = expected(plain, logprobs=2)
    answer = client.completions.create(**DRAWN, logprobs=2)
    logprobs: Any = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == known.text
    assert logprobs.token_ids == known.tokens
    assert logprobs.text_offset == list(range(16))
    assert known.logprobs is not None
    for value, top, one in zip(
        logprobs.token_logprobs, logprobs.top_logprobs, known.logprobs, strict=True
    ):
        assert value == pytest.approx(one.value, abs=1e-4)
        ids = {letters(text)[0]: value for text, value in top.items()}
        assert ids == pytest.approx(dict(one.top), abs=1e-4)


def make_words(strips: bool | None) -> Callable[..., SpeculativeGenerator]:
    """Return a maker of generators.

    Their tokenizer has sentence pieces, or bytes if `strips` is None.
    """

    def make(prefixes: PrefixCache | None = None) -> SpeculativeGenerator:
        tokenizer = byte_tokenizer()
        if strips is not None:
            tokenizer = sentencepiece_tokenizer(strips=strips)
        target = build("llama", vocab=len(tokenizer))
        draft = nearly(target, build("llama", vocab=len(tokenizer)), 0.03, 1)
        return SpeculativeGenerator(
            target, tokenizer, draft=draft, draft_length=4, prefix_cache=prefixes
        )

    return make


STRIPS = [None, pytest.param(True, marks=pytest.mark.slow), False]


@pytest.mark.parametrize("strips", STRIPS)
def test_text_and_offsets_begin_with_the_first_space(strips: bool | None) -> None:
    make = make_words(strips)
    generator = make()
    decode = generator.tokenizer.decode
    ids = generator.tokenizer.encode(" ab") if strips is None else (256, 258, 261)
    bias = dict.fromkeys(ids, 60.0)
    with serving(make, draft=None) as server, client_of(server) as client:
        for seed in range(2):
            request: dict[str, Any] = {
                **{"model": NAME, "prompt": [1, 2, 3], "temperature": 1.5},
                **{"seed": seed, "max_tokens": 20},
                "logit_bias": {str(token): value for token, value in bias.items()},
            }
            whole: Any = client.completions.create(**request, logprobs=3).choices[0]
            reported, text = whole.logprobs, whole.text
            assert text == decode(reported.token_ids) == "".join(reported.tokens)
            starts = [decode(reported.token_ids[:count]) for count in range(20)]
            assert reported.text_offset == [*map(len, starts)]
            assert set(reported.top_logprobs[1]) >= {" ", " a"} or strips is None
            chat: Any = {**request, "messages": [{"role": "user", "content": "a"}]}
            del chat["prompt"]
            said: Any = client.chat.completions.create(**chat, logprobs=True).choices[0]
            tokens = said.logprobs.content
            assert said.message.content == "".join(token.token for token in tokens)
            assert said.message.content == decode(
                [token.model_extra["id"] for token in tokens]
            )
            # The offsets are right too if a stream holds tokens back for a stop string.
            for stop in (" a", "  "):
                cut = {**request, "stop": stop, "stream": True, "logprobs": 0}
                shown, offsets = "", []
                for part in client.completions.create(**cut):
                    shown += part.choices[0].text
                    if part.choices[0].logprobs is not None:
                        offsets += part.choices[0].logprobs.text_offset
                assert shown == text.partition(stop)[0]
                assert offsets == reported.text_offset[: len(offsets)]


@pytest.mark.parametrize("strips", STRIPS)
def test_offsets_count_a_character_of_several_tokens_once(strips: bool | None) -> None:
    text = '"ñ 日b😀"'
    shape = {"name": "text", "schema": {"const": text.strip('"')}}
    with serving(make_words(strips), draft=None) as server, client_of(server) as client:
        answer: Any = client.completions.create(
            model=NAME,
            prompt=[1, 2, 3],
            max_tokens=20,
            logprobs=0,
            extra_body={
                "response_format": {"type": "json_schema", "json_schema": shape}
            },
        )
    choice = answer.choices[0]
    assert choice.text == text
    places = [*zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)]
    half = "\N{REPLACEMENT CHARACTER}"
    for at, char in enumerate(text):
        size = len(char.encode())
        parts = [char] if size == 1 else [half] * size
        assert [token for token, start in places if start == at] == parts


def test_the_chosen_token_is_first_at_exact_ties() -> None:
    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        generator: SpeculativeGenerator = make_tiny()(prefixes)
        head: Any = generator.model.lm_head
        head.weight = mx.repeat(head.weight[::2], 2, axis=0)
        return generator

    greedy: dict[str, Any] = {"model": NAME, "temperature": 0}
    with serving(make) as server, client_of(server) as client:
        text: Any = client.completions.create(prompt=PROMPT, logprobs=2, **greedy)
        message: Any = {"role": "user", "content": PROMPT}
        chat: Any = client.chat.completions.create(
            messages=[message], logprobs=True, top_logprobs=1, **greedy
        )
    logprobs = text.choices[0].logprobs
    assert [next(iter(top)) for top in logprobs.top_logprobs] == logprobs.tokens
    for one in chat.choices[0].logprobs.content:
        assert one.top_logprobs[0].token == one.token
        assert one.bytes == list(one.token.encode())


def test_an_equal_beginning_is_not_read_again(client: openai.OpenAI) -> None:
    request = {**DRAWN, "prompt": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    client.completions.create(**request)
    usage = client.completions.create(**{**request, "seed": 9}).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 25


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    by_ids = client.completions.create(**{**DRAWN, "prompt": letters(PROMPT)})
    by_text = client.completions.create(**{**DRAWN, "prompt": [PROMPT]})
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_models_are_listed(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    with serving(names=("org/some name", "./folder")) as other:
        for path in ("org%2Fsome%20name", "org/some%20name", "%2E%2Ffolder?x"):
            assert get(other, f"/v1/models/{path}").json["id"] == "org/some name"
        with client_of(other) as second:
            assert second.models.retrieve("org/some name").id == "org/some name"
        get(other, "/v1/models/org%252Fsome%20name").refused(404)
    assert get(server, "/health").json == {"status": "ok"}


def test_the_raw_answer_is_one_json_object(server: Server) -> None:
    answer = post(server, DRAWN)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert json.loads(answer.body)["object"] == "text_completion"


def test_a_stream_tells_how_much_of_its_prompt_was_read(server: Server) -> None:
    answer = post(server, {**DRAWN, "prompt": "KEEPALIVE" * 9, "stream": True})
    lines = [line for line in answer.body.split(b"\n") if line.startswith(b":")]
    assert lines
    assert all(line.endswith(b"/81") for line in lines)
    assert lines[-1] == b": keepalive 80/81"


def several(client: openai.OpenAI, **options: Any) -> dict[int, str]:
    """Return the texts of a request by choice index, streamed or whole."""
    options = {**DRAWN, "max_tokens": 9, **options}
    texts: dict[int, str] = {}
    if not options.get("stream"):
        answer = client.completions.create(**options)
        assert [choice.index for choice in answer.choices] == list(
            range(len(answer.choices))
        )
        return {choice.index: choice.text for choice in answer.choices}
    for piece in client.completions.create(**options):
        for choice in piece.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("qwen3_moe", KvLimits(max_kv_size=6)),
        ("llama", KvLimits(kv_bits=2, kv_group_size=32, quantized_kv_start=0)),
    ],
)
def test_caches_can_be_smaller_than_the_text(name: str, kv: KvLimits) -> None:
    tiny = TINY_MODELS[name]
    wide = replace(tiny, args={**tiny.args, "head_dim": 32})
    target = build_tiny(wide, vocab=len(ALPHABET))

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator(target, letter_tokenizer(LETTERS), draft="lookup")

    request = {**DRAWN, "max_tokens": 40}
    with (
        serving(make, draft="lookup", kv=kv) as server,
        client_of(server) as client,
    ):
        text = client.completions.create(**request).choices[0].text
    generator = SpeculativeGenerator(target, letter_tokenizer(LETTERS))
    caches, quantization = limited(target, 100, **kv.limits())
    result = generator.generate(
        letters(PROMPT),
        max_tokens=40,
        sampling=SEEDED,
        prompt_cache=caches.target,
        kv_quantization=quantization,
    )
    assert text == result.text
    plain = generator.generate(letters(PROMPT), max_tokens=40, sampling=SEEDED)
    assert text != plain.text  # the limit has an effect


def test_caches_that_cannot_be_so_are_refused_at_the_start() -> None:
    bits, size = KvLimits(kv_bits=7, quantized_kv_start=0), KvLimits(max_kv_size=8)
    for limits, said in ((bits, "kv_bits is 7"), (size, "makes its own caches")):
        with pytest.raises(InvalidRequestError, match=said), serving(kv=limits):
            pass
    limits = KvLimits(kv_bits=8, kv_group_size=32, quantized_kv_start=60)
    with (
        pytest.raises(InvalidRequestError, match="cannot quantize a RotatingKVCache"),
        serving(make_tiny("gemma3_text"), kv=limits),
    ):
        pass


def test_several_texts_are_those_of_requests_of_their_own(
    client: openai.OpenAI,
) -> None:
    seeds = [5, derived_seed(5, 1), derived_seed(5, 2), derived_seed(5, 3)]
    prompts = [PROMPT, PROMPT, OTHER, OTHER]
    alone = [
        several(client, prompt=prompt, seed=seed)[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert len(set(alone)) == 4
    expected = dict(enumerate(alone))
    both = [PROMPT, OTHER]
    greedy = {
        i: several(client, prompt=prompt, temperature=0)[0]
        for i, prompt in enumerate(both)
    }
    for stream in (False, True):
        assert several(client, prompt=both, n=2, stream=stream) == expected
        ids = [letters(text) for text in both]
        assert several(client, prompt=ids, n=2, stream=stream) == expected
        two = several(client, n=2, stream=stream)
        assert two == {0: alone[0], 1: alone[1]}
        again = several(client, prompt=both, temperature=0, stream=stream)
        assert again == greedy


def test_several_texts_are_counted_together(client: openai.OpenAI) -> None:
    request = {**DRAWN, "prompt": [PROMPT, OTHER], "n": 3, "max_tokens": 8}
    usage = client.completions.create(**request).usage
    counted: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = list(client.completions.create(**request, **counted))
    assert [piece.usage for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    for each in (usage, pieces[-1].usage):
        assert each is not None
        assert each.prompt_tokens == len(PROMPT) + len(OTHER)
        assert each.completion_tokens == 48
        assert each.total_tokens == each.prompt_tokens + 48
        assert each.prompt_tokens_details.cached_tokens <= each.prompt_tokens
        counts = each.model_extra["speculative"]
        assert 0 < counts["rounds"] <= 48
        assert counts["acceptance_rate"] == counts["accepted"] / counts["drafted"]
        summed = sum(counts["accepted_per_position"]) * counts["drafts"]
        assert summed == pytest.approx(counts["accepted"])


def test_an_error_of_one_text_is_that_of_the_request(client: openai.OpenAI) -> None:
    too_long = [PROMPT, "A" * 300]
    for stream in (False, True):
        with pytest.raises((openai.BadRequestError, openai.APIError), match="300"):
            several(client, prompt=too_long, stream=stream)
    assert several(client)  # and the server goes on
    with pytest.raises(openai.BadRequestError, match="larger --max-rows"):
        several(client, n=64)


def test_a_prediction_of_the_text_is_accepted_without_a_draft() -> None:
    request: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0}
    request["messages"] = [{"role": "user", "content": PROMPT}]
    made = make_tiny(draft=None, draft_length=None)
    with serving(made, draft=None) as server, client_of(server) as client:
        plain = client.chat.completions.create(**request)
        text = plain.choices[0].message.content
        halves = [{"type": "text", "text": half} for half in (text[:9], text[9:])]
        predicted: Any = {"type": "content", "content": halves}
        # The second time, an earlier answer may be drafted in place of the prediction.
        again = [
            client.chat.completions.create(**request, prediction=predicted)
            for _ in range(2)
        ]
    answers: list[Any] = [plain, *again]
    counts = [each.usage.completion_tokens_details for each in answers]
    assert counts[0].accepted_prediction_tokens == 0
    for answer, count in zip(answers[1:], counts[1:], strict=True):
        assert answer.choices[0].message.content == text
        assert count.accepted_prediction_tokens > 4
        assert count.rejected_prediction_tokens is not None
