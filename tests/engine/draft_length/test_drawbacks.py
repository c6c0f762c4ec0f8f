"""Statistics of streams and batches give the reason why nothing is drafted."""

from typing import Any

import pytest

from mlx_speculation import (
    BatchGenerator,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine.draft_length.base import Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("measured")
PROMPT = list(range(21))
# No token repeats, so a lookup finds nothing.
NEW: dict[str, Any] = {
    "max_tokens": 24,
    "sampling": Sampling(presence_penalty=100.0, presence_context_size=0),
}


def planned(survival: list[float], *, cost: float, credit: float = 4.0) -> Plan:
    """Return the plan if a drafted token costs `cost` plain steps."""
    costs = RoundCosts({0: {0: 0.01, 16: 0.01 * (1 + 16 * cost)}})
    source = Source(costs, free=True, name="lookup")
    shared = Credit()
    shared.steps[0] = credit
    rule = DraftRule([source], shared, 16)
    assert rule.choose(0, 8, [[[]]]).reason == "measure"
    return rule.choose(0, 8, [[survival]])


@pytest.mark.parametrize(
    ("survival", "cost", "credit", "reason"),
    [
        ([], 0.1, 4.0, "lookup has no proposal"),
        ([0.9], 0.1, -0.5, "lookup has no credit (-0.5 steps)"),
        ([0.9], 3.0, 1.0, "no draft of lookup pays with a credit of 1.0 steps"),
        ([0.1], 0.5, 4.0, "lookup: 1.10 tokens in 15.0 ms"),
    ],
)
def test_a_plan_without_drafts_has_the_reason_and_its_numbers(
    survival: list[float], cost: float, credit: float, reason: str
) -> None:
    plan = planned(survival, cost=cost, credit=credit)
    assert plan.length == 0
    assert plan.declined is bool(survival)
    assert plan.drawback == f"{reason}; a plain step takes 10.0 ms"


def test_a_plan_with_drafts_declines_nothing() -> None:
    plan = planned([0.9], cost=0.1)
    assert plan.length == 1
    assert not plan.declined
    assert plan.drawback == "nothing was proposed"  # if the draft stays empty


@pytest.fixture(name="generator", scope="module")
def _generator() -> SpeculativeGenerator:
    draft = LookupDraft(history=0)
    return SpeculativeGenerator(build("llama"), byte_tokenizer(), draft=draft)


def test_a_text_without_drafts_says_why(generator: SpeculativeGenerator) -> None:
    result = generator.generate(PROMPT, **NEW)
    assert len(set(result.tokens)) == 24
    assert result.stats.drafts == 0
    assert "lookup has no proposal; a plain step takes" in result.stats.paused
    short = generator.generate(PROMPT, max_tokens=1)
    assert short.stats.paused == "the text is short"
    plain = generator.generate(PROMPT, draft_length=0, **NEW)
    assert plain.stats.paused == ""


def test_a_request_of_a_batch_says_why(generator: SpeculativeGenerator) -> None:
    with BatchGenerator(generator) as batch:
        uids = [batch.insert(PROMPT[i:], **NEW) for i in range(2)]
        while batch.waiting or batch.running:
            batch.next()
        for uid in uids:
            stats = batch.remove(uid).stats
            assert stats.drafts == 0
            assert "lookup has no proposal; a plain step takes" in stats.paused


def test_a_text_that_is_drafted_has_no_reason() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    text = SpeculativeGenerator(model, tokenizer).generate(PROMPT, max_tokens=12).tokens
    draft = LookupDraft(corpus=[PROMPT + text])
    fixed = SpeculativeGenerator(model, tokenizer, draft=draft, draft_length=3)
    stats = fixed.generate(PROMPT, max_tokens=12).stats
    assert stats.drafts > 0
    assert stats.paused == ""
