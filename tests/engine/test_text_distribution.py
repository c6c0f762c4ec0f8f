"""The distribution of texts of whole generations, by counting.

The joint distribution of the first three emitted tokens is computed from the target
alone. Drafts have at most three tokens. Some of the three emitted tokens are drawn from
the residual after a rejection, and some in later rounds. If a draft is shorter than
three tokens, one of the three can be a bonus token.

For 64 outcomes at alpha 1e-4 and power .99, 10,009 texts detect a total variation of
0.05, and 156 texts detect one of 0.4.
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
from mlx_speculation.engine.draft_length.base import Compared, Plan
from mlx_speculation.engine.draft_length.rule import DraftRule
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.drafters.base import Choose, Proposal, WrappedDrafter
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane, quantize_weights
from mlx_speculation.samplers import Acceptance, allowed_tokens, verifier
from support.drafters.broken_drafters import nan_logits
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import letter_tokenizer

VOCAB, EMITTED = 4, 3
ALL = range(VOCAB)
PROMPT = [0, 2, 1, 3, 3]
TEXTS = list(product(ALL, repeat=EMITTED))
NORMAL = 3.719  # a normal variable exceeds it with probability 1e-4
CONTROL = 100  # generations: few, since the fault is large
PLAIN: dict[str, Any] = {"temperature": 1.2}
FILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "draft_temperature": 0.6}
QUICK, LONG = 156, 10_009


@cache
def model(seed: int) -> nn.Module:
    """Return the target, for seed 0, or the draft model."""
    tiny = TINY_MODELS["llama"]
    shallow = replace(tiny, args=tiny.args | {"num_hidden_layers": 1})
    return build_tiny(shallow, seed=seed, vocab=VOCAB)


def planned(index: int, length: int) -> Plan:
    return Plan(length, "best", Compared("", index, False, [], (), 1.0))


@cache
def quantized_draft() -> nn.Module:
    draft = model.__wrapped__(3)
    quantize_weights(draft, 4)
    return draft


def generator_of(
    acceptance: Acceptance, drafting: str = "model"
) -> SpeculativeGenerator:
    lookup = LookupDraft(corpus=[[3, 3, 1, 2, 0, 3, 1, 1, 2, 2]])
    drafts: dict[str, DraftArgument] = {
        "model": model(3),
        "lookup": lookup,
        "cascade": CascadeDraft(lookup, model(3)),
        "three ids": model(3),
        "four bits": quantized_draft(),
    }
    return SpeculativeGenerator(
        model(0),
        letter_tokenizer(VOCAB),
        draft=drafts[drafting],
        draft_length=3,
        draft_vocabulary=[0, 1, 3] if drafting == "three ids" else None,
        acceptance=acceptance,
    )


def distribution(
    *, temperature: float, top_k: int = 0, allowed: SequenceOf[int] = ALL, **_: Any
) -> NDArray[np.float64]:
    """Return the probability of every text, from forwards of the target alone."""
    prompts = mx.array([[*PROMPT, *text] for text in TEXTS])
    logits = model(0)(prompts, cache=make_prompt_cache(model(0)))
    rows = logits[:, len(PROMPT) - 1 : -1].astype(mx.float32)
    scaled = np.array(rows, dtype=np.float64) / temperature
    odds = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    if top_k:
        floor = np.sort(odds, axis=-1)[..., -top_k, None]
        odds = np.where(odds >= floor, odds, 0)
    odds = np.where(np.isin(ALL, allowed), odds, 0)
    probs = odds / odds.sum(axis=-1, keepdims=True)
    each = np.take_along_axis(probs, np.array(TEXTS)[..., None], axis=-1)
    joint: NDArray[np.float64] = each[..., 0].prod(axis=-1)
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def count(
    generator: SpeculativeGenerator,
    options: dict[str, Any],
    samples: int,
    first: int = 0,
) -> NDArray[np.int64]:
    places = {text: place for place, text in enumerate(TEXTS)}
    counts, allowed = np.zeros(len(places), dtype=np.int64), options.get("allowed")
    sampling = Sampling(**{k: v for k, v in options.items() if k != "allowed"})
    for seed in range(first, first + samples):
        result = generator.generate(
            PROMPT,
            max_tokens=EMITTED + 2,  # so that no counted token ends the budget
            stop_tokens=(),
            sampling=replace(sampling, seed=seed),
            constraint=None if allowed is None else allowed_tokens(allowed),
        )
        counts[places[tuple(result.tokens[:EMITTED])]] += 1
    return counts


def excess(counts: NDArray[np.int64], options: dict[str, Any]) -> float:
    """Return chi-square divided by its bound at alpha 1e-4 (Wilson and Hilferty)."""
    probs = distribution(**options)
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    seen, due = seen[due > 0], due[due > 0]
    statistic = float(((seen - due) ** 2 / due).sum())
    spread = 2 / (9 * (len(due) - 1))
    cube: float = (1 - spread + NORMAL * spread**0.5) ** 3
    return statistic / ((len(due) - 1) * cube)


RUNS = [
    pytest.param(
        acceptance,
        options,
        samples,
        # One run is quick. Other quick tests check that keyed text equals plain
        # decoding's, or enumerate the distributions of the two other rules.
        marks=() if (samples, acceptance) == (QUICK, "block") else pytest.mark.slow,
    )
    for acceptance in get_args(Acceptance)
    for options, samples in [(FILTERED, QUICK), (FILTERED, LONG), (PLAIN, LONG)]
]


@pytest.mark.parametrize(("acceptance", "options", "samples"), RUNS)
def test_the_first_three_tokens_follow_the_targets_joint_distribution(
    acceptance: Acceptance, options: dict[str, Any], samples: int
) -> None:
    assert excess(count(generator_of(acceptance), options, samples), options) < 1


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["lookup", "cascade", "three ids", "four bits"])
@pytest.mark.parametrize("acceptance", get_args(Acceptance))
def test_drafts_of_any_length_and_source_leave_the_distribution_as_it_is(
    acceptance: Acceptance, drafting: str
) -> None:
    """A lookup sometimes proposes nothing. Some rounds begin with a step in flight."""
    assert excess(count(generator_of(acceptance, drafting), PLAIN, 2_502), PLAIN) < 1


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_distribution_is_the_models_among_what_a_constraint_allows(
    acceptance: Acceptance,
) -> None:
    options = PLAIN | {"allowed": [0, 1, 3]}
    assert excess(count(generator_of(acceptance), options, 2_502), options) < 1


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafters_nan_leaves_the_distribution_as_it_is(
    acceptance: Acceptance,
) -> None:
    """The round with the NaN continues; then the draft is disabled."""
    generator, counts = generator_of(acceptance), np.zeros(len(TEXTS), dtype=np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterFaultWarning)
        for nth in (1, 2, 3):
            for seed in range(834):
                with nan_logits(model(3), nth):
                    counts += count(generator, PLAIN, 1, first=3 * seed + nth)
    assert excess(counts, PLAIN) < 1


def test_a_draft_that_is_emitted_in_place_of_the_choice_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def emits(drafted: mx.array, choices: mx.array) -> mx.array:
        choices[:-1] = drafted
        return mx.array(drafted.shape[0])

    monkeypatch.setattr(verifier, "count_accepted", emits)
    assert excess(count(generator_of("keyed"), PLAIN, CONTROL), PLAIN) > 1


class AdversaryDraft(Draft):
    """A draft model with made-up forecasts.

    With `looks`, it reads the tokens that it drew, and ends the draft before the first
    odd one.
    """

    def __init__(self, *, looks: bool) -> None:
        self.inner, self.looks = ModelDraft(model(3)), looks

    @property
    def models(self) -> SequenceOf[nn.Module]:
        return self.inner.models

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "Adversary":
        return Adversary(self.inner.open(lane, sequence, draft_cache), self.looks)


class Adversary(WrappedDrafter):
    def __init__(self, inner: Any, looks: bool) -> None:
        super().__init__(inner)
        self.looks = looks

    def forecast(self, sequence: Sequence, limit: int) -> SequenceOf[float]:
        said = zlib.crc32(repr(sequence.tokens).encode())
        return [(said >> n) % 7 / 7 for n in range(limit)]

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        proposal: Proposal = self.inner.propose(sequence, limit, choose)
        if not self.looks:
            return proposal
        tokens: Any = proposal.tokens.tolist()
        odd = next((n for n, token in enumerate(tokens) if token % 2), len(tokens))
        return proposal.until(odd)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("looks", [False, True])
def test_all_but_drawn_tokens_may_choose_source_and_length(
    acceptance: Acceptance, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash of known tokens, rounds and lookup proposals chooses source and length.

    This does not change the distribution. In the control, drawn tokens decide where
    drafts end; the same number of texts shows that this changes the distribution.
    """
    rounds: list[int] = []

    def chosen(
        self: RuleDraftLength,
        context: int,
        limit: int,
        offered: Any,
        *,
        behind: bool = False,
    ) -> Plan:
        if looks:
            return planned(1, min(limit, 3))
        rounds.append(len(rounds) % 5)
        said = zlib.crc32(repr((rounds[-9:], context, offered, behind)).encode())
        return planned(int(said % 4 > 0), min(limit, 1 + said // 4 % 3))

    monkeypatch.setattr(RuleDraftLength, "choose", chosen)
    monkeypatch.setattr(DraftRule, "_measures", lambda *_: False)
    lookup = LookupDraft(corpus=[[3, 3, 1, 2, 0, 3, 1, 2, 2, 1, 0]], history=200)
    generator = SpeculativeGenerator(
        model(0),
        letter_tokenizer(VOCAB),
        draft=CascadeDraft(lookup, AdversaryDraft(looks=looks)),
        acceptance=acceptance,
    )
    assert (excess(count(generator, PLAIN, 1_200), PLAIN) > 1) == looks
