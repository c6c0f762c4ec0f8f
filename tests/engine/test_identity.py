"""Speculative text equals plain text, on every tiny model, past every window.

Faults that were made by hand, and found by the default cases:
    a cache of keys, or a sliding one, keeps one row too many
    noise is keyed by row in place of position
    a convolution is replayed one row late, or a scan from an empty state
"""

import pytest

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.samplers import Chooser
from support.covering import covering
from support.identity import (
    GREEDY,
    SAMPLED,
    assert_same_text,
    check_identity,
    prompt_of,
)
from support.models.recurrent_models import RUN_AGAIN
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

# Shorter than the window of 16, about as long, and longer.
PROMPTS = {6: 4, 17: 3, 40: 5}  # tokens: draft length

# After 40 tokens, 64 more write to each place of a window four times.
CASES = [
    pytest.param(40, 64),
    *(pytest.param(length, 120, marks=pytest.mark.slow) for length in PROMPTS),
]
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.mark.parametrize(("length", "tokens"), CASES)
@pytest.mark.parametrize(("name", "chosen"), covering(TINY_MODELS, SAMPLINGS))
def test_any_draft_leaves_the_text_as_plain_decoding_has_it(
    name: str, chosen: str, length: int, tokens: int
) -> None:
    seen = check_identity(
        build(name),
        prompt_of(length),
        draft_length=PROMPTS[length],
        tokens=tokens,
        bitwise=TINY_MODELS[name].bitwise,
        samplings=[SAMPLINGS[chosen]],
    )
    assert seen.texts == 3
    assert seen.reruns == 0
    assert (seen.mixer_reruns > 0) == (name in RUN_AGAIN)


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
