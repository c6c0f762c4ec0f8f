"""Tokens that a constraint forces are drafted first, and accepted under every rule."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    CascadeDraft,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
    demo_models,
    load,
)
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.stats import SourceCounts
from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers import Constrained, TokenAutomaton
from mlx_speculation.samplers.constraints.base import AutomatonState
from mlx_speculation.samplers.constraints.llguidance import json_schema
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.exact_drafters import PAIRS, pushed_towards
from support.identity import prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.sampling.schemas import SCHEMAS, Schema

TOKENIZER = byte_tokenizer()
PROMPT = prompt_of(21)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=4)
EXAMPLES = settings().max_examples
# One drafter of each kind, with a hybrid target if possible.
QUICK_PAIRS = (
    *("mtp, hybrid", "eagle, hybrid", "lookup and model, hybrid"),
    *("dflash, hybrid", "assistant, sliding"),
)
# In a loop: one free choice, then five forced tokens.
LOOP = {0: {9: 1, 8: 1}, **{n: {10 + n: (n + 1) % 6} for n in range(1, 6)}}


@cache
def model(name: str, seed: int = 0) -> nn.Module:
    return build(name, seed=seed)


@dataclass(frozen=True, slots=True)
class Silent:
    """A drafter that never proposes anything."""

    def begin(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        return Proposal(mx.array([], mx.uint32))

    def settle(self, accepted: int) -> None:
        """Never called, because nothing was proposed."""
        raise AssertionError

    def discard(self) -> None:
        pass


@st.composite
def automata(draw: st.DrawFn) -> TokenAutomaton:
    """Draw an automaton whose states mostly allow one token."""
    count = draw(st.integers(1, 9))
    places = st.integers(0, count - 1)
    table: dict[int, dict[int, int]] = {}
    for place in range(count):
        wide = draw(st.sampled_from([1, 1, 1, 2, 3]))
        ids = draw(st.lists(st.integers(0, 200), min_size=wide, max_size=wide))
        table[place] = {token: draw(places) for token in ids}
    return TokenAutomaton(table, accepting=draw(st.sets(places, max_size=1)))


@cache
def generator_of(name: str, draft: Any, acceptance: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(
        model(name), TOKENIZER, draft=draft, acceptance=acceptance
    )


def generated(
    name: str, draft: Any, length: int | None, acceptance: Any = "keyed", **options: Any
) -> Any:
    # Making a generator probes its model. So generators are cached, but not those whose
    # drafts have a state.
    kept = draft is None or isinstance(draft, Silent)
    make = generator_of if kept else generator_of.__wrapped__
    generator = make(name, draft, acceptance)
    return generator.generate(PROMPT, draft_length=length, **options)


# After the tokens 5 and 6 only 7 is left. The examples below make 7 an end-of-text id,
# which only an accepting state allows, so no token is left.
DEAD_END = TokenAutomaton({0: {5: 1}, 1: {6: 2}, 2: {7: 2}}, accepting=())


@example("llama", DEAD_END, GREEDY, "model", 1, 3, (7, 40))
@example("qwen3_5", DEAD_END, SAMPLED, "script", 5, 40, (7, 40))
@given(
    name=st.sampled_from(["llama", "gemma3_text", "qwen3_5"]),
    constraint=st.one_of(
        automata(),
        SCHEMAS.map(lambda schema: json_schema(schema, TOKENIZER, compact=True)),
    ),
    sampling=st.sampled_from([GREEDY, SAMPLED]),
    kind=st.sampled_from(["model", "lookup", "script", "silent", "cascade"]),
    length=st.sampled_from([1, 2, 5, None]),
    budget=st.integers(1, 40),
    ends=st.sampled_from([(), (7, 40)]),
)
@settings(max_examples=EXAMPLES // 2)
def test_the_text_is_that_without_forced_tokens(
    name: str,
    constraint: Any,
    sampling: Sampling,
    kind: str,
    length: int | None,
    budget: int,
    ends: tuple[int, ...],
) -> None:
    options: dict[str, Any] = {
        "constraint": constraint,
        "sampling": sampling,
        "max_tokens": budget,
        "stop_tokens": ends,
    }
    expected, failure = None, None
    try:
        expected = generated(name, None, 0, **options)
    except ConstraintError as error:  # where only an end token is allowed
        failure = str(error)
    known = PROMPT + (expected.tokens if expected else [])
    drafts: dict[str, Any] = {
        "model": model("llama", 1),
        "lookup": LookupDraft(),
        "script": ScriptedDrafter(known, 0.7, ragged=True, least=0),
        "silent": Silent(),
        "cascade": CascadeDraft(LookupDraft(), model("llama", 1)),
    }
    if expected is None:
        with pytest.raises(ConstraintError) as raised:
            generated(name, drafts[kind], length, **options)
        assert str(raised.value) == failure
        return
    assert not expected.stats.sources
    result = generated(name, drafts[kind], length, **options)
    assert not result.stats.drafter_faults
    assert result.tokens == expected.tokens
    assert result.finish_reason == expected.finish_reason
    forced = result.stats.sources.get("forced", SourceCounts())
    assert forced.accepted == forced.drafted


@pytest.mark.parametrize(
    ("pair", "chosen"),
    covering(PAIRS, {"greedy": GREEDY, "sampled": SAMPLED}, quick=(0, QUICK_PAIRS)),
)
def test_every_drafter_goes_on_after_forced_tokens(pair: str, chosen: str) -> None:
    """Accepted drafts show that the drafter's caches and states are right."""
    target, draft = PAIRS[pair]()
    sampling = {"greedy": GREEDY, "sampled": SAMPLED}[chosen]
    free = {n: dict.fromkeys(range(n, 256, 7), (n + 1) % 7) for n in range(7)}
    table = free | {7 + n: {10 + n: (8 + n) % 11} for n in range(4)}
    table[3] = dict.fromkeys(range(3, 256, 7), 7)  # four forced tokens, then free ones
    table[10] = {20: 4}
    options: dict[str, Any] = {
        "constraint": TokenAutomaton(table, accepting=()),
        "sampling": sampling,
        "max_tokens": 60,
        "stop_tokens": (),
    }
    plain = SpeculativeGenerator(target, TOKENIZER, draft=None)
    expected = plain.generate(PROMPT, **options)
    generator = SpeculativeGenerator(target, TOKENIZER, draft=draft, draft_length=4)
    with pushed_towards(PROMPT + expected.tokens, 0.9, 0):
        result = generator.generate(PROMPT, **options)
    assert not result.stats.drafter_faults, result.stats.drafter_faults[0].details
    assert result.tokens == expected.tokens
    sources = result.stats.sources
    forced = sources.pop("forced")
    assert forced.accepted == forced.drafted > 0
    assert sum(each.accepted for each in sources.values()) > 8


@pytest.mark.parametrize("acceptance", ["keyed", "rejection", "block"])
@pytest.mark.parametrize("length", [2, 5])
def test_forced_tokens_are_accepted_under_every_rule(
    acceptance: Any, length: int
) -> None:
    """The round that drafts five forced tokens also makes the choice after them."""
    result = generated(
        "llama",
        Silent(),
        length,
        acceptance,
        constraint=TokenAutomaton(LOOP, accepting=()),
        sampling=Sampling(temperature=0.8, seed=2),
        max_tokens=36,
    )
    runs = np.array(result.tokens).reshape(6, 6)
    assert set(runs[:, 0]) <= {8, 9}
    assert (runs[:, 1:] == [11, 12, 13, 14, 15]).all()
    forced = result.stats.sources["forced"]
    assert forced.accepted == forced.drafted
    # Two plain steps, then mostly six tokens a round (length 5) or three (length 2).
    assert result.stats.rounds == (8 if length == 5 else 14)


def test_forced_tokens_stand_behind_a_step_in_flight() -> None:
    """Two free choices, then three forced tokens; the second choice is in flight."""
    table = {0: {8: 1, 9: 1}, 1: {8: 2, 9: 2}, 2: {12: 3}, 3: {13: 4}, 4: {14: 5}}
    result = generated(
        "llama",
        Silent(),
        5,
        constraint=TokenAutomaton(table, accepting={5}),
        sampling=SAMPLED,
    )
    assert result.tokens[2:] == [12, 13, 14]
    assert (result.stats.rounds, result.stats.drafted) == (3, 3)


@pytest.mark.openblas
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_choice_after_forced_tokens_is_the_models(acceptance: Any) -> None:
    """Chi-square of 3 ids, 2 degrees of freedom; the bound has probability 1e-4."""
    ids, count = [7, 41, 200], 120
    table: dict[int, Mapping[int, int]] = {
        0: {5: 1},
        1: {6: 2},
        2: dict.fromkeys(ids, 3),
        3: {9: 3},
    }
    logits = model("llama")(mx.array([[*PROMPT, 5, 6]]))[0, -1].astype(mx.float32)
    probs = np.array(mx.softmax(logits[mx.array(ids)] / 2.0), dtype=np.float64)
    observed = np.zeros(3)
    for seed in range(count):
        result = generated(
            "llama",
            Silent(),
            3,
            acceptance,
            constraint=TokenAutomaton(table, accepting=()),
            sampling=Sampling(temperature=2.0, seed=seed),
            max_tokens=3,
        )
        assert result.tokens[:2] == [5, 6]
        assert result.stats.rounds == 1
        observed[ids.index(result.tokens[2])] += 1
    assert ((observed - probs * count) ** 2 / (probs * count)).sum() < 18.4


@pytest.mark.parametrize("length", [0, None])
def test_streams_that_never_draft_have_no_forced_drafts(length: int | None) -> None:
    draft = None if length is None else Silent()
    result = generated(
        "llama",
        draft,
        length,
        constraint=TokenAutomaton(LOOP, accepting=()),
        max_tokens=12,
    )
    assert not result.stats.sources
    assert result.stats.rounds == 12


@pytest.mark.parametrize("method", ["allowed", "advance", "fork"])
def test_an_error_while_forced_tokens_are_looked_for_leaves_all_as_it_was(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = getattr(AutomatonState, method), -1

    def breaking(self: AutomatonState, *args: int) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError
        return original(self, *args)

    monkeypatch.setattr(AutomatonState, method, breaking)
    for call in range(1, 5):
        caches = make_prompt_cache(model("qwen3_5"))
        generator = SpeculativeGenerator(model("qwen3_5"), TOKENIZER, draft=Silent())
        stream = generator.stream(
            PROMPT,
            constraint=TokenAutomaton(LOOP, accepting=()),
            draft_length=5,
            prompt_cache=caches,
        )
        next(stream)
        before = content(caches), stream.cached_tokens, stream.stats.rounds
        left = call
        with pytest.raises(OSError):  # noqa: PT011, PT012
            while True:
                before = content(caches), stream.cached_tokens, stream.stats.rounds
                next(stream)
        assert stream.cached_tokens == before[1]
        assert stream.stats.rounds == before[2]
        assert_same_content(content(caches), before[0])


@cache
def demo_tokenizer() -> Any:
    return load(demo_models()["draft"])[1]


def walks(schema: Schema) -> Iterator[tuple[Any, Constrained, list[int]]]:
    """Choose random tokens; before each, yield the state, the text and the tokens."""
    tokenizer, draw = demo_tokenizer(), np.random.default_rng(0)
    constraint = json_schema(schema, tokenizer, compact=True)
    usable = np.ones(2048, np.bool_)
    text = Constrained(constraint, usable=usable, ends=())
    path: list[int] = []
    state: Any = constraint.begin()
    for _ in range(12):
        yield state, text, path
        (allowed,) = np.nonzero(state.allowed())
        if not len(allowed):
            return
        token = int(draw.choice(allowed))
        state = state.fork()
        state.advance(token)
        path = [*path, token]


@given(schema=SCHEMAS)
@settings(max_examples=EXAMPLES // 4)
def test_forced_tokens_are_all_that_the_library_knows_of(schema: Schema) -> None:
    """Most of the tokenizer's 2,048 ids stand for several letters."""
    for state, text, path in walks(schema):
        known = state._matcher.compute_ff_tokens()
        assert text.forced(path, 100)[: len(known)] == known
