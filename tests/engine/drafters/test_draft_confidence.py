"""A draft model that is unsure stops early, and its caches stay right."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import InvalidRequestError, SpeculativeGenerator
from mlx_speculation.engine.draft_length.base import FixedDraftLength
from mlx_speculation.engine.drafters.draft_model import ModelDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser, Sampling, Verifier
from support.caches.contents import assert_same_content, content
from support.covering import others_slow
from support.identity import GREEDY, SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
LENGTH, TOKENS = 6, 20


def expected_length(model: nn.Module, tokens: list[int], confidence: float) -> int:
    """Count what an unsure model drafts greedily after the tokens, token by token."""
    text, product = list(tokens), 1.0
    for drafted in range(LENGTH):
        logits = model(mx.array([text]))[0, -1].astype(mx.float32)
        product *= math.exp(float(logits.max() - mx.logsumexp(logits)))
        if drafted and product < confidence:
            return drafted
        text.append(int(mx.argmax(logits)))
    return LENGTH


def all_of(outcome: RoundOutcome) -> RoundOutcome:
    return outcome


def decoder_of(
    model: nn.Module, draft: nn.Module, sampling: Sampling, confidence: float
) -> tuple[Decoder, ModelDrafter, Sequence]:
    sequence = Sequence(list(PROMPT))
    drafter = ModelDrafter(lambda: Lane(draft), confidence=confidence)
    decoder = Decoder(
        Request(
            target=Lane(model),
            sequence=sequence,
            verifier=Verifier(Chooser(sampling, 256)),
            drafter=drafter,
            policy=FixedDraftLength(LENGTH),
        )
    )
    decoder.prefill.target()
    return decoder, drafter, sequence


@pytest.mark.parametrize(
    ("name", "confidence"),
    [
        ("llama", 1e-9),
        ("llama", 0.001),
        ("llama", 0.02),
        ("llama", 0.99),
        ("qwen3_5", 0.02),
    ],
)
def test_a_chain_stops_where_the_product_falls_below(
    name: str, confidence: float
) -> None:
    model = build(name)
    generator = SpeculativeGenerator(model, byte_tokenizer())  # installs recorders
    decoder, drafter, sequence = decoder_of(model, model, GREEDY, confidence)
    lengths = []
    for _ in range(4):
        expected = expected_length(model, sequence.tokens, confidence)
        before = decoder.request.statistics.drafted, decoder.request.statistics.reads
        decoder.next_round(99, all_of)
        lengths.append(decoder.request.statistics.drafted - before[0])
        assert lengths[-1] == expected
        # One wait for each token but the first, the refused one included.
        waits = decoder.request.statistics.reads - before[1]
        assert waits == expected - (expected == LENGTH)
        # Whatever was fed and then refused is what was committed.
        twin = Lane(model)
        twin.feed(sequence.tokens[: drafter.lane.seen], step=1)
        assert_same_content(content(twin.caches), content(drafter.lane.caches))
        # The bonus, and the last token of a chain that ran to its end.
        lag = len(sequence.tokens) - drafter.lane.seen
        assert lag == 1 + (expected == LENGTH)
    assert decoder.request.statistics.acceptance_rate == 1.0
    if confidence == 0.02:
        assert len(set(lengths)) > 1
    if confidence in (0.99, 1e-9):
        assert set(lengths) == {1 if confidence == 0.99 else LENGTH}
    del generator


@pytest.mark.parametrize(
    "name", others_slow(["gemma3_text", "qwen3_5", "llama"], ["qwen3_5"])
)
def test_stopping_early_leaves_the_text_as_it_is(name: str) -> None:
    model, draft = build(name), build("llama", seed=1)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    for sampling in (GREEDY, SAMPLED):
        expected = plain.generate(PROMPT, max_tokens=TOKENS, sampling=sampling).tokens
        for drafting in (model, draft):
            generator = SpeculativeGenerator(
                model,
                byte_tokenizer(),
                draft=drafting,
                draft_length=LENGTH,
                draft_confidence=0.02,
            )
            result = generator.generate(PROMPT, max_tokens=TOKENS, sampling=sampling)
            assert result.tokens == expected
            assert result.stats.reads > 0
            assert result.stats.drafted < LENGTH * result.stats.drafts


def test_the_length_does_not_depend_on_the_token_drawn_last() -> None:
    """Else tokens that are likely to be wrong would be dropped after they were seen."""
    model = build("llama")
    for seed in range(6):
        # The first token is always drafted; the second is judged by its law alone.
        decoder, _, sequence = decoder_of(
            model, model, Sampling(temperature=3.0, seed=seed), 0.02
        )
        decoder.next_round(99, all_of)
        first = sequence.tokens[len(PROMPT)]
        rows = model(mx.array([[*PROMPT, first]]))[0, -2:].astype(mx.float32)
        product = mx.exp((rows.max(axis=-1) - mx.logsumexp(rows, axis=-1)).sum())
        assert (decoder.request.statistics.drafted > 1) == (float(product) >= 0.02)


def test_without_a_confidence_nothing_is_read() -> None:
    model = build("llama")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=model)
    result = generator.generate(PROMPT, max_tokens=20)
    assert result.stats.reads == 0
    assert result.stats.sources["model"].drafted == result.stats.drafted


@pytest.mark.parametrize("confidence", [-0.1, 1, 1.5, float("nan"), "high", None])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{confidence!r}.*less than 1"):
        SpeculativeGenerator(
            build("llama"), byte_tokenizer(), draft_confidence=confidence
        )


def test_a_confidence_that_nobody_is_asked_for_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"0\.4, and no draft model.*lookup"):
        SpeculativeGenerator(
            build("llama"), byte_tokenizer(), draft="lookup", draft_confidence=0.4
        )
