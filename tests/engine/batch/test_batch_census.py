"""Every architecture of mlx-lm runs in batches, or is listed as running alone."""

from typing import Any

import pytest

from mlx_speculation import (
    BatchGenerator,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.models.exclusions import ALONE, TOGETHER, why_alone
from mlx_speculation.samplers import Chooser
from support.identity import assert_same_text, plain_text, prompt_of
from support.models import census
from support.models.census import BUILT
from support.models.tiny_tokenizer import byte_tokenizer

TOKENS = 16
LENGTHS = (17, 6, 40)  # around the windows of 16
QUICK = {"falcon_h1", "gemma3n", "deepseek_v3"}


def test_every_architecture_stands_in_one_table() -> None:
    assert not TOGETHER & ALONE.keys()
    assert TOGETHER | ALONE.keys() == BUILT.keys()


def test_what_is_in_no_table_runs_alone() -> None:
    assert why_alone(census.build("llama")) is None
    assert why_alone(census.build("gemma2")) == f"gemma2: {ALONE['gemma2']}"
    strange = census.build("llama")
    strange.__class__ = type("Model", (type(strange),), {"__module__": "of.my.own"})
    assert "own: it has not been tried" in str(why_alone(strange))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(TOGETHER)
    ],
)
def test_rows_of_an_architecture_write_what_they_do_alone(name: str) -> None:
    model = census.build(name)
    prompts = [prompt_of(length) for length in LENGTHS]
    right = [plain_text(model, prompt, TOKENS) for prompt in prompts]
    corpus = [
        prompt + [(token + (i % 7 == 6)) % 256 for i, token in enumerate(text)]
        for prompt, text in zip(prompts, right, strict=True)
    ]
    draft = LookupDraft(corpus=corpus)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=draft, draft_length=4
    )
    with BatchGenerator(generator) as batch:
        options: dict[str, Any] = {"max_tokens": TOKENS, "stop_tokens": ()}
        uids = [batch.insert(prompt, **options) for prompt in prompts[:2]]
        batch.next()
        uids.append(batch.insert(prompts[2], **options))
        while batch.waiting or batch.running:
            batch.next()
        assert not batch.stats.alone
        assert 0.2 < batch.stats.acceptance_rate < 1
        texts = [batch.remove(uid).tokens for uid in uids]
    for prompt, expected, text in zip(prompts, right, texts, strict=True):
        assert_same_text(
            model,
            Chooser(Sampling(seed=0), 256),
            prompt,
            expected,
            text,
            width=5,
            bitwise=BUILT[name].bitwise,
        )


@pytest.mark.parametrize("name", ["gemma2", "llama4"])
def test_rows_of_the_others_run_in_turns(name: str) -> None:
    generator = SpeculativeGenerator(census.build(name), byte_tokenizer())
    prompts = [prompt_of(length) for length in LENGTHS]
    results = generator.generate_batch(prompts, max_tokens=6)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == generator.generate(prompt, max_tokens=6).tokens
    with BatchGenerator(generator) as batch:
        uid = batch.insert(prompts[0])
        assert batch.why_alone(uid) == f"{name}: {ALONE[name]}"
        assert batch.stats.alone == {f"{name}: {ALONE[name]}": 1}
