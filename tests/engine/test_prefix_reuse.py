"""A prefix cache changes how many tokens are read, and never the text."""

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import PrefixCache, Sampling, SpeculativeGenerator
from mlx_speculation.caches import KVQuantization
from mlx_speculation.samplers import Chooser
from support.covering import covering
from support.identity import assert_same_text
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

# Full attention, a window of 16 that wraps, recurrent layers with attention.
MODELS = ("llama", "gemma3_text", "qwen3_5")
GREEDY = Sampling(seed=3)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=3)
EVERY = 8


@cache
def models(name: str) -> tuple[nn.Module, nn.Module]:
    return build(name), build(name, seed=1)


def generator(name: str, draft: bool, prefixes: PrefixCache | None = None) -> Any:
    target, small = models(name)
    return SpeculativeGenerator(
        target,
        byte_tokenizer(),
        draft=small if draft else None,
        draft_length=3,
        prefix_cache=prefixes,
    )


BLOCKS = [[(7 * i * i + 31 * b) % 256 for i in range(11 + b)] for b in range(4)]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of blocks, perhaps after an earlier text, and its options."""

    blocks: tuple[int, ...]
    head: int
    goes_on: bool
    tokens: int
    sampled: bool
    closed: int | None

    def prompt(self, last: list[int]) -> list[int]:
        tokens = [token for block in self.blocks for token in BLOCKS[block]]
        if self.goes_on and last:
            tokens = last + tokens
        return tokens[: max(1, len(tokens) - self.head)][:50]


requests = st.builds(
    Request,
    blocks=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    head=st.integers(0, 12),
    goes_on=st.booleans(),
    tokens=st.integers(0, 8),
    sampled=st.booleans(),
    closed=st.none() | st.integers(1, 4),
)


@pytest.mark.parametrize(("name", "draft"), covering(MODELS, (True, False)))
@settings(max_examples=3)
@given(
    played=st.lists(requests, min_size=2, max_size=4),
    max_bytes=st.sampled_from([0, 200_000, 1 << 30]),
)
def test_the_text_is_that_of_a_generator_without_one(
    name: str, draft: bool, played: list[Request], max_bytes: int
) -> None:
    prefixes = PrefixCache(max_bytes, every=EVERY)
    ours, fresh = generator(name, draft, prefixes), generator(name, draft)
    last: list[int] = []
    for request in played:
        prompt = request.prompt(last)
        sampling = SAMPLED if request.sampled else GREEDY
        options = {"max_tokens": request.tokens, "sampling": sampling}
        expected = fresh.generate(prompt, **options).tokens
        stream = ours.stream(prompt, **options)
        for count, _ in enumerate(stream, 1):
            if count == request.closed:
                break
        stream.close()
        result = stream.result
        assert 0 <= result.stats.reused < len(prompt)
        assert_same_text(
            models(name)[0],
            Chooser(sampling, 256),
            prompt,
            expected[: len(result.tokens)],
            result.tokens,
            width=4,
            bitwise=TINY_MODELS[name].bitwise,
        )
        assert len(result.tokens) == min(len(expected), request.closed or 99)
        assert prefixes.nbytes <= max_bytes
        last = prompt + result.tokens


@pytest.mark.parametrize(("name", "draft"), covering(MODELS, (True, False)))
def test_a_resumed_chat_reads_few_tokens_again(name: str, draft: bool) -> None:
    ours = generator(name, draft, PrefixCache(1 << 30, every=EVERY))
    text = [(37 * i * i + 11 * i) % 256 for i in range(61)]
    first = ours.generate(text, max_tokens=30, sampling=GREEDY)
    assert first.stats.reused == 0
    text += first.tokens
    for cut in (len(text), 85, 75, 62, 40, 9, 8, 7):
        prompt = [*text[:cut], 255 - text[cut - 1]]
        known = cut if len(text) > cut else cut - 1  # a text's last token is not kept
        stream = ours.stream(prompt, max_tokens=1, sampling=GREEDY)
        next(stream)
        reused = stream.stats.reused
        if name == "llama":
            assert reused in (known, cut, cut - 1)
        else:
            assert cut - EVERY <= reused <= cut or cut < EVERY


@pytest.mark.parametrize("start", [0, 9])
def test_a_request_with_quantized_caches_passes_it_by(start: int) -> None:
    tiny = TINY_MODELS["llama"]
    model = build_tiny(replace(tiny, args={**tiny.args, "head_dim": 32}))
    eight_bits = KVQuantization(bits=8, group_size=32, start=start)
    prefixes = PrefixCache(1 << 26, every=4)
    generator = SpeculativeGenerator(model, byte_tokenizer(), prefix_cache=prefixes)
    for quantization in (eight_bits, eight_bits, None):
        result = generator.generate(
            [*range(40, 60)], max_tokens=4, kv_quantization=quantization
        )
        assert result.stats.reused == 0


def test_a_request_with_caches_of_its_own_passes_it_by() -> None:
    prefixes = PrefixCache(1 << 30)
    ours = generator("llama", False, prefixes)
    caches = make_prompt_cache(models("llama")[0])
    result = ours.generate(BLOCKS[0], max_tokens=3, prompt_cache=caches)
    assert result.stats.reused == 0
    assert prefixes.nbytes == 0


@pytest.mark.parametrize(("name", "draft"), covering(MODELS, (True, False)))
def test_a_stream_that_is_dropped_leaves_what_it_committed(
    name: str, draft: bool
) -> None:
    prefixes = PrefixCache(1 << 30, every=EVERY)
    ours = generator(name, draft, prefixes)
    prompt = BLOCKS[0] + BLOCKS[1]
    for count, _ in enumerate(ours.stream(prompt, max_tokens=30, sampling=GREEDY)):
        if count == 6:
            break  # the stream is not closed
    text = ours.generate(prompt, max_tokens=6, sampling=GREEDY)
    assert text.stats.reused == len(prompt) - 1
    unstarted = PrefixCache(1 << 30)
    generator(name, draft, unstarted).stream(prompt)
    assert unstarted.nbytes == 0


def test_a_stream_that_is_dropped_in_another_thread_leaves_nothing() -> None:
    """The stream's arrays can depend on mlx streams that the other thread lacks."""
    prefixes = PrefixCache(1 << 30, every=EVERY)
    streams = [generator("qwen3_5", False, prefixes).stream(BLOCKS[0], max_tokens=9)]
    next(streams[0])
    thread = threading.Thread(target=streams.clear)
    thread.start()
    thread.join()
    assert prefixes.nbytes == 0


def test_restore_points_of_a_failed_request_go_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefixes = PrefixCache(1 << 30, every=EVERY)
    stream = generator("qwen3_5", False, prefixes).stream(BLOCKS[0], max_tokens=9)
    next(stream)
    assert prefixes.nbytes > 0
    monkeypatch.setattr(type(models("qwen3_5")[0]), "__call__", _failing)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert prefixes.nbytes == 0


def _failing(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


def test_streams_of_several_threads_share_it() -> None:
    prefixes = PrefixCache(1 << 30, every=EVERY)
    name = "qwen3_5"
    ours, fresh = generator(name, False, prefixes), generator(name, False)
    prompts = [BLOCKS[0] + BLOCKS[i] for i in (1, 2, 3)]
    expected = [
        fresh.generate(p, max_tokens=8, sampling=GREEDY).tokens for p in prompts
    ]
    written: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []

    def play(which: int) -> None:
        try:
            stream = mx.new_thread_local_stream(mx.default_device())
            with mx.stream(stream):
                written[which] = [
                    ours.generate(prompts[(which + i) % 3], max_tokens=8).tokens
                    for i in range(3)
                ]
        except BaseException as error:  # the assertion below shows it
            errors.append(error)

    threads = [threading.Thread(target=play, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for which, texts in written.items():
        assert texts == [expected[(which + i) % 3] for i in range(3)]
