"""The distribution of texts of whole generations, by counting.

Target and draft have four token ids, and a draft has three tokens, so that a rejection,
a residual draw, a bonus and the next round fall into the first three emitted tokens.
Their joint distribution is computed from the target alone. Each generation has another
seed.

Sizes are from the table for 64 outcomes at alpha 1e-4 and power .99: 10,009 find a
total variation of 0.05, 1,112 one of 0.15, 626 one of 0.2 and 156 one of 0.4 (the size
goes with its square). Texts expected less than five times count as one outcome. The
control is off by more.
"""

import warnings
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_speculation import (
    CascadeDraft,
    DrafterFaultWarning,
    LookupDraft,
    SpeculativeGenerator,
)
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.models import quantize_weights
from mlx_speculation.samplers import Acceptance, Sampler, verifier
from support.drafters.broken_drafters import nan_logits
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import letter_tokenizer
from support.sampling.text_counts import Texts, excess

VOCAB = 4
CONTROL = 100  # generations: the fault is large
TEXTS = Texts(VOCAB, 3, [0, 2, 1, 3, 3])


@cache
def models() -> tuple[nn.Module, nn.Module]:
    tiny = TINY_MODELS["llama"]
    shallow = replace(tiny, args=tiny.args | {"num_hidden_layers": 1})
    target, draft = (build_tiny(shallow, seed=seed, vocab=VOCAB) for seed in (0, 3))
    return target, draft


@cache
def quantized_draft() -> nn.Module:
    tiny = TINY_MODELS["llama"]
    shallow = replace(tiny, args=tiny.args | {"num_hidden_layers": 1})
    draft = build_tiny(shallow, seed=3, vocab=VOCAB)
    quantize_weights(draft, 4)
    return draft


def generator_of(
    acceptance: Acceptance, drafting: str = "model"
) -> SpeculativeGenerator:
    target, draft = models()
    lookup = LookupDraft(corpus=[[3, 3, 1, 2, 0, 3, 1, 1, 2, 2]])
    drafts: dict[str, DraftArgument] = {
        "model": draft,
        "lookup": lookup,
        "cascade": CascadeDraft(lookup, draft),
        "three ids": draft,
        "four bits": quantized_draft(),
    }
    return SpeculativeGenerator(
        target,
        letter_tokenizer(VOCAB),
        draft=drafts[drafting],
        draft_length=3,
        draft_vocabulary=[0, 1, 3] if drafting == "three ids" else None,
        acceptance=acceptance,
    )


PLAIN, FILTERED = "plain distribution", "filtered, draft at its own temperature"
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {"temperature": 1.2},
    FILTERED: {
        "temperature": 1.0,
        "top_k": 3,
        "draft_temperature": 0.6,
    },
}
QUICK, SHORT, MIDDLE, LONG = 156, 626, 1_112, 10_009
RUNS = [
    pytest.param(
        acceptance,
        case,
        samples,
        # Other tests check that keyed text equals plain decoding's, and tests/samplers
        # enumerates the distributions of the two other rules.
        marks=() if (samples, acceptance) == (QUICK, "block") else pytest.mark.slow,
    )
    for acceptance in get_args(Acceptance)
    for case, samples in [
        *((FILTERED, samples) for samples in (QUICK, SHORT, MIDDLE, LONG)),
        (PLAIN, LONG),
    ]
]


@pytest.mark.parametrize(("acceptance", "case", "samples"), RUNS)
def test_the_first_three_tokens_follow_the_targets_joint_distribution(
    acceptance: Acceptance, case: str, samples: int
) -> None:
    options = CASES[case]
    counts = TEXTS.count(generator_of(acceptance), options, samples)
    assert excess(counts, TEXTS.distribution(models()[0], **options)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["lookup", "cascade", "three ids", "four bits"])
@pytest.mark.parametrize("acceptance", get_args(Acceptance))
def test_drafts_of_any_length_and_source_leave_the_distribution_as_it_is(
    acceptance: Acceptance, drafting: str
) -> None:
    """A lookup sometimes proposes nothing; some rounds are behind a step in flight."""
    options = CASES["plain distribution"]
    counts = TEXTS.count(generator_of(acceptance, drafting), options, 2_502)
    assert excess(counts, TEXTS.distribution(models()[0], **options)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafters_nan_leaves_the_distribution_as_it_is(
    acceptance: Acceptance,
) -> None:
    """The round with the NaN continues; then the draft is disabled."""
    options = CASES[PLAIN]
    generator, counts = generator_of(acceptance), np.zeros(VOCAB**3, dtype=np.int64)
    _, draft = models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterFaultWarning)
        for nth in (1, 2, 3):
            for seed in range(834):
                with nan_logits(draft, nth):
                    counts += TEXTS.count(generator, options, 1, first=3 * seed + nth)
    assert excess(counts, TEXTS.distribution(models()[0], **options)) < 1


def test_a_draft_that_is_emitted_in_place_of_the_choice_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def emits(drafted: mx.array, choices: mx.array) -> mx.array:
        choices[:-1] = drafted
        return mx.array(drafted.shape[0])

    monkeypatch.setattr(verifier, "count_accepted", emits)
    options = CASES[PLAIN]
    counts = TEXTS.count(generator_of("keyed"), options, CONTROL)
    assert excess(counts, TEXTS.distribution(models()[0], **options)) > 1


def count_own(sampler: Sampler, samples: int) -> NDArray[np.int64]:
    """Count the texts of a sampler that draws by itself."""
    options = {"sampler": sampler}
    mx.random.seed(17)
    return TEXTS.count(generator_of("keyed"), options, samples)


def hot(log_probs: mx.array) -> mx.array:
    return mx.random.categorical(log_probs / 1.2)


@pytest.mark.slow  # test_sampler.py compares texts with mlx-lm's, seed by seed
@pytest.mark.parametrize("samples", [SHORT, LONG])
def test_the_distribution_of_a_sampler_that_draws_by_itself_is_its_own(
    samples: int,
) -> None:
    distribution = TEXTS.distribution(models()[0], temperature=1.2)
    assert excess(count_own(hot, samples), distribution) < 1
