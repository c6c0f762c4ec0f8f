"""Texts end with the last learned position. The tests put NaN behind the table."""

import warnings
from collections.abc import Sequence as SequenceOf
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import mlx_speculation
from mlx_speculation import (
    CascadeDraft,
    ContextLengthNotice,
    DraftNotice,
    InvalidRequestError,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.caches import FixedShape, position
from mlx_speculation.engine.batch.generator import BatchGenerator
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.drafters.foreign_model import (
    CommonTokens,
    ForeignModelDraft,
)
from mlx_speculation.engine.equivalence.exact_rows import check_exact
from mlx_speculation.engine.equivalence.rows import verify_both_ways
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser, TokenAutomaton, Verifier
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import plain_text, prompt_of
from support.models.position_tables import TABLES, highest, with_table
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
POSITIONS = 32
MANY = 1000
DRAFTS = ("none", "right", "shorter", "lookup", "scripted", "cascade")
SAMPLED = Sampling(temperature=0.8, seed=3)
pytestmark = pytest.mark.filterwarnings(
    "ignore::mlx_speculation.ContextLengthNotice",
    "ignore::mlx_speculation.DraftNotice",
)


@cache
def model_of(name: str, positions: int = POSITIONS) -> nn.Module:
    return with_table(name, positions)


def draft_of(kind: str, model: nn.Module, text: SequenceOf[int], shorter: int) -> Any:
    drafts: dict[str, Any] = {
        "none": lambda: None,
        "right": lambda: model,
        "shorter": lambda: model_of("gpt2", shorter),
        "lookup": lambda: "lookup",
        "scripted": lambda: ScriptedDrafter([*text], 0.7, seed=5, ragged=True),
        "cascade": lambda: CascadeDraft(LookupDraft(), model_of("gpt2", shorter)),
    }
    return drafts[kind]()


@settings(max_examples=max(12, settings().max_examples // 2))
@given(
    name=st.sampled_from(TABLES),
    positions=st.sampled_from([5, 9, 16, 24, 33]),
    missing=st.integers(0, 12),
    length=st.integers(1, 9),
    kind=st.sampled_from(DRAFTS),
    exact=st.booleans(),
    sampled=st.booleans(),
)
def test_a_text_is_that_of_mlx_lm_up_to_the_end_of_the_table(
    name: str,
    positions: int,
    missing: int,
    length: int,
    kind: str,
    exact: bool,
    sampled: bool,
) -> None:
    model, left = model_of(name, positions), min(missing, positions - 1)
    prompt = prompt_of(positions - left)
    expected = plain_text(model, prompt, left)
    sampling = SAMPLED if sampled else Sampling()
    if sampled:  # mlx-lm has no seeded noise
        plain = SpeculativeGenerator(model, TOKENIZER, exact=exact)
        expected = plain.generate(prompt, max_tokens=left, sampling=sampling).tokens
    highest(model)
    shorter = max(2, positions - 3)
    draft = draft_of(kind, model, prompt + expected, shorter)
    generator = SpeculativeGenerator(
        model,
        TOKENIZER,
        draft=draft,
        draft_length=length if draft is not None else None,
        exact=exact,
    )
    caches = make_prompt_cache(model)
    for max_tokens in (MANY, left, left // 2):
        result = generator.generate(prompt, max_tokens=max_tokens, sampling=sampling)
        assert result.tokens == expected[:max_tokens]
        assert result.finish_reason == "length"
        assert highest(model) < positions
    continued = generator.generate(
        prompt, max_tokens=MANY, prompt_cache=caches, sampling=sampling
    )
    assert continued.tokens == expected
    assert continued.cached_tokens == prompt + expected
    assert position(caches) == positions
    assert highest(model) < positions
    if kind in ("shorter", "cascade"):
        assert highest(model_of("gpt2", shorter)) < shorter


@pytest.mark.parametrize("name", TABLES)
def test_the_end_of_the_table_is_said_where_it_ends_a_text(name: str) -> None:
    generator = SpeculativeGenerator(model_of(name), TOKENIZER)
    assert generator.context_length == POSITIONS
    with pytest.warns(ContextLengthNotice, match="no more positions"):
        assert len(generator.generate(prompt_of(28), max_tokens=6).tokens) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(prompt_of(28), max_tokens=4)


@pytest.mark.parametrize("name", TABLES)
def test_a_longer_prompt_is_refused_and_the_caches_are_as_before(name: str) -> None:
    model = model_of(name)
    generator = SpeculativeGenerator(model, TOKENIZER, draft=model)
    highest(model)
    with pytest.raises(InvalidRequestError, match=r"33 tokens.* 32 positions"):
        generator.stream(prompt_of(33))
    caches = make_prompt_cache(model)
    first = generator.generate(prompt_of(20), max_tokens=5, prompt_cache=caches)
    known = first.cached_tokens
    more = prompt_of(33 - len(known))
    for named in (known, None):
        with pytest.raises(InvalidRequestError, match=r"33 tokens.* 32 positions"):
            generator.stream(more, prompt_cache=caches, cached_tokens=named)
        assert position(caches) == len(known)
    lane = Lane(model)
    with pytest.raises(InvalidRequestError, match=r"33 tokens after 0 .* 32"):
        lane.feed(prompt_of(33), step=8)
    assert (lane.seen, position(lane.caches)) == (0, 0)
    lane.feed(prompt_of(30))
    with lane.begin() as lane_round, pytest.raises(InvalidRequestError, match="3 to"):
        lane_round.forward(mx.array([1, 2, 3]))
    assert highest(model) < POSITIONS


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_a_shorter_table_pauses_at_its_own_end(sampling: Sampling) -> None:
    """The target takes any position; a draft with another tokenizer pauses too."""
    target, prompt = build("llama"), prompt_of(12)
    plain = SpeculativeGenerator(target, TOKENIZER)
    expected = plain.generate(prompt, max_tokens=40, sampling=sampling).tokens
    draft = with_table("gpt2", 24, seed=3)
    foreign = ForeignModelDraft(draft, CommonTokens(TOKENIZER, TOKENIZER))
    for source in (draft, foreign, CascadeDraft(draft, LookupDraft())):
        with pytest.warns(DraftNotice, match="only 24 positions"):
            generator = SpeculativeGenerator(
                target, TOKENIZER, draft=source, draft_length=5
            )
        assert "24 positions" in generator.notices[-1]
        result = generator.generate(prompt, max_tokens=40, sampling=sampling)
        assert result.tokens == expected
        assert result.stats.drafts > 0
        assert not result.stats.drafter_faults
        assert 20 <= highest(draft) < 24
        if source is draft:
            assert result.stats.empty_drafts > 0
        late = generator.generate(prompt_of(30), max_tokens=8, sampling=sampling)
        assert len(late.tokens) == 8
        assert not late.stats.drafter_faults
        assert highest(draft) < 24


def test_images_take_no_positions_of_a_draft() -> None:
    draft = model_of("gpt2", 24)
    choose = CheckedChoose(Verifier(Chooser(Sampling(seed=0), 256)))
    for tokens, images, most in (
        (prompt_of(20), (), 5),
        (prompt_of(24), (), 1),
        (prompt_of(25), (), 0),
        (prompt_of(48), ((2, 30),), 5),
        (prompt_of(53), ((2, 30),), 0),
    ):
        sequence = Sequence(tokens, images=images)
        drafter = ModelDraft(draft).open(Lane(model_of("gpt2")), sequence)
        assert drafter.read_ahead(sequence, lambda count: True)
        drafter.begin(sequence)
        assert drafter.propose(sequence, 9, choose).length == most
        drafter.discard()
    assert highest(draft) == 23


@pytest.mark.parametrize("shorter", [False, True])
def test_rows_of_a_batch_end_with_the_table_each_by_itself(shorter: bool) -> None:
    model = model_of("gpt2")
    draft = model_of("gpt2", 20) if shorter else model
    generator = SpeculativeGenerator(model, TOKENIZER, draft=draft, draft_length=6)
    prompts = [prompt_of(count) for count in (3, 12, 19, 27, 31, 32)]
    alone = [generator.generate(each, max_tokens=MANY).tokens for each in prompts]
    assert [len(each) for each in alone] == [32 - len(each) for each in prompts]
    highest(model), highest(draft)
    for sizes in (False, True):
        with BatchGenerator(generator, max_rows=4, row_sizes=sizes) as batch:
            uids = [batch.insert(each, max_tokens=MANY) for each in prompts]
            while batch.running or batch.waiting:
                batch.next()
            results = [batch.remove(uid) for uid in uids]
        assert [each.tokens for each in results] == alone
        assert {each.finish_reason for each in results} == {"length"}
        assert sum(each.stats.drafts for each in results) > 0
        assert not any(each.stats.drafter_faults for each in results)
        assert highest(model) < POSITIONS
        assert highest(draft) < (20 if shorter else POSITIONS)


def test_a_draft_of_a_row_by_itself_reads_no_prompt_past_its_table() -> None:
    target, draft = build("llama"), model_of("gpt2", 20)
    source = CascadeDraft(draft, LookupDraft())
    generator = SpeculativeGenerator(target, TOKENIZER, draft=source, draft_length=4)
    plain = SpeculativeGenerator(target, TOKENIZER)
    expected = plain.generate(prompt_of(40), max_tokens=6).tokens
    for explain in (False, True):
        (result,) = generator.generate_batch(
            [prompt_of(40)], max_tokens=6, explain=explain
        )
        assert result.tokens == expected
        assert not result.stats.drafter_faults


@pytest.mark.parametrize("name", TABLES)
def test_forced_tokens_end_with_the_table(name: str) -> None:
    model = model_of(name)
    loop = {place: {40 + place: (place + 1) % 5} for place in range(5)}
    generator = SpeculativeGenerator(model, TOKENIZER, draft="lookup", draft_length=8)
    highest(model)
    result = generator.generate(
        prompt_of(25), max_tokens=MANY, constraint=TokenAutomaton(loop, accepting=())
    )
    assert result.tokens == [40, 41, 42, 43, 44, 40, 41]
    assert result.finish_reason == "length"
    assert highest(model) < POSITIONS


def test_the_drop_in_says_what_mlx_lm_does_up_to_the_end() -> None:
    """A draft with a shorter table pauses at its end; its caches stay in the list."""
    model, draft, prompt = model_of("gpt2"), model_of("gpt2", 20), prompt_of(10)
    expected = plain_text(model, prompt, 22)
    highest(model), highest(draft)
    caches = make_prompt_cache(model) + make_prompt_cache(draft)
    options: dict[str, Any] = {"draft_model": draft, "prompt_cache": caches}
    stream_generate = partial(mlx_speculation.stream_generate, model, TOKENIZER)
    said = list(stream_generate(prompt, max_tokens=15, **options))
    assert [each.token for each in said] == expected[:15]
    assert (position(caches[:2]), position(caches[2:])) == (25, 20)
    rest = list(stream_generate(expected[15:16], max_tokens=-1, **options))
    assert [each.token for each in rest] == expected[16:]
    assert rest[-1].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match=r"33 tokens.* 32 positions"):
        stream_generate([7], **options)
    assert (position(caches[:2]), position(caches[2:])) == (32, 20)
    assert highest(draft) < 20
    text = mlx_speculation.generate(model, TOKENIZER, prompt_of(32), verbose=True)
    assert text == ""  # the prompt takes all positions


def test_a_calibration_that_would_go_past_the_table_is_refused() -> None:
    model = model_of("gpt2")
    generator = SpeculativeGenerator(model, TOKENIZER, draft=model)
    for measure in (
        generator.calibrate,
        lambda **k: generator.calibrate_batches([2], **k),
    ):
        with pytest.raises(InvalidRequestError, match=r"context of 64.* 32 positions"):
            measure(contexts=[64])


def test_comparisons_end_with_the_table() -> None:
    """Padding rows and the measured step of `check --exact` stay in the table too."""
    model = model_of("gpt2")
    verdict = check_exact(model, FixedShape(4, 16), 64)
    assert verdict.same
    assert 0 < verdict.context < POSITIONS
    assert highest(model) < POSITIONS
    with pytest.raises(InvalidRequestError, match=r"33 tokens.* 32 positions"):
        list(
            verify_both_ways(
                model, prompt_of(28), [1] * 5, draft_length=3, places=2, seed=0
            )
        )
    assert highest(model) < POSITIONS
