"""The rule cuts proposals of lookups by survival, also behind a step in flight."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    CascadeDraft,
    InvalidRequestError,
    LookupDraft,
    SpeculativeGenerator,
)
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import Credit
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import Choose, OpenDrafter, Proposal
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from support.identity import GREEDY, SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
TOKENS = 40
_no_choice: Any = None  # lookups do not choose
# A step is in flight if `LANE.seen`, which is 0, is the length of the sequence.
LANE: Any = Lane(build("llama"))


class Proposing(OpenDrafter):
    free = True

    def __init__(self, survival: list[float], length: int = 8) -> None:
        self.survival, self.length = survival, length

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        tokens = mx.zeros(min(limit, self.length), mx.uint32)
        return Proposal(tokens, survival=self.survival)


def lengths_at(cost: float) -> RuleDraftLength:
    """Return lengths for which a drafted token costs `cost` plain steps."""
    costs = RoundCosts({0: {0: 1.0, 16: 1.0 + 16 * cost}})
    lengths = RuleDraftLength([Source(costs, free=True)], Credit(), 16)
    assert lengths.plan(0, 8).reason == "measure"
    return lengths


def drafted(drafter: OpenDrafter, tokens: int = 1) -> int:
    return drafter.propose(Sequence([0] * tokens), 8, _no_choice).length


@pytest.mark.parametrize(("cost", "expected"), [(1 / 32, 6), (1 / 4, 2), (0.5, 1)])
def test_a_proposal_is_cut_where_its_survival_no_longer_pays(
    cost: float, expected: int
) -> None:
    survival = [0.9, 0.48, 0.2, 0.1, 0.06, 0.05, 0.01, 0.01]
    lengths = lengths_at(cost)
    drafter = RuledDrafter([Proposing(survival)], lengths, LANE)
    assert lengths.plan(0, 8).length == 8
    assert drafted(drafter) == expected
    assert drafter.offer(Sequence([0]), 8, _no_choice) == [survival]
    # A batch chooses a length for all of its requests, and sets it here.
    drafter.chosen = replace(lengths.choose(0, 8, [[survival]]), length=7)
    assert drafted(drafter) == 7


def test_behind_a_step_the_first_token_stands_for_its_own() -> None:
    lengths = lengths_at(1 / 4)
    lengths.plan(0, 8)
    drafter = RuledDrafter([Proposing([0.9, 0.8, 0.1, 0.1])], lengths, LANE)
    assert drafted(drafter) == 2
    # Never 1: the first token only guesses the token of the step.
    assert drafted(drafter, tokens=0) in (0, 2, 3)
    surely = RuledDrafter([Proposing([1.0] * 8)], lengths, LANE)
    assert drafted(surely, tokens=0) == 8


def test_without_tokens_there_is_no_draft() -> None:
    lengths = lengths_at(0.5)
    lengths.plan(0, 8)
    assert drafted(RuledDrafter([OpenDrafter()], lengths, LANE)) == 0
    assert drafted(RuledDrafter([Proposing([], 0)], lengths, LANE)) == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_a_prediction_is_drafted_and_leaves_the_text_as_it_is(sampled: bool) -> None:
    model, sampling = build("llama"), SAMPLED if sampled else GREEDY
    options: dict[str, Any] = {"max_tokens": TOKENS, "sampling": sampling}
    plain = SpeculativeGenerator(model, byte_tokenizer())
    text = plain.generate(PROMPT, **options).tokens
    nearly = [t if i % 15 else (t + 1) % 256 for i, t in enumerate(text)]
    lookup = LookupDraft(history=0)
    for draft in (lookup, CascadeDraft(lookup, build("llama", seed=1))):
        generator = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
        for length in (None, 6):
            made = generator.generate(
                PROMPT, prediction=nearly, draft_length=length, **options
            )
            assert made.tokens == text
            if length is not None:
                counts = made.stats.sources["prediction"]
                assert counts.accepted > TOKENS / 3
    unlike = generator.generate(PROMPT, prediction="another text", **options)
    assert unlike.tokens == text


def test_a_prediction_needs_a_lookup_and_ids_of_the_target() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    for draft in (None, build("llama", seed=1)):
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)
        with pytest.raises(InvalidRequestError, match="without a lookup"):
            generator.stream(PROMPT, prediction="some text")
    lookup = SpeculativeGenerator(model, tokenizer, draft="lookup")
    with pytest.raises(InvalidRequestError, match="token id is 300"):
        lookup.stream(PROMPT, prediction=[1, 300])
    assert lookup.generate(PROMPT, prediction="", max_tokens=3).stats.emitted == 3
