"""The joint distribution of texts does not depend on the choice of source and length.

An adversary chooses by all that a choice may depend on: known tokens, earlier rounds of
all requests, the proposals of lookups. The texts keep the target's distribution, with a
vocabulary of 8. As a control, a drafter that looks at its drawn tokens is found with
the same number of texts.
"""

import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import mlx.nn as nn
import pytest

from mlx_speculation import CascadeDraft, LookupDraft, SpeculativeGenerator
from mlx_speculation.engine.draft_length.base import Compared, Plan
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
from support.sampling.text_counts import Texts, excess

VOCAB, SAMPLES = 8, 1_200
OPTIONS: dict[str, Any] = {"temperature": 1.2}
TEXTS = Texts(VOCAB, 2, [0, 2, 1, 7, 3])


class AdversaryDraft(Draft):
    """A draft model whose drafters forecast by a hash, or trim by drawn tokens."""

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
        """Return a forecast from a hash of the known tokens."""
        said = zlib.crc32(repr(sequence.tokens).encode())
        return [(said >> n) % 7 / 7 for n in range(limit)]

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Trim the proposal of the model."""
        proposal: Proposal = self.inner.propose(sequence, limit, choose)
        return proposal if self.trim is None else proposal.until(self.trim(proposal))


def looked(proposal: Proposal) -> int:
    """Keep tokens up to the first drawn one that is odd."""
    tokens: Any = proposal.tokens.tolist()
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


def parted(generator: SpeculativeGenerator) -> float:
    due = TEXTS.distribution(generator.model, **OPTIONS)
    return excess(TEXTS.count(generator, OPTIONS, SAMPLES), due)


def planned(index: int, length: int) -> Plan:
    return Plan(length, "best", Compared("", index, False, [], (), 1.0))


@pytest.fixture(autouse=True)
def _choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hash of survivals, forecasts and earlier rounds choose."""
    rounds: list[int] = []  # of all requests

    def chosen(
        self: RuleDraftLength, context: int, limit: int, offered: Any, *, behind: bool
    ) -> Plan:
        rounds.append(len(rounds) % 5)
        said = zlib.crc32(repr((rounds[-9:], context, offered, behind)).encode())
        return planned(int(said % 4 > 0), min(limit, 1 + said // 4 % 3))

    monkeypatch.setattr(RuleDraftLength, "choose", chosen)
    monkeypatch.setattr(DraftRule, "_measures", lambda *_: False)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_what_is_known_before_a_token_may_choose(acceptance: Acceptance) -> None:
    assert parted(generators(acceptance)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafter_that_looks_at_what_it_has_drawn_is_found(
    acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(
        self: RuleDraftLength, context: int, limit: int, offered: Any, *, behind: bool
    ) -> Plan:
        return planned(1, min(limit, 3))

    monkeypatch.setattr(RuleDraftLength, "choose", always)
    assert parted(generators(acceptance, looked)) > 1
