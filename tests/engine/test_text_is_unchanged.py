"""The text is that of plain decoding, for every architecture, cache and draft."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.nn as nn
import pytest

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.samplers import Chooser
from support.covering import covering
from support.identity import (
    DRAFTERS,
    GREEDY,
    SAMPLED,
    assert_same_text,
    check_identity,
    prompt_of,
)
from support.models import census, tiny_models
from support.models.census import BUILT
from support.models.recurrent_models import RUN_AGAIN
from support.models.tiny_models import TINY_MODELS, TinyModel, build_tiny, read_table
from support.models.tiny_tokenizer import byte_tokenizer

RARER = read_table(Path(tiny_models.__file__).with_name("cache_kind_models.json"))
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
PROMPT = 40  # longer than every window
# Draft length by prompt length; the prompts are shorter than the window of 16, near it
# and longer.
PROMPTS = {6: 4, 17: 3, 40: 5}


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the grid."""

    build: Callable[[], nn.Module]
    bitwise: bool  # near-ties are forbidden
    tokens: int
    passed: bool = False  # the caller passes caches of mlx-lm
    run_again: bool = False  # some layers run again over a part of a round


def _tiny(tiny: TinyModel, tokens: int, *, passed: bool = False) -> Case:
    again = tiny.module in (*RUN_AGAIN, "deepseek_v41")
    return Case(partial(build_tiny, tiny), tiny.bitwise, tokens, passed, again)


# After the prompt, 31 emitted tokens and two rejected ones write to each slot of a
# window of 16 twice.
MODELS = {name: _tiny(tiny, 31) for name, tiny in TINY_MODELS.items()} | {
    f"{name}, passed": _tiny(tiny, 31, passed=True) for name, tiny in RARER.items()
}
OTHERS = {
    f"census: {name}": Case(
        partial(census.build, name),
        row.bitwise,
        16,
        run_again=name in (*RUN_AGAIN, "deepseek_v41"),
    )
    for name, row in BUILT.items()
    if not (row.tiny or row.unequal)
}
CASES = MODELS | OTHERS
# The rest is slow; test_census.py compares its rows, bit for bit if possible.
QUICK = [*MODELS, *(name for name in OTHERS if name[8:] in census.FEW)]
# At least one model for each kind of cache; target and draft both have that kind.
FOR_THEMSELVES = (
    *("llama", "qwen3_5", "mamba", "lfm2", "recurrent_gemma", "rwkv7"),
    *("bailing_moe_v3", "deepseek_v3(MLA)", "gemma3_text", "llama(sliding)"),
    *("llama4, passed", "longcat_flash, passed", "gemma3n, passed"),
)


@pytest.mark.parametrize(
    ("name", "chosen"), covering(CASES, SAMPLINGS, quick=(0, QUICK))
)
def test_any_draft_leaves_the_text_as_plain_decoding_has_it(
    name: str, chosen: str
) -> None:
    case = CASES[name]
    seen = check_identity(
        case.build(),
        prompt_of(PROMPT),
        draft_length=5 if case.tokens > 16 else 3,
        tokens=case.tokens,
        bitwise=case.bitwise,
        kinds=["turning"],
        samplings=[SAMPLINGS[chosen]],
        passed=case.passed,
    )
    assert seen.texts == 1
    assert seen.rejected >= 2
    assert seen.reruns == 0
    assert (seen.mixer_reruns > 0) == case.run_again


@pytest.mark.parametrize(
    ("name", "chosen"), covering(MODELS, SAMPLINGS, quick=(0, FOR_THEMSELVES))
)
def test_a_model_that_drafts_for_itself_is_always_right(name: str, chosen: str) -> None:
    """Target and draft are one model, with two sets of caches written in each round."""
    case = MODELS[name]
    seen = check_identity(
        case.build(),
        prompt_of(13),  # the window is filled in a round
        draft_length=4,
        tokens=16,
        bitwise=case.bitwise,
        kinds=["right"],
        samplings=[SAMPLINGS[chosen]],
        passed=case.passed,
    )
    assert seen.texts == 1
    assert seen.reruns == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("name", CASES)
def test_any_draft_leaves_a_long_text_as_plain_decoding_has_it(
    name: str, length: int
) -> None:
    case = CASES[name]
    seen = check_identity(
        case.build(),
        prompt_of(length),
        draft_length=PROMPTS[length],
        tokens=120,
        bitwise=case.bitwise,
        kinds=DRAFTERS,
        passed=case.passed,
    )
    assert seen.texts == 8
    assert seen.reruns == 0


def test_different_seeds_give_different_texts() -> None:
    """If they did not, tests of equal texts would prove little."""
    generator = SpeculativeGenerator(tiny_models.build("llama"), byte_tokenizer())
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
    model, chooser = tiny_models.build("llama"), Chooser(GREEDY, 4)
    with pytest.raises(AssertionError, match="bit for bit"):
        assert_same_text(model, chooser, [1], [1, 2], [1, 3], width=2, bitwise=True)
