"""Speculative text equals plain text, on every tiny model, past every window."""

import mlx.nn as nn
import pytest

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.engine import Drafter
from mlx_speculation.samplers import Chooser
from support.drafters import ScriptedDrafter
from support.identity import assert_same_text, plain_text
from support.tiny_models import TINY_MODELS, build
from support.tiny_tokenizer import byte_tokenizer

TOKENS = 120
# Shorter than the window of 16, about as long, and longer.
PROMPTS = {6: 4, 17: 3, 40: 5}  # tokens: draft length
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=11)
GREEDY = Sampling(seed=0)


def prompt_of(length: int) -> list[int]:
    """Return a prompt that does not repeat itself."""
    return [(37 * i * i + 11 * i + length) % 256 for i in range(length)]


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_any_draft_leaves_the_text_as_plain_decoding_has_it(
    name: str, length: int
) -> None:
    model, tokenizer = build(name), byte_tokenizer()
    prompt, k = prompt_of(length), PROMPTS[length]
    plain = SpeculativeGenerator(model, tokenizer)
    for sampling in (GREEDY, SAMPLED):
        chooser = Chooser(sampling, 256)
        expected = plain.generate(prompt, max_tokens=TOKENS, sampling=sampling).tokens
        if sampling.greedy:
            assert expected == plain_text(model, prompt, TOKENS)
        text = prompt + expected
        # A wrong draft takes a round for every token, so it is kept short.
        drafters: dict[str, tuple[nn.Module | Drafter, int]] = {
            "right": (model, k),
            "wrong": (ScriptedDrafter(text, right=0.0), 2),
            "random": (ScriptedDrafter(text, 0.7, seed=length, ragged=True), k),
        }
        for kind, (draft, drafted) in drafters.items():
            generator = SpeculativeGenerator(
                model, tokenizer, draft=draft, draft_length=drafted
            )
            result = generator.generate(prompt, max_tokens=TOKENS, sampling=sampling)
            assert result.stats.reruns == 0
            tie = assert_same_text(
                model,
                chooser,
                prompt,
                expected,
                result.tokens,
                width=drafted + 1,
                bitwise=TINY_MODELS[name].bitwise,
            )
            if kind == "wrong":
                assert result.stats.accepted <= result.stats.drafted // 20
            elif kind == "right" and tie is None and TINY_MODELS[name].bitwise:
                assert result.stats.acceptance_rate == 1.0


def test_different_seeds_give_different_texts() -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer())
    texts = {
        tuple(
            generator.generate(
                prompt_of(6),
                max_tokens=20,
                sampling=Sampling(temperature=0.8, seed=seed),
            ).tokens
        )
        for seed in range(8)
    }
    assert len(texts) == 8


def test_families_that_are_bitwise_get_no_near_ties() -> None:
    model, chooser = build("llama"), Chooser(GREEDY, 4)
    with pytest.raises(AssertionError, match="bit for bit"):
        assert_same_text(model, chooser, [1], [1, 2], [1, 3], width=2, bitwise=True)
