"""A cascade asks its drafters in order, and settles only the one that it took."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import (
    CascadeDraft,
    InvalidRequestError,
    LookupDraft,
    ModelFolderError,
    SpeculativeGenerator,
)
from mlx_speculation.engine.draft_length.base import FixedDraftLength
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDrafter
from mlx_speculation.engine.drafters.draft_model import ModelDrafter
from mlx_speculation.engine.drafters.user_drafter import adapted
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.decoder import StreamDecoder
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Chooser, Verifier
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
TOKENS = 26


class SometimesDrafter(ScriptedDrafter):
    """Knows the text, and proposes in given rounds only."""

    def __init__(self, text: list[int], turns: list[bool]) -> None:
        super().__init__(text, right=1.0)
        self._turns = iter(turns)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        speaks = next(self._turns, False)
        return super().propose(sequence, limit if speaks else 0, choose)


def all_of(outcome: RoundOutcome) -> RoundOutcome:
    return outcome


def plain_text(model: nn.Module) -> list[int]:
    plain = SpeculativeGenerator(model, byte_tokenizer())
    return plain.generate(PROMPT, max_tokens=TOKENS, sampling=SAMPLED).tokens


def test_the_first_draft_is_taken_and_only_its_drafter_hears_of_it() -> None:
    text = list(range(9))
    first = SometimesDrafter(text, [True, False, False])
    second = SometimesDrafter(text, [True, False])
    cascade = CascadeDrafter(adapted(first), adapted(second))
    sequence = Sequence([0])
    cascade.begin(sequence)
    assert first.calls == second.calls == ["begin"]

    def propose() -> int:
        return cascade.propose(sequence, 4, _no_choice).length

    assert propose() == 4
    cascade.settle(3)
    cascade.discard()  # the rest of the round has failed
    assert first.calls[1:] == ["propose", "settle 3", "discard"]
    assert second.calls == ["begin"]
    assert propose() == 4
    cascade.settle(2)
    assert first.calls[4:] == ["propose", "discard"]
    assert second.calls[1:] == ["propose", "settle 2"]
    assert propose() == 0
    assert first.calls[-1] == second.calls[-1] == "discard"


@pytest.mark.parametrize(
    ("name", "fails"),
    covering(("llama", "gemma3_text", "qwen3_5", "lfm2"), (False, True)),
)
def test_the_models_caches_stay_right_between_turns(name: str, fails: bool) -> None:
    """The draft model reads nothing in rounds of another drafter, also if they fail."""
    model, small = build(name), build(name)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=small)  # adds hooks
    text = plain_text(model)
    turns = [True, False, True, True, False, True, False, False, True, True]
    sequence = Sequence(list(PROMPT))
    known = SometimesDrafter(PROMPT + text, turns * 2)
    drafter = ModelDrafter(lambda: Lane(small))
    decoder = StreamDecoder(
        Request(
            target=Lane(model),
            sequence=sequence,
            verifier=Verifier(Chooser(SAMPLED, 256)),
            drafter=CascadeDrafter(adapted(known), drafter),
            policy=FixedDraftLength(5),
        )
    )
    decoder.prefill.target()
    twin = Lane(small)
    for number, turn in enumerate(turns):
        before = drafter.lane.seen
        contents = content(drafter.lane.caches)
        if fails and turn and number:  # round 0 feeds the prompt to the draft model
            _fail(decoder)
            assert_same_content(contents, content(drafter.lane.caches))
            assert drafter.lane.seen == before
        else:
            left = TOKENS - len(sequence.tokens) + len(PROMPT)
            decoder.next_round([max(left, 1)], [all_of])
        twin.feed(sequence.tokens[twin.seen : drafter.lane.seen], step=1)
        assert twin.seen == drafter.lane.seen
        if name not in ("gemma3_text",):  # not equal bit for bit
            assert_same_content(content(twin.caches), content(drafter.lane.caches))
    assert sequence.tokens[len(PROMPT) :][:TOKENS] == text[: len(sequence.tokens) - 21]
    assert decoder.request.statistics.acceptance_rate == 1.0
    assert set(decoder.request.statistics.sources) == {"drafter", "model"}
    del generator


def _fail(decoder: StreamDecoder) -> None:
    original = LaneRound.forward

    def failing(self: LaneRound, tokens: mx.array) -> mx.array:
        raise KeyboardInterrupt

    LaneRound.forward = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            decoder.next_round([20], [all_of])
    finally:
        LaneRound.forward = original  # type: ignore[method-assign]


def test_streams_of_a_cascade_are_independent_unless_a_drafter_is_yours() -> None:
    model = build("llama")
    expected = plain_text(model)
    options: dict[str, Any] = {"max_tokens": TOKENS, "sampling": SAMPLED}
    cascade = CascadeDraft("lookup", build("llama", seed=1))
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=cascade)
    streams = [generator.stream(PROMPT, **options) for _ in range(2)]
    for token in expected:
        assert [next(stream).token for stream in streams] == [token, token]
    yours = CascadeDraft(LookupDraft(), ScriptedDrafter(PROMPT + expected, right=0.9))
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=yours)
    stream = generator.stream(PROMPT, **options)
    next(stream)
    with pytest.raises(InvalidRequestError, match="serves 1 stream at a time"):
        generator.stream(PROMPT, **options)
    assert [chunk.token for chunk in stream] == expected[1:]
    assert generator.generate(PROMPT, **options).tokens == expected


def test_what_is_no_cascade_is_refused() -> None:
    model = build("llama")
    with pytest.raises(InvalidRequestError, match=r"has 1 drafters.*at least 2"):
        CascadeDraft(LookupDraft())
    for member, words in (
        (None, "member of the cascade is None"),
        ("path/of/draft", "no folder 'path/of/draft'"),
        (3, "draft is a int"),
    ):
        with pytest.raises((InvalidRequestError, ModelFolderError), match=words):
            SpeculativeGenerator(
                model, byte_tokenizer(), draft=CascadeDraft(LookupDraft(), member)
            )
    with pytest.raises(InvalidRequestError, match=r"100 token ids.* 255"):
        SpeculativeGenerator(
            model,
            byte_tokenizer(),
            draft=CascadeDraft(LookupDraft(), build("llama", vocab=100)),
        )
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=LookupDraft())
    with pytest.raises(InvalidRequestError, match="with 0 models"):
        generator.stream(PROMPT, draft_cache=[])


def _no_choice(*_: Any, **__: Any) -> Any:
    raise AssertionError("scripted drafters choose nothing")
