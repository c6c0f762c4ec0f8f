"""Interrupts inside a serial logits processor, which has a state.

The processor raises them, since a signal would wait for the end of a round.
"""

from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import BatchGenerator, Sampling, SpeculationError
from support.drafters.batches import bench
from support.identity import prompt_of

TOKENS = 14
PROMPTS = (5, 17, 9)


class Alternating:
    """Forbids the likeliest token at every other call; raises at call `raises_at`."""

    def __init__(self, raises_at: int = 0) -> None:
        self.calls: list[int] = []
        self._left = raises_at

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self.calls.append(tokens.size)
        if len(self.calls) % 2:
            logits[:, mx.argmax(logits[0])] = -mx.inf
        return logits


def options(processor: Alternating | None) -> dict[str, Any]:
    processors = () if processor is None else (processor,)
    sampling = Sampling(logits_processors=processors)
    return {"max_tokens": TOKENS, "stop_tokens": (), "sampling": sampling}


@pytest.mark.parametrize("kind", ["none", "model"])
@pytest.mark.parametrize("call", [2, 3, 5, 8])
def test_an_interrupt_of_a_processor_ends_its_request_alone(
    kind: str, call: int
) -> None:
    generator = bench("llama").generator(kind)
    processors = (Alternating(), None, Alternating())
    texts = []
    for n, processor in zip(PROMPTS, processors, strict=True):
        request = options(processor and Alternating())
        texts.append(generator.generate(prompt_of(n), **request).tokens)
    given = (Alternating(raises_at=call), *processors[1:])
    with BatchGenerator(generator) as batch:
        uids = [
            batch.insert(prompt_of(n), **options(processor))
            for n, processor in zip(PROMPTS, given, strict=True)
        ]
        handed, raised = {uid: list[int]() for uid in uids}, 0
        while batch.running or batch.waiting:
            try:
                responses = batch.next()
            except KeyboardInterrupt:
                raised += 1
                assert isinstance(batch.error(uids[0]), SpeculationError)
                continue
            for response in responses:
                if response.chunk is not None:
                    handed[response.uid].append(response.chunk.token)
        assert raised == 1
        assert [batch.error(uid) for uid in uids[1:]] == [None, None]
        results = [batch.result(uid) for uid in uids]
    for uid, result, text in zip(uids, results, texts, strict=True):
        assert handed[uid] == result.tokens
        assert result.tokens == text[: len(result.tokens)]
    assert results[0].finish_reason == "error"
    assert len(results[0].tokens) < call
    assert [len(each.tokens) for each in results[1:]] == [TOKENS] * 2
    # One call for each token, as in plain decoding.
    third = len(prompt_of(PROMPTS[2]))
    assert processors[2] is not None
    assert processors[2].calls == [*range(third, third + TOKENS)]


@pytest.mark.parametrize("kind", ["none", "model"])
@pytest.mark.parametrize("call", [2, 5])
def test_an_interrupt_of_a_processor_closes_its_stream_before_the_round(
    kind: str, call: int
) -> None:
    generator, prompt = bench("llama").generator(kind), prompt_of(17)
    text = generator.generate(prompt, **options(Alternating())).tokens
    stream = generator.stream(prompt, **options(Alternating(raises_at=call)))
    tokens = []
    with pytest.raises(KeyboardInterrupt):
        tokens += [chunk.token for chunk in stream]
    assert stream.result.finish_reason == "closed"
    assert stream.result.tokens == text[: len(stream.result.tokens)]
    assert len(stream.result.tokens) < call
    assert (
        stream.cached_tokens
        == (prompt + stream.result.tokens)[: len(stream.cached_tokens)]
    )


@pytest.mark.parametrize("kind", ["none", "model"])
@pytest.mark.parametrize("call", [2, 3, 5])
def test_a_round_that_a_processor_interrupts_can_be_run_again(
    kind: str, call: int
) -> None:
    """Calls for tokens that were decided before the interrupt are not made again."""
    generator, prompt = bench("llama").generator(kind), prompt_of(17)
    text = generator.generate(prompt, **options(Alternating())).tokens
    processor = Alternating(raises_at=call)
    stream, tokens, raised = generator.stream(prompt, **options(processor)), [], 0
    while not stream.ended:
        try:
            tokens += [chunk.token for chunk in stream.next_round()]
        except KeyboardInterrupt:
            raised += 1
    assert raised == 1
    assert tokens == stream.result.tokens == text
    first = len(prompt)
    assert processor.calls == [*range(first, first + TOKENS)]
