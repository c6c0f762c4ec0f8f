"""Whoever chooses source and length: the joint distribution of texts, vocabulary 8.

An adversary makes forecasts, and chooses by them, out of all that they may depend on:
known tokens, earlier rounds of all requests, the proposals of lookups. The texts stay
those of the target. A drafter that looks at the tokens that it has drawn is found with
as many texts.
"""

import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_speculation import CascadeDraft, LookupDraft, Sampling, SpeculativeGenerator
from mlx_speculation.engine.draft_length.rule import DraftRule
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.drafters.base import Choose, Proposal, WrappedDrafter
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Acceptance
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import letter_tokenizer

VOCAB, EMITTED, SAMPLES = 8, 2, 1_200
NORMAL = 3.719  # what a normal variable exceeds with odds of 1e-4
PROMPT = [0, 2, 1, 7, 3]
TEXTS = list(product(range(VOCAB), repeat=EMITTED))
TEMPERATURE = 1.2


class AdversaryDraft(Draft):
    """A draft model whose drafters forecast by a hash, or trim by what they see."""

    def __init__(self, model: nn.Module, trim: Any = None) -> None:
        self.inner, self.trim = ModelDraft(model), trim

    @property
    def models(self) -> SequenceOf[nn.Module]:
        """The draft model."""
        return self.inner.models

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "Adversary":
        """Return the drafter of one stream."""
        return Adversary(self.inner.open(lane, sequence, draft_cache), self.trim)


class Adversary(WrappedDrafter):
    def __init__(self, inner: Any, trim: Any) -> None:
        super().__init__(inner)
        self.trim = trim

    def forecast(self, sequence: Sequence, limit: int) -> SequenceOf[float]:
        """Return what a hash of the known tokens says."""
        said = zlib.crc32(repr(sequence.tokens).encode())
        return [(said >> n) % 7 / 7 for n in range(limit)]

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Trim the proposal of the model."""
        found: Proposal = self.inner.propose(sequence, limit, choose)
        return found if self.trim is None else found.until(self.trim(found))


def looked(found: Proposal) -> int:
    """Keep tokens up to the first drawn one that is odd."""
    tokens: Any = found.tokens.tolist()
    return next((n for n, token in enumerate(tokens) if token % 2), len(tokens))


def generators(acceptance: Acceptance, trim: Any = None) -> SpeculativeGenerator:
    tiny = TINY_MODELS["llama"]
    tiny = replace(tiny, args=tiny.args | {"num_hidden_layers": 1})
    target, draft = (build_tiny(tiny, seed=seed, vocab=VOCAB) for seed in (0, 3))
    lookup = LookupDraft(corpus=[[7, 3, 1, 2, 0, 3, 1, 6, 2, 5, 4]], history=200)
    return SpeculativeGenerator(
        target,
        letter_tokenizer(VOCAB),
        draft=CascadeDraft(lookup, AdversaryDraft(draft, trim)),
        acceptance=acceptance,
    )


def joint_distribution(target: nn.Module) -> NDArray[np.float64]:
    """Return the probability of every text, from rows of the target alone."""
    prompts = mx.array([[*PROMPT, *text] for text in TEXTS])
    logits = target(prompts, cache=make_prompt_cache(target))
    rows = np.array(logits[:, len(PROMPT) - 1 : -1].astype(mx.float32), np.float64)
    odds = np.exp((rows - rows.max(axis=-1, keepdims=True)) / TEMPERATURE)
    probs = odds / odds.sum(axis=-1, keepdims=True)
    each = np.take_along_axis(probs, np.array(TEXTS)[..., None], axis=-1)
    found: NDArray[np.float64] = each[..., 0].prod(axis=-1)
    return found


def excess(generator: SpeculativeGenerator) -> float:
    """Return chi-square over its bound at alpha 1e-4, by Wilson and Hilferty's cube."""
    places = {text: place for place, text in enumerate(TEXTS)}
    counts = np.zeros(len(TEXTS))
    for seed in range(SAMPLES):
        result = generator.generate(
            PROMPT,
            max_tokens=EMITTED + 2,
            stop_tokens=(),
            sampling=Sampling(temperature=TEMPERATURE, seed=seed),
            draft_length=None,
        )
        counts[places[tuple(result.tokens[:EMITTED])]] += 1
    due = joint_distribution(generator.model) * SAMPLES
    rare = due < 5
    seen, due = (np.append(x[~rare], x[rare].sum()) for x in (counts, due))
    seen, due = seen[due > 0], due[due > 0]
    spread = 2 / (9 * (len(due) - 1))
    cube: float = (1 - spread + NORMAL * spread**0.5) ** 3
    statistic = float(((seen - due) ** 2 / due).sum())
    return statistic / ((len(due) - 1) * cube)


@pytest.fixture(autouse=True)
def _choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hash choose, of survivals, forecasts and what was before."""
    rounds: list[int] = []  # of all requests

    def chosen(
        self: RuleDraftLength, context: int, limit: int, survivals: Any, *, behind: bool
    ) -> tuple[int, int]:
        rounds.append(len(rounds) % 5)
        said = zlib.crc32(repr((rounds[-9:], context, survivals, behind)).encode())
        return int(said % 4 > 0), min(limit, 1 + said // 4 % 3)

    monkeypatch.setattr(RuleDraftLength, "choose", chosen)
    monkeypatch.setattr(DraftRule, "measures", lambda *_: False)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_what_is_known_before_a_token_may_choose(acceptance: Acceptance) -> None:
    assert excess(generators(acceptance)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafter_that_looks_at_what_it_has_drawn_is_found(
    acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(
        self: RuleDraftLength, context: int, limit: int, survivals: Any, *, behind: bool
    ) -> tuple[int, int]:
        return 1, min(limit, 3)

    monkeypatch.setattr(RuleDraftLength, "choose", always)
    assert excess(generators(acceptance, looked)) > 1
