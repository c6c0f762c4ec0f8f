"""The distribution of the text itself: what whole generations emit, counted.

A target and a draft of four tokens, drafts of three, so that a rejection, a residual
draw, a bonus and the next round all fall into the first three emitted tokens. Their
joint distribution is computed from the target alone; each generation has a seed of its
own.

Sizes are from the table for 64 outcomes at alpha 1e-4 and power .99: 10,009 find a
total variation of 0.05, 1,112 one of 0.15, 626 one of 0.2 and 278 one of 0.3 (the size
goes with its square). Texts expected less than five times count as one outcome. The
control is off by more.
"""

import warnings
import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_speculation import (
    CascadeDraft,
    DrafterFaultWarning,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import quantize_weights
from mlx_speculation.samplers import Acceptance, Sampler, verifier
from mlx_speculation.samplers import Sampling as Options
from support.drafters.broken_drafters import nan_logits
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import letter_tokenizer

VOCAB, EMITTED = 4, 3
NORMAL = 3.719  # what a normal variable exceeds with odds of 1e-4
CONTROL = 100  # generations: the fault is large
PROMPT = [0, 2, 1, 3, 3]
TEXTS = list(product(range(VOCAB), repeat=EMITTED))


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


def joint_distribution(options: Options) -> NDArray[np.float64]:
    """Return the probability of every text, from rows of the target alone."""
    target, _ = models()
    prompts = mx.array([[*PROMPT, *text] for text in TEXTS])
    logits = target(prompts, cache=make_prompt_cache(target))
    rows = logits[:, len(PROMPT) - 1 : -1].astype(mx.float32)
    scaled = np.array(rows, dtype=np.float64) / options.temperature
    odds = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probs = odds / odds.sum(axis=-1, keepdims=True)
    if options.top_k:
        floor = np.sort(probs, axis=-1)[..., -options.top_k, None]
        probs = np.where(probs >= floor, probs, 0)
        probs /= probs.sum(axis=-1, keepdims=True)
    places = np.array(TEXTS)[..., None]
    joint = np.take_along_axis(probs, places, axis=-1)[..., 0].prod(axis=-1)
    assert abs(joint.sum() - 1) < 1e-9
    distribution: NDArray[np.float64] = joint
    return distribution


def count_texts(
    generator: SpeculativeGenerator,
    options: dict[str, Any],
    samples: int,
    first: int = 0,
) -> NDArray[np.int64]:
    """Generate from as many seeds, from the first on, and count the texts."""
    places = {text: place for place, text in enumerate(TEXTS)}
    counts = np.zeros(len(TEXTS), dtype=np.int64)
    for seed in range(first, first + samples):
        result = generator.generate(
            PROMPT,
            max_tokens=EMITTED + 2,  # so that the third is not the last of a budget
            stop_tokens=(),
            sampling=Sampling(seed=seed, **options),
        )
        counts[places[tuple(result.tokens[:EMITTED])]] += 1
    return counts


def excess(counts: NDArray[np.int64], distribution: NDArray[np.float64]) -> float:
    """Return chi-square over its bound at alpha 1e-4, by Wilson and Hilferty's cube.

    A text without probability must not have come.
    """
    assert counts[distribution == 0].sum() == 0
    expected = distribution * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    seen, due = seen[due > 0], due[due > 0]
    statistic = float(((seen - due) ** 2 / due).sum())
    spread = 2 / (9 * (len(due) - 1))
    cube: float = (1 - spread + NORMAL * spread**0.5) ** 3
    return statistic / ((len(due) - 1) * cube)


def generator_of(
    acceptance: Acceptance, drafting: str = "model"
) -> SpeculativeGenerator:
    target, draft = models()
    lookup = LookupDraft(corpus=[[3, 3, 1, 2, 0, 3, 1, 1, 2, 2]])
    drafts: dict[str, DraftArgument] = {
        "model": draft,
        "lookup": lookup,
        "cascade": CascadeDraft(lookup, draft),
        "adversary": CascadeDraft(lookup, draft),
        "three ids": draft,
        "four bits": quantized_draft(),
    }
    return SpeculativeGenerator(
        target,
        letter_tokenizer(VOCAB),
        draft=drafts[drafting],
        draft_length=None if drafting == "adversary" else 3,
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
QUICK, SHORT, MIDDLE, LONG = 278, 626, 1_112, 10_009
RUNS = [
    pytest.param(
        acceptance,
        case,
        samples,
        # Keyed text equals that of plain decoding, which other tests hold it to, and
        # the distributions of both other rules are enumerated in tests/samplers.
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
    counts = count_texts(generator_of(acceptance), options, samples)
    assert excess(counts, joint_distribution(Options(**options))) < 1


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["lookup", "cascade", "three ids", "four bits"])
@pytest.mark.parametrize("acceptance", get_args(Acceptance))
def test_drafts_of_any_length_and_source_leave_the_distribution_as_it_is(
    acceptance: Acceptance, drafting: str
) -> None:
    """A lookup proposes nothing now and then; rounds behind a step are among these."""
    options = CASES["plain distribution"]
    counts = count_texts(generator_of(acceptance, drafting), options, 2_502)
    assert excess(counts, joint_distribution(Options(**options))) < 1


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafters_nan_leaves_the_distribution_as_it_is(
    acceptance: Acceptance,
) -> None:
    """The round that it comes in goes on; then the draft is set aside."""
    options = CASES[PLAIN]
    generator, counts = generator_of(acceptance), np.zeros(len(TEXTS), dtype=np.int64)
    _, draft = models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterFaultWarning)
        for nth in (1, 2, 3):
            for seed in range(834):
                with nan_logits(draft, nth):
                    counts += count_texts(generator, options, 1, first=3 * seed + nth)
    assert excess(counts, joint_distribution(Options(**options))) < 1


@pytest.fixture(name="adversary")
def _adversary(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a hash of the known tokens and of the survivals choose, in place of costs."""
    known: list[int] = []
    rounds: list[int] = []  # of all requests: what was is known too
    propose = RuledDrafter.propose

    def seen(
        self: RuledDrafter, sequence: Sequence, limit: int, choose: Choose
    ) -> Proposal:
        known[:] = sequence.tokens
        return propose(self, sequence, limit, choose)

    def chosen(
        self: RuleDraftLength,
        context: int,
        limit: int,
        survivals: SequenceOf[SequenceOf[float] | None],
        *,
        behind: bool,
    ) -> tuple[int, int]:
        rounds.append(0)
        said = zlib.crc32(repr((len(rounds), known, survivals, behind)).encode())
        return said % 2, min(limit, said // 2 % 4)

    monkeypatch.setattr(RuledDrafter, "propose", seen)
    monkeypatch.setattr(RuleDraftLength, "choose", chosen)
    return known


@pytest.mark.slow
@pytest.mark.usefixtures("adversary")
@pytest.mark.parametrize("acceptance", ["block", "rejection"])
def test_what_is_known_before_a_token_may_choose(acceptance: Acceptance) -> None:
    """The source and the length: nothing of a sampled token itself."""
    options, generator = CASES[PLAIN], generator_of(acceptance, "adversary")
    counts = count_texts(generator, options, SHORT)
    assert excess(counts, joint_distribution(Options(**options))) < 1


def test_a_draft_that_is_emitted_in_place_of_the_choice_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def emits(drafted: mx.array, choices: mx.array) -> mx.array:
        choices[:-1] = drafted
        return mx.array(drafted.shape[0])

    monkeypatch.setattr(verifier, "count_accepted", emits)
    options = CASES[PLAIN]
    counts = count_texts(generator_of("keyed"), options, CONTROL)
    assert excess(counts, joint_distribution(Options(**options))) > 1


def count_own(sampler: Sampler, samples: int) -> NDArray[np.int64]:
    """Count the texts of a sampler that draws by itself."""
    options = {"sampler": sampler}
    mx.random.seed(17)
    return count_texts(generator_of("keyed"), options, samples)


def hot(log_probs: mx.array) -> mx.array:
    return mx.random.categorical(log_probs / 1.2)


@pytest.mark.slow  # test_sampler.py holds the texts to those of mlx-lm, seed by seed
@pytest.mark.parametrize("samples", [SHORT, LONG])
def test_the_distribution_of_a_sampler_that_draws_by_itself_is_its_own(
    samples: int,
) -> None:
    distribution = joint_distribution(Options(temperature=1.2))
    assert excess(count_own(hot, samples), distribution) < 1
