"""If a drafter fails, the text continues unchanged without it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    CascadeDraft,
    DrafterFaultWarning,
    LookupDraft,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    pure,
)
from mlx_speculation.engine import MtpDraft, MtpDrafter, Result
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.drafters.draft_model import ModelDrafter
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.lookup.drafter import LookupDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.models.mtp import MtpHead
from mlx_speculation.samplers import Chooser, Rows, Verifier
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.drafters.broken_drafters import (
    CALLS,
    RAISES,
    WRONG,
    BrokenError,
    Happened,
    broken,
    nan_logits,
)
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED
from support.models.mtp_checkpoints import LAYOUTS, family, make
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

TOKENS = 20
# Repeats itself, so that lookups find something.
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(12)] * 2
EXAMPLES = settings().max_examples
KINDS = {
    "model": ModelDrafter,
    "mtp": MtpDrafter,
    "lookup": LookupDrafter,
    "custom": ScriptedDrafter,
}
Faults = Callable[[nn.Module | None], AbstractContextManager[Happened]]


@cache
def target_of(kind: str) -> nn.Module:
    return mtp_target()[0] if kind == "mtp" else build("llama")


@cache
def mtp_target() -> tuple[nn.Module, MtpHead]:
    _, target, head = make("mimo")
    return target, MtpHead(head.layers, family(LAYOUTS["mimo"]).convention)


@cache
def small() -> nn.Module:
    return build("llama")  # the target's weights: it is nearly always right


@cache
def plain_text(kind: str, sampling: Sampling) -> list[int]:
    generator = SpeculativeGenerator(target_of(kind), byte_tokenizer())
    result = generator.generate(PROMPT, max_tokens=TOKENS, sampling=sampling)
    return result.tokens


@cache
def held_after(kind: str, sampling: Sampling) -> Any:
    twin = Lane(target_of(kind))
    twin.feed(PROMPT + plain_text(kind, sampling), step=1)
    return content(twin.caches)


def draft_of(kind: str, sampling: Sampling) -> Any:
    if kind == "model":
        return small()
    if kind == "mtp":
        return MtpDraft(*mtp_target())
    if kind == "lookup":
        return LookupDraft()
    return ScriptedDrafter(PROMPT + plain_text(kind, sampling), 0.8, ragged=True)


@st.composite
def raised_or_wrong(draw: st.DrawFn, kind: str) -> tuple[str, Faults]:
    """Draw a faulty call; return it with a context manager that makes the fault."""
    owner, nth = KINDS[kind], draw(st.integers(1, 7))
    if kind in ("model", "mtp") and draw(st.booleans()):
        return "propose", lambda model: nan_logits(model, nth)
    call = draw(st.sampled_from(CALLS))
    hows = RAISES if call != "propose" else (*RAISES, *WRONG)
    how = draw(st.sampled_from(hows))
    return call, lambda model: broken(owner, call, 1 if call == "begin" else nth, how)


def generated(
    generator: SpeculativeGenerator,
    fault: AbstractContextManager[Happened],
    **options: Any,
) -> tuple[Result, Happened, list[str]]:
    with warnings.catch_warnings(record=True) as caught, fault as happened:
        warnings.simplefilter("always")
        result = generator.generate(PROMPT, max_tokens=TOKENS, **options)
    assert all(w.category is DrafterFaultWarning for w in caught)
    assert all(w.filename.endswith("generator.py") for w in caught)
    return result, happened, [str(w.message) for w in caught]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), greedy=st.booleans(), length=st.integers(1, 5))
@settings(max_examples=max(6, EXAMPLES // 8))
def test_a_fault_leaves_text_and_caches_as_plain_decoding_has_them(
    kind: str, data: st.DataObject, greedy: bool, length: int
) -> None:
    call, fault = data.draw(raised_or_wrong(kind))
    sampling = GREEDY if greedy else SAMPLED
    expected = plain_text(kind, sampling)
    target, caches = target_of(kind), make_prompt_cache(target_of(kind))
    generator = SpeculativeGenerator(
        target, byte_tokenizer(), draft=draft_of(kind, sampling), draft_length=length
    )
    result, happened, warned = generated(
        generator, fault(small()), sampling=sampling, prompt_cache=caches
    )
    assert result.tokens == expected
    assert result.cached_tokens == PROMPT + expected
    if target is build_of_llama(kind):
        assert_same_content(held_after(kind, sampling), content(caches))
    faults = result.stats.drafter_faults
    assert len(faults) == len(warned) == happened.faults
    assert happened.later == 0  # it is not called again
    for recorded in faults:
        assert recorded.drafter == KINDS[kind].__name__
        assert recorded.call == call
        assert recorded.reason in warned[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_text_has_a_drafter_again(kind: str) -> None:
    generator = SpeculativeGenerator(
        target_of(kind), byte_tokenizer(), draft=draft_of(kind, GREEDY)
    )
    for fault in ("huge", "before"):
        result, happened, _ = generated(
            generator, broken(KINDS[kind], "propose", 1, fault)
        )
        assert len(result.stats.drafter_faults) == happened.faults == 1
    result = generator.generate(PROMPT, max_tokens=TOKENS)
    assert result.tokens == plain_text(kind, GREEDY)
    assert result.stats.drafter_faults == []
    assert result.stats.drafts > 0


@pytest.mark.parametrize("how", ["before", "after", "huge", "too many"])
def test_what_a_failed_drafter_did_is_undone(how: str) -> None:
    drafter = ScriptedDrafter([], 0.0)
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=drafter
    )
    generated(generator, broken(ScriptedDrafter, "propose", 2, how))
    assert drafter.calls[-1] == "discard"
    caches = make_prompt_cache(small())
    generator = SpeculativeGenerator(
        target_of("model"), byte_tokenizer(), draft=small()
    )
    fault = broken(ModelDrafter, "propose", 2, how)
    result, _, _ = generated(generator, fault, draft_cache=caches)
    read = result.cached_tokens[: caches[0].offset]
    twin = Lane(small())
    twin.feed(read, step=1)
    assert len(PROMPT) - 1 <= len(read) < len(PROMPT) + 12
    assert_same_content(content(twin.caches), content(caches))


def build_of_llama(kind: str) -> nn.Module | None:
    """Return the target if it is the llama: its rows are the same in any forward."""
    return None if kind == "mtp" else target_of(kind)


@pytest.mark.parametrize("failing", [0, 1])
@given(data=st.data(), nth=st.integers(1, 4))
@settings(max_examples=max(7, EXAMPLES // 10))
def test_of_a_cascade_only_the_member_that_fails_is_disabled(
    failing: int, data: st.DataObject, nth: int
) -> None:
    expected = plain_text("custom", SAMPLED)
    knowing = ScriptedDrafter(PROMPT + expected, 0.9, ragged=True, least=0)
    call = data.draw(st.sampled_from(["begin", "propose", "settle"]))
    hows = (*RAISES, *WRONG) if call == "propose" else RAISES
    owner = (ScriptedDrafter, ModelDrafter)[failing]
    fault = broken(
        owner, call, 1 if call == "begin" else nth, data.draw(st.sampled_from(hows))
    )
    generator = SpeculativeGenerator(
        target_of("custom"),
        byte_tokenizer(),
        draft=CascadeDraft(knowing, small()),
        draft_length=3,
    )
    result, happened, warned = generated(generator, fault, sampling=SAMPLED)
    assert result.tokens == expected
    assert len(result.stats.drafter_faults) == len(warned) == happened.faults
    assert happened.later == 0
    other = ("drafter", "model")[1 - failing]
    if call == "begin":
        assert [*result.stats.sources] == [other]
    assert result.stats.sources[other].accepted > 0


def test_both_members_may_fail_and_it_is_said_once() -> None:
    expected = plain_text("custom", SAMPLED)
    knowing = ScriptedDrafter(PROMPT + expected, 0.9)
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=CascadeDraft(knowing, small())
    )
    with broken(ScriptedDrafter, "propose", 3, "huge"):
        result, _, warned = generated(
            generator, broken(ModelDrafter, "propose", 2, "before"), sampling=SAMPLED
        )
    assert result.tokens == expected
    assert [f.drafter for f in result.stats.drafter_faults] == [
        "ScriptedDrafter",
        "ModelDrafter",
    ]
    assert len(warned) == 1
    assert "BrokenError" in result.stats.drafter_faults[1].details


@pytest.mark.parametrize(
    ("kind", "call", "error"),
    covering(
        KINDS,
        ["begin", "propose", "settle"],
        [KeyboardInterrupt(), MemoryError(), SystemExit()],
        pairs=[(0, 1)],
    ),
)
def test_interrupts_and_a_want_of_memory_go_up(
    kind: str, call: str, error: BaseException
) -> None:
    generator = SpeculativeGenerator(
        target_of(kind), byte_tokenizer(), draft=draft_of(kind, GREEDY)
    )
    stream = generator.stream(PROMPT, max_tokens=TOKENS)
    nth = 1 if call == "begin" or kind == "lookup" else 2
    with (
        broken(KINDS[kind], call, nth, "before", error),
        pytest.raises(type(error)),
    ):
        list(stream)
    assert stream.stats.drafter_faults == []
    ended = "error" if isinstance(error, Exception) else "closed"
    assert stream.result.finish_reason == ended
    expected = plain_text(kind, GREEDY)
    known = stream.cached_tokens
    assert known == (PROMPT + expected)[: len(known)]


class SwallowingDrafter(ScriptedDrafter):
    """Chooses with the request's options, and hides the errors of the choice."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        try:
            choose(mx.zeros((1, 256)), sequence.rows())
        except Exception:
            self.calls.append("swallowed")
        return super().propose(sequence, limit, choose)


@pytest.mark.parametrize("kind", ["model", "mtp", "swallowing"])
def test_errors_of_the_requests_own_processors_go_up(kind: str) -> None:
    """The processor raises in a draft only. The swallowing drafter hides the error."""
    calls = 0

    @pure
    def bad(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 1:  # in a draft: calls for the target come later
            raise BrokenError
        return logits

    draft = (
        SwallowingDrafter([], 0.0) if kind == "swallowing" else draft_of(kind, GREEDY)
    )
    generator = SpeculativeGenerator(target_of(kind), byte_tokenizer(), draft=draft)
    stream = generator.stream(
        PROMPT, max_tokens=TOKENS, sampling=Sampling(logits_processors=[bad])
    )
    with pytest.raises(BrokenError):
        list(stream)
    assert stream.stats.drafter_faults == []


class BadChoiceDrafter(ScriptedDrafter):
    """Passes something to `choose` that is not a row of logits."""

    def __init__(self, logits: Any, ids: Any = None) -> None:
        super().__init__([], 0.0)
        self._passed = (logits, ids)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        logits, ids = self._passed
        return Proposal.of([choose(logits, sequence.rows(), ids)])


@pytest.mark.parametrize(
    ("logits", "ids"),
    [
        (mx.zeros((256,)), None),
        (mx.zeros((2, 256)), None),
        ([0.0] * 256, None),
        (mx.zeros((1, 3)), mx.array([1, 2])),
        (mx.zeros((1, 3)), mx.array([1.0, 2.0, 3.0])),
    ],
)
def test_what_a_drafter_passes_to_choose_is_its_own_fault(
    logits: Any, ids: Any
) -> None:
    drafter = BadChoiceDrafter(logits, ids)
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=drafter
    )
    with pytest.warns(DrafterFaultWarning, match=r"choose\(\) got logits of"):
        result = generator.generate(PROMPT, max_tokens=TOKENS)
    assert result.tokens == plain_text("custom", GREEDY)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ahead", [1, mx.array([1.0]), mx.array([[1]])], ids=str)
def test_what_a_drafter_says_is_ahead_is_its_own_fault(
    ahead: Any, sampling: Sampling
) -> None:
    class Misplacing(ScriptedDrafter):
        def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
            return Proposal.of([choose(mx.zeros((1, 256)), sequence.rows(ahead))])

    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=Misplacing([], 0), draft_length=2
    )
    with pytest.warns(DrafterFaultWarning, match=r"sequence.rows\(\) got a"):
        result = generator.generate(PROMPT, max_tokens=TOKENS, sampling=sampling)
    assert result.tokens == plain_text("custom", sampling)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafters_nan_leaves_proper_probabilities(acceptance: Any) -> None:
    """Probabilities decide the acceptance, so a NaN in them would change the text."""
    verifier = Verifier(Chooser(SAMPLED, 256), acceptance)
    choices = CheckedChoose(verifier)
    chosen = choices(mx.full((1, 256), mx.nan), Rows([1, 2]))
    assert chosen.probs is not None
    assert mx.isfinite(chosen.probs).all()
    assert abs(chosen.probs.sum().item() - 1) < 1e-5
    choices.checked(Proposal.of([chosen]), 1)
    assert choices.faults() == (1, 0)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("nth", [1, 2, 5, 8])
def test_under_other_rules_the_text_goes_on_too(acceptance: Any, nth: int) -> None:
    generator = SpeculativeGenerator(
        target_of("model"), byte_tokenizer(), draft=small(), acceptance=acceptance
    )
    result, happened, _ = generated(
        generator, nan_logits(small(), nth), sampling=SAMPLED
    )
    assert len(result.stats.drafter_faults) == happened.faults == 1
    assert "NaN" in result.stats.drafter_faults[0].reason
    assert len(result.tokens) == TOKENS
    assert result.stats.reads == 0


def test_a_draft_of_another_width_is_still_refused_at_once() -> None:
    with pytest.raises(ValueError, match="100 token ids"):
        SpeculativeGenerator(
            target_of("model"), byte_tokenizer(), draft=build("llama", vocab=100)
        )


def test_what_a_failed_model_holds_is_not_kept_for_later_requests() -> None:
    prefixes = PrefixCache(max_bytes=1 << 26)
    generator = SpeculativeGenerator(
        target_of("model"), byte_tokenizer(), draft=small(), prefix_cache=prefixes
    )
    for call, kept in (("propose", False), ("discard", True)):
        result, _, _ = generated(
            generator, broken(ModelDrafter, call, 2, "after"), sampling=GREEDY
        )
        assert result.tokens == plain_text("model", GREEDY)
        assert prefixes.lookup(0, result.cached_tokens) is not None
        assert (prefixes.lookup(1, result.cached_tokens) is not None) == kept
        prefixes.clear()


def test_nobody_collects_states_for_a_head_that_was_disabled() -> None:
    target, head = mtp_target()
    generator = SpeculativeGenerator(
        target, byte_tokenizer(), draft=MtpDraft(target, head)
    )
    stream = generator.stream(PROMPT, max_tokens=TOKENS)
    with broken(MtpDrafter, "propose", 2, "before"), pytest.warns(DrafterFaultWarning):
        tokens = [chunk.token for chunk in stream]
    assert tokens == plain_text("mtp", GREEDY)
    assert stream.request.target.follower is None


def test_a_head_that_fails_while_the_prompt_is_fed_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target's lane calls the head after every chunk of the prompt."""
    target, head = mtp_target()

    def failing(self: MtpDrafter) -> None:
        raise BrokenError

    monkeypatch.setattr(MtpDrafter, "_catch_up", failing)
    generator = SpeculativeGenerator(
        target, byte_tokenizer(), draft=MtpDraft(target, head)
    )
    with pytest.warns(DrafterFaultWarning, match="begin"):
        result = generator.generate(PROMPT, max_tokens=TOKENS)
    assert result.tokens == plain_text("mtp", GREEDY)
    assert result.stats.drafts == 0


def test_an_empty_draft_is_an_answer_and_is_counted() -> None:
    drafter = ScriptedDrafter([], 1.0, ragged=True, least=0)
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=drafter, draft_length=1
    )
    result = generator.generate(PROMPT, max_tokens=TOKENS)
    stats = result.stats
    assert stats.drafter_faults == []
    assert 0 < stats.empty_drafts < stats.rounds
    assert drafter.calls.count("propose") == stats.empty_drafts + stats.drafts


def test_empty_drafts_of_a_cascade_count_while_a_member_is_asked() -> None:
    drafter = ScriptedDrafter([], 1.0, ragged=True, least=0)
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=CascadeDraft(drafter, small())
    )
    options: dict[str, Any] = {"draft_length": 1}
    result, _, _ = generated(
        generator, broken(ModelDrafter, "begin", 1, "before"), **options
    )
    assert result.stats.empty_drafts > 0
    with broken(ScriptedDrafter, "begin", 1, "before"):
        result, _, _ = generated(
            generator, broken(ModelDrafter, "begin", 1, "before"), **options
        )
    assert result.stats.empty_drafts == result.stats.drafts == 0


def test_a_disabled_drafter_leaves_pipelined_plain_steps() -> None:
    generator = SpeculativeGenerator(
        target_of("model"), byte_tokenizer(), draft=small(), draft_length=3
    )
    result, _, _ = generated(generator, broken(ModelDrafter, "begin", 1, "before"))
    stats = result.stats
    assert (stats.rounds, stats.drafts, stats.empty_drafts) == (TOKENS, 0, 0)


class UndecidedDrafter(ScriptedDrafter):
    """Chooses from unusable logits, and proposes nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        choose(mx.full((1, 256), mx.nan), sequence.rows())
        return Proposal(mx.array([], mx.uint32))


def test_what_one_of_a_cascade_has_chosen_from_is_no_fault_of_the_next() -> None:
    text = plain_text("custom", GREEDY)
    cascade = CascadeDraft(
        UndecidedDrafter([], 0.0), ScriptedDrafter(PROMPT + text, 1.0)
    )
    generator = SpeculativeGenerator(
        target_of("custom"), byte_tokenizer(), draft=cascade, draft_length=4
    )
    result = generator.generate(PROMPT, max_tokens=TOKENS)
    assert result.tokens == text
    assert not result.stats.drafter_faults
    assert result.stats.accepted > TOKENS // 2


def test_a_draft_is_submitted_once_and_with_its_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device then drafts while the host builds the target's graph."""
    submitted: list[int] = []
    submit: Any = mx.async_eval

    def noting(*arrays: mx.array) -> None:
        submitted.append(len(arrays))
        submit(*arrays)

    text = plain_text("custom", GREEDY)
    generator = SpeculativeGenerator(
        target_of("custom"),
        byte_tokenizer(),
        draft=ScriptedDrafter(PROMPT + text, 1.0),
        draft_length=4,
    )
    stream = generator.stream(PROMPT, max_tokens=TOKENS)
    next(stream)
    monkeypatch.setattr(mx, "async_eval", noting)
    stream.next_round()  # the rest of the first round
    submitted.clear()
    stream.next_round()
    # Two arrays: the draft, and the ids to check. The target's logits come later.
    assert submitted[0] == 2
    assert submitted.count(2) == 1
