"""An empty draft costs one plain step, and a draft behind a step loses no token.

A draft is "behind" a step if it is made while the step is in flight. Its first token is
a guess of the step's token. The others are verified after the step's real token.
"""

from functools import cache
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import NonFiniteLogitsError, SpeculativeGenerator
from mlx_speculation.caches import Speculation
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.drafters.user_drafter import adapted
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round import outcome
from mlx_speculation.engine.round.final_caches import FinalCaches
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Verifier, verifier
from support.caches.contents import assert_same_content, content, counts
from support.covering import covering
from support.decoder_runs import PROMPT, InjectedError, Run, Step, label
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba2", "recurrent_gemma", "lfm2")
TOKENS = 32
EXAMPLES = settings().max_examples


class PlannedDrafter(ScriptedDrafter):
    """Proposes planned lengths, in turn; tokens at the places `wrong` are wrong."""

    by = 1  # how far a wrong token is from the right one

    def __init__(self, text: list[int], plan: list[int], wrong: set[int]) -> None:
        said = [(t + self.by) % 256 if i in wrong else t for i, t in enumerate(text)]
        super().__init__(said, right=1.0)
        self._plan = cycle(plan)
        self.limits: list[int] = []

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        self.limits.append(limit)
        return super().propose(sequence, min(limit, next(self._plan)), choose)


class PlannedRun(Run):
    def __init__(
        self, model: nn.Module, text: list[int], plan: list[int], wrong: set[int]
    ) -> None:
        self.drafter = PlannedDrafter(PROMPT + text, plan, wrong)
        super().__init__(model, adapted(self.drafter), 4, TOKENS)


@cache
def known(name: str) -> tuple[nn.Module, list[int]]:
    model = build(name)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    return model, plain.generate(PROMPT, max_tokens=TOKENS, sampling=SAMPLED).tokens


@given(
    plan=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    wrong=st.sets(st.integers(len(PROMPT), len(PROMPT) + 30)),
    budget=st.integers(1, 30),
    closed=st.integers(0, 30),
)
@settings(max_examples=max(20, EXAMPLES // 4))
def test_any_plan_of_drafts_gives_the_text_and_the_caches(
    plan: list[int], wrong: set[int], budget: int, closed: int
) -> None:
    model, expected = known("llama")
    drafter = PlannedDrafter(PROMPT + expected, plan, wrong)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=drafter, draft_length=4
    )
    caches = make_prompt_cache(model)
    stream = generator.stream(
        PROMPT, max_tokens=budget, sampling=SAMPLED, prompt_cache=caches
    )
    taken = [chunk.token for chunk, _ in zip(stream, range(closed), strict=False)]
    stream.close()
    assert taken == expected[: min(budget, closed)]
    cached = stream.cached_tokens
    assert cached == (PROMPT + expected)[: len(cached)]
    if taken:
        assert stream.result.next_token == expected[len(cached) - len(PROMPT)]
        twin = Lane(model)
        twin.feed(cached, step=1)
        assert_same_content(content(twin.caches), content(caches))
    stats = stream.stats
    assert len(cached) - len(PROMPT) <= budget
    assert stats.emitted <= stats.rounds + stats.accepted


def test_what_is_drafted_behind_a_step() -> None:
    """`limit` counts the guess of the step's token; `settle` does if it is right."""
    model, text = known("llama")
    first = len(PROMPT)
    # Two plain steps. Then, behind the third, a draft of five tokens: a guess of the
    # step's token and four more, the last of them wrong.
    run = PlannedRun(model, text, [0, 0, 5, 0, 5, 1, 4], {first + 6, first + 9})
    for _ in range(2):
        run.next_round()
    assert len(run.emitted) == 2
    run.next_round()
    assert run.drafter.limits == [4, 5, 5]
    assert run.drafter.calls[-1] == "settle 4"
    assert run.emitted == text[:7]  # two, the step's, three accepted, a correction
    assert counts(run.decoder.request.statistics)["rounds"] == 4
    assert run.decoder.request.statistics.drafted == 4
    assert run.decoder.request.statistics.accepted == 3
    run.next_round()  # no draft, and no step in flight
    assert run.drafter.limits[3:] == [4]
    assert run.emitted == text[:8]
    run.next_round()  # the step's token, at 8, and the correction at 9
    assert run.drafter.calls[-1] == "settle 1"
    assert run.emitted == text[:10]
    run.next_round()
    run.next_round()
    assert run.finish() == text


@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_first_token_costs_only_itself(
    by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wrong guess of the step's token, other drafted tokens are often right."""
    model, text = known("llama")
    assert 0 < text[1] < 255
    monkeypatch.setattr(PlannedDrafter, "by", by)
    run = PlannedRun(model, text, [0, 5], {len(PROMPT) + 1})
    run.next_round()
    run.next_round()
    assert run.drafter.calls[-1] == "settle 0"
    assert run.emitted == text[:7]
    assert run.decoder.request.statistics.accepted == 4


def test_a_draft_of_the_known_token_alone_is_no_draft() -> None:
    model, text = known("llama")
    run = PlannedRun(model, text, [1], set())
    run.next_round()
    assert run.emitted == text[:2]
    run = PlannedRun(model, text, [0, 1], set())
    run.next_round()
    run.next_round()
    assert run.drafter.calls[-2:] == ["propose", "discard"]
    assert run.emitted == text[:2]
    assert run.decoder.request.statistics.drafts == 0


@pytest.mark.parametrize(("name", "kept"), covering(MODELS, [1, 2, 3]))
def test_a_cut_behind_a_step_keeps_what_is_named(name: str, kept: int) -> None:
    model, text = known(name)
    generator = SpeculativeGenerator(model, byte_tokenizer())  # installs hooks
    run = PlannedRun(model, text, [0, 5], set())
    run.next_round()
    run.cut = lambda outcome: outcome.until(kept)
    run.next_round()
    assert run.emitted == text[: 1 + kept]
    assert run.decoder.request.statistics.emitted == 1 + kept
    assert run.decoder.request.statistics.rounds == (2 if kept == 1 else 3)
    caches = FinalCaches(run.decoder.rounds)
    caches.feed_last()
    assert caches.next_token() == text[1 + kept]
    assert run.target.seen == len(run.sequence.tokens)
    del generator


STEPS = [
    (PlannedDrafter, "propose", 1),
    (LaneRound, "forward", 1),
    (Verifier, "verify", 1),
    (verifier, "count_accepted", 1),
    (verifier, "peaks", 1),
    (outcome, "outcomes", 1),
    (outcome, "outcomes", 2),
    (Run, "cut", 1),
    (Speculation, "prepare", 1),
    (PlannedDrafter, "settle", 1),
    (Speculation, "commit", 1),
]


@pytest.mark.parametrize(
    ("name", "step"),
    covering(MODELS, STEPS),
    ids=label,
)
def test_an_error_behind_a_step_changes_nothing(name: str, step: Step) -> None:
    model, text = known(name)
    generator = SpeculativeGenerator(model, byte_tokenizer())
    run = PlannedRun(model, text, [0, 5], {len(PROMPT) + 3})
    run.next_round()
    for error in (InjectedError(), KeyboardInterrupt()):
        run.fail_one_round(step, error)
        assert run.drafter.calls[-1] == "discard"
        run.drafter._plan = cycle([5, 0])
    assert run.finish() == text
    del generator


@pytest.mark.parametrize(("name", "rows"), covering(MODELS, [0, 1]))
def test_nan_in_the_step_or_behind_it_rolls_both_back(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = known(name)
    generator = SpeculativeGenerator(model, byte_tokenizer())
    run = PlannedRun(model, text, [0, 5], set())
    original = LaneRound.forward
    # The forwards are the first step, the step in flight, and the round behind it.
    poisoned = iter([False, rows == 0, rows == 1])

    def forward(self: LaneRound, tokens: mx.array) -> mx.array:
        logits = original(self, tokens)
        return logits * mx.nan if next(poisoned) else logits

    with monkeypatch.context() as patched:
        patched.setattr(LaneRound, "forward", forward)
        run.next_round()
        with pytest.raises(NonFiniteLogitsError, match="rolled back"):
            run.next_round()
    assert run.emitted == text[:1]
    assert run.target.seen == len(PROMPT)
    twin = Lane(model)
    twin.feed(PROMPT[:-1])
    twin.feed(PROMPT[-1:])
    assert_same_content(content(twin.caches), content(run.target.caches))
    assert run.finish() == text
    del generator
