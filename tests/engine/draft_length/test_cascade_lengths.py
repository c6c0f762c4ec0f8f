"""A cascade takes the first proposal; under the rule, the most valuable one."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import CascadeDraft, LookupDraft, SpeculativeGenerator
from mlx_speculation.engine.draft_length import calibration
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import Credit
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDrafter
from mlx_speculation.engine.lookup.survival import AcceptanceRates
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Choice, Rows
from support.identity import SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
LONGEST = 16
LANE: Any = Lane(build("llama"))  # it is empty, so no step is in flight


class Asked(OpenDrafter):
    """Records the limit of each call; proposes so many tokens, or none."""

    free = False

    def __init__(
        self, *, speaks: bool = True, survival: list[float] | None = None
    ) -> None:
        self.speaks, self.survival, self.failed = speaks, survival, False
        self.forecasts: list[float] | None = None
        self.limits: list[int] = []
        self.discarded = 0

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        self.limits.append(limit)
        tokens = mx.zeros((limit if self.speaks else 0,), mx.uint32)
        return Proposal(tokens, survival=self.survival)

    def forecast(self, sequence: Sequence, limit: int) -> list[float] | None:
        return [] if self.failed else self.forecasts

    @property
    def disabled(self) -> bool:
        return self.failed

    def discard(self) -> None:
        self.discarded += 1


def proposed(cascade: CascadeDrafter, limit: int) -> int:
    return cascade.propose(Sequence([0]), limit, _no_choice).length


def _no_choice(logits: mx.array, rows: Rows, ids: mx.array | None = None) -> Choice:
    raise AssertionError("nobody chooses here")


def ruled(
    lookup: Asked, model: Asked, right: float, cost: float = 0.1
) -> tuple[RuledDrafter, RuleDraftLength]:
    """Return a cascade of both drafters under a rule, and the rule's draft lengths."""
    both, rounds = [lookup, model], {0: 1.0, LONGEST: 1.0 + LONGEST * cost}
    known = [
        Source(
            RoundCosts({0: rounds}),
            AcceptanceRates(first=right),
            free=free,
        )
        for free in (True, False)
    ]
    lengths = RuleDraftLength(known, Credit(), LONGEST)
    lookup.free = True
    lengths.forecast = lambda limit: [d.forecast(Sequence([0]), limit) for d in both]
    assert lengths.plan(0, 8).reason == "measure"
    lengths.plan(0, 8)
    return RuledDrafter(both, lengths, LANE), lengths


def test_who_is_worth_most_drafts_and_a_costly_one_is_asked_only_then() -> None:
    sure, unsure = [0.99] * 8, [0.3, 0.1]
    lookup, model = Asked(survival=sure), Asked()
    assert proposed(ruled(lookup, model, 0.6)[0], 8) == 8
    assert model.limits == []
    lookup, model = Asked(survival=unsure), Asked()
    drafter, _ = ruled(lookup, model, 0.9)
    assert proposed(drafter, 8) == 8
    assert (lookup.limits, model.limits) == ([8], [8])
    assert (lookup.discarded, model.discarded) == (1, 0)
    drafter.discard()
    assert (lookup.discarded, model.discarded) == (1, 1)
    lookup, model = Asked(survival=unsure), Asked()
    assert proposed(ruled(lookup, model, 0.0, cost=0.9)[0], 8) == 0
    assert model.limits == []


def test_a_drafter_that_has_failed_is_not_chosen() -> None:
    lookup, model = Asked(survival=[0.9, 0.05]), Asked()
    drafter, _ = ruled(lookup, model, 0.95)
    model.failed = True
    assert proposed(drafter, 8) == 1
    assert model.limits == []
    lookup.failed = True
    assert drafter.disabled


def test_a_drafters_own_forecast_stands_for_its_rates() -> None:
    for forecast, right in ([0.9, 0.85, 0.8, 0.1, 0.0], 0.0), ([0.2, 0.1], 1.0):
        model = Asked()
        drafter, _ = ruled(Asked(speaks=False), model, right)
        model.forecasts = forecast
        length = proposed(drafter, 8)
        assert length == 3 if forecast[0] > 0.5 else length <= 2  # else a trial


@pytest.mark.usefixtures("measured")
def test_calibrated_costs_are_kept_and_the_text_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "PASSES", 1)
    model, small = build("llama"), build("llama", seed=1)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    options: dict[str, Any] = {"max_tokens": 80, "sampling": SAMPLED}
    expected = plain.generate(PROMPT, **options).tokens
    cascade = CascadeDraft(LookupDraft(), small)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=cascade)
    table = generator.calibrate(contexts=[8])
    stream = generator.stream(PROMPT, explain=True, **options)
    assert [chunk.token for chunk in stream] == expected
    other = SpeculativeGenerator(model, byte_tokenizer(), draft=small)
    assert set(other.lengths.sources()[0].costs.table()[0]) == set(table[0])
    limited = generator.stream(PROMPT, explain=True, max_draft=2, **options)
    assert [chunk.token for chunk in limited] == expected
    assert max(plan.length for plan, _ in limited.decisions) <= 2
