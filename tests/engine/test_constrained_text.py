"""Constrained text has allowed tokens only, and is the same with and without drafts."""

import json
import re
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    ConstraintError,
    NonFiniteLogitsError,
    Sampling,
    SpeculativeGenerator,
    demo_models,
)
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import TokenIds
from mlx_speculation.samplers import TokenAutomaton, allowed_tokens
from mlx_speculation.samplers.constraints.base import AutomatonState
from mlx_speculation.samplers.constraints.llguidance import json_schema, lark, regex
from support.caches.contents import assert_same_content, content
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.sampling.schemas import SCHEMAS, Schema, fits

MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba2")
TOKENIZER = byte_tokenizer(("<end>",))
END = 256
PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
SAMPLED = Sampling(temperature=1.5, seed=4)
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {
            "type": "array",
            "items": {"enum": ["new", "old"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@cache
def model(name: str, seed: int = 0, vocab: int = 260) -> nn.Module:
    """Return a model with more columns of logits than the tokenizer has ids (257)."""
    return build(name, seed=seed, vocab=vocab)


def plain(name: str) -> SpeculativeGenerator:
    return SpeculativeGenerator(model(name), TOKENIZER, draft=None)


def drafted(name: str, draft: Any, acceptance: Any = "keyed") -> SpeculativeGenerator:
    return SpeculativeGenerator(
        model(name), TOKENIZER, draft=draft, draft_length=3, acceptance=acceptance
    )


def steps(count: int) -> TokenAutomaton:
    """Return the constraint for `count` tokens, each with id 1 or 2, and the end."""
    table = {i: {1: i + 1, 2: i + 1} for i in range(count)}
    return TokenAutomaton(table, accepting={count})


@given(
    name=st.sampled_from(MODELS),
    schema=SCHEMAS,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    seed=st.integers(0, 2**32),
    length=st.integers(0, 6),
    right=st.sampled_from([None, 0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.0, 0.9]),
)
@settings(max_examples=settings().max_examples // 4)
def test_the_draft_cannot_change_the_text_and_the_text_fits(
    name: str,
    schema: Schema,
    temperature: float,
    seed: int,
    length: int,
    right: float | None,
    top_p: float,
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    options: dict[str, Any] = {
        "constraint": json_schema(schema, TOKENIZER, compact=True),
        "sampling": sampling,
        "max_tokens": 60,
    }
    expected = plain(name).generate(PROMPT, **options)
    draft: Any = model("llama", seed=1)
    if right is not None:
        text = PROMPT + expected.tokens
        draft = ScriptedDrafter(text, right, seed=seed, ragged=True, least=0)
    result = drafted(name, draft).generate(PROMPT, draft_length=length, **options)
    assert result.tokens == expected.tokens
    assert result.finish_reason == expected.finish_reason
    assert result.text == expected.text
    if result.finish_reason == "stop":
        assert fits(schema, json.loads(result.text))


def test_a_demo_model_writes_json_that_fits() -> None:
    """The demo model's tokens are several characters long."""
    paths = demo_models()
    generator = SpeculativeGenerator.from_pretrained(
        paths["dense"], draft=paths["draft"], acceptance="block"
    )
    result = generator.generate(
        "import json\nperson = ",
        max_tokens=80,
        draft_length=3,
        constraint=json_schema(PERSON, generator.tokenizer, compact=True),
        sampling=Sampling(temperature=1.0, seed=3),
    )
    assert result.finish_reason == "stop"
    assert fits(PERSON, json.loads(result.text))
    assert generator.tokenizer.decode(result.tokens) == result.text
    assert result.stats.acceptance_rate > 0.3


def test_the_end_comes_exactly_where_the_text_may_end() -> None:
    """The end is by far the most probable token, and is masked until it is allowed."""
    target = model("llama")
    biased = Biased(target, END)
    generator = SpeculativeGenerator(biased, TOKENIZER, draft=biased, draft_length=3)
    for length in (0, 3):
        for least in (0, 1, 5):
            result = generator.generate(
                PROMPT,
                draft_length=length,
                constraint=regex(f"[a-z]{{{least},}}", TOKENIZER),
                stop_tokens=[END],
            )
            assert len(result.tokens) == least + 1
            assert result.tokens[-1] == END
            assert result.finish_reason == "stop"
            assert re.fullmatch(f"[a-z]{{{least}}}", result.text)


class Biased(nn.Module):
    """A model with one token that is always very probable."""

    def __init__(self, inner: nn.Module, token: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self.token = inner, token
        self.layers = inner.layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.inner(inputs, cache=cache)
        return logits.at[..., self.token].add(100.0)


@pytest.mark.parametrize("length", [0, 1, 3, 6])
@pytest.mark.parametrize("ends", [(), (END,)])
def test_a_complete_text_ends_with_its_last_token(length: int, ends: Any) -> None:
    generator = drafted("llama", model("llama", seed=1))
    for count in (1, 2, 5):
        result = generator.generate(
            PROMPT, draft_length=length, constraint=steps(count), stop_tokens=ends
        )
        assert result.finish_reason == "stop"
        assert len(result.tokens) == count
        assert set(result.tokens) <= {1, 2}
        short = generator.generate(
            PROMPT, draft_length=length, constraint=steps(count), max_tokens=count
        )
        assert (short.tokens, short.finish_reason) == (result.tokens, "stop")


def test_an_empty_text_ends_before_its_first_token() -> None:
    result = plain("llama").generate(PROMPT, constraint=regex("", TOKENIZER))
    assert (result.tokens, result.finish_reason) == ([], "stop")
    assert result.stats.rounds == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [0, 3])
def test_a_finished_text_is_what_the_cache_holds(name: str, length: int) -> None:
    generator = drafted(name, model("llama", seed=1))
    for constraint, budget in ((steps(6), 20), (allowed_tokens([5, 6, 7]), 6)):
        caches = make_prompt_cache(generator.model)
        result = generator.generate(
            PROMPT,
            draft_length=length,
            max_tokens=budget,
            constraint=constraint,
            sampling=SAMPLED,
            prompt_cache=caches,
        )
        assert len(result.tokens) == 6
        assert result.cached_tokens == PROMPT + result.tokens
        twin = make_prompt_cache(generator.model)
        generator.model(mx.array([result.cached_tokens]), cache=twin)
        assert [c.offset for c in caches if hasattr(c, "offset")] == [
            c.offset for c in twin if hasattr(c, "offset")
        ]
        if budget == 20:  # the text can only end
            assert result.next_token is None
        else:
            assert result.next_token in (5, 6, 7)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_after_a_stop_token_no_next_token_is_known(length: int) -> None:
    generator = drafted("llama", model("llama", seed=1))
    caches = make_prompt_cache(generator.model)
    result = generator.generate(
        PROMPT,
        draft_length=length,
        constraint=allowed_tokens([3, 9]),
        stop_tokens=[9, END],
        sampling=SAMPLED,
        prompt_cache=caches,
    )
    assert result.tokens[-1] in (9, END)
    assert set(result.tokens[:-1]) <= {3}
    assert result.next_token is None


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("right", [None, 1.0])
def test_a_text_that_is_stuck_fails_after_the_same_tokens(
    length: int, right: float | None
) -> None:
    """Id 258 has a column in the logits, but the tokenizer has no token for it."""
    table = {0: {1: 1}, 1: {2: 2}, 2: {3: 3}, 3: {258: 4}}
    constraint = TokenAutomaton(table, accepting={4})
    draft: Any = model("llama", seed=1)
    if right is not None:
        draft = ScriptedDrafter([*PROMPT, 1, 2, 3, 5, 6, 7], right)
    caches = make_prompt_cache(model("llama"))
    stream = drafted("llama", draft).stream(
        PROMPT, draft_length=length, constraint=constraint, prompt_cache=caches
    )
    yielded = [next(stream).token for _ in range(3)]
    with pytest.raises(ConstraintError, match=r"After 3 .* none of the 257 ids"):
        next(stream)
    assert yielded == [1, 2, 3]
    assert stream.result.finish_reason == "error"
    kept = stream.cached_tokens
    assert kept == (PROMPT + yielded)[: len(kept)]
    assert caches[0].offset == len(kept)


def test_an_id_without_a_column_cannot_be_what_the_constraint_asks_for() -> None:
    narrow = SpeculativeGenerator(model("llama", vocab=256), TOKENIZER, draft=None)
    options: dict[str, Any] = {"max_tokens": 3, "stop_tokens": []}
    both = narrow.generate(PROMPT, constraint=allowed_tokens([5, END]), **options)
    assert both.tokens == [5, 5, 5]
    alone = TokenAutomaton({0: {END: 0}}, accepting=())
    with pytest.raises(ConstraintError, match="none of the 256 ids"):
        narrow.generate(PROMPT, constraint=alone, **options)


@pytest.mark.parametrize(("limit", "gone"), [(9, [2, 3]), (6, [2, 3, 6]), (0, None)])
def test_ids_that_do_not_exist_are_not_usable(
    limit: int, gone: list[int] | None
) -> None:
    ids = TokenIds(width=7, missing=mx.array([2, 3]))
    usable = ids.usable(limit)
    assert usable.dtype == np.bool_
    assert usable.tolist() == [gone is not None and i not in gone for i in range(7)]
    assert TokenIds(width=3).usable(2).tolist() == [True, True, False]


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("method", ["allowed", "advance", "fork"])
def test_an_error_of_a_constraint_rolls_the_round_back(
    length: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(AutomatonState, method)
    left = 0

    def breaking(self: AutomatonState, *args: int) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise BrokenError
        return original(self, *args)

    monkeypatch.setattr(AutomatonState, method, breaking)
    generator = drafted("qwen3_5", model("llama", seed=1))
    for call in (1, 2, 5):
        caches = make_prompt_cache(generator.model)
        stream = generator.stream(
            PROMPT, draft_length=length, constraint=steps(30), prompt_cache=caches
        )
        next(stream)
        left = call
        before: Any = None
        with pytest.raises(BrokenError):  # noqa: PT012
            while True:
                before = content(caches), stream.cached_tokens, stream.stats.rounds
                next(stream)
        assert stream.cached_tokens == before[1]
        assert stream.stats.rounds == before[2]
        assert_same_content(content(caches), before[0])


def test_reads_are_counted() -> None:
    """The host waits for each drafted token, and at most once more in each round."""
    generator = drafted("llama", model("llama", seed=1))
    options: dict[str, Any] = {"constraint": steps(40), "sampling": SAMPLED}
    free = generator.generate(PROMPT, max_tokens=20).stats
    assert free.reads == 0
    stepwise = generator.generate(PROMPT, draft_length=0, **options).stats
    assert stepwise.reads == stepwise.rounds == 40
    result = generator.generate(PROMPT, draft_length=3, max_tokens=30, **options)
    assert result.stats.reads >= result.stats.drafted
    assert result.stats.reads <= result.stats.drafted + result.stats.rounds


def test_log_probabilities_are_those_among_what_is_allowed() -> None:
    generator = drafted("llama", model("llama", seed=1))
    options: dict[str, Any] = {"constraint": steps(9), "logprobs": 2}
    alone = generator.generate(PROMPT, draft_length=0, **options)
    result = generator.generate(PROMPT, draft_length=3, **options)
    assert result.tokens == alone.tokens
    for one, other in zip(result.logprobs or [], alone.logprobs or [], strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-5)
        assert {token for token, _ in one.top} == {1, 2}
        assert sum(np.exp(value) for _, value in one.top) == pytest.approx(1)
    assert len(result.logprobs or []) == 9


class FewIds:
    """A drafter whose logits are for the ids `ids`; None: for the lowest ids."""

    def __init__(self, columns: int, ids: list[int] | None) -> None:
        self._columns, self._ids = columns, ids
        self.drawn_probs: list[mx.array] = []

    def begin(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        ids = None if self._ids is None else mx.array(self._ids, dtype=mx.uint32)
        chosen: list[Any] = []
        for index in range(limit):
            ahead = mx.concatenate([c.tokens for c in chosen]) if chosen else None
            logits = mx.arange(self._columns)[None].astype(mx.float32) / 50 + index
            chosen.append(choose(logits, sequence.rows(ahead), ids))
        self.drawn_probs += [one.probs for one in chosen if one.probs is not None]
        return Proposal.of(chosen)

    def settle(self, accepted: int) -> None:
        pass

    def discard(self) -> None:
        pass


@pytest.mark.parametrize("acceptance", ["keyed", "rejection", "block"])
@pytest.mark.parametrize(
    ("columns", "ids"),
    [
        (300, None),
        (257, None),
        (40, None),
        (2, None),
        (3, [1, 60, 61]),
        (40, [*range(100, 140)]),
        (3, [60, 5000, 90_000_000]),
        (3, [1, 5000, 90_000_000]),
    ],
)
def test_drafters_of_any_vocabulary_draft_what_is_allowed_or_are_not_accepted(
    acceptance: Any, columns: int, ids: list[int] | None
) -> None:
    """Probabilities of a draft sum to 1, also if no id of the drafter is allowed."""
    allowed = [*range(30, 80)]
    options: dict[str, Any] = {
        "constraint": allowed_tokens(allowed),
        "max_tokens": 12,
        "sampling": SAMPLED,
    }
    drafter = FewIds(columns, ids)
    result = drafted("llama", drafter, acceptance).generate(PROMPT, **options)
    assert set(result.tokens) <= set(allowed)
    if acceptance == "keyed":
        assert result.tokens == plain("llama").generate(PROMPT, **options).tokens
    if not set(allowed) & set(ids or range(columns)):
        assert result.stats.accepted == 0
    assert bool(drafter.drawn_probs) == (acceptance != "keyed")
    for probs in drafter.drawn_probs:
        assert probs.sum().item() == pytest.approx(1, abs=1e-5)


def test_what_the_constraint_allows_may_be_what_the_model_gives_no_chance() -> None:
    generator = SpeculativeGenerator(Silent(model("llama"), 5), TOKENIZER, draft=None)
    with pytest.raises(NonFiniteLogitsError):
        generator.generate(PROMPT, constraint=allowed_tokens([5]))
    assert generator.generate(
        PROMPT, constraint=allowed_tokens([5, 6]), max_tokens=3, stop_tokens=[]
    ).tokens == [6, 6, 6]


class Silent(Biased):
    """A model with one token of probability 0."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.inner(inputs, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) == self.token, -mx.inf, logits)


def test_a_stop_string_cuts_the_text_and_a_constraint_serves_again() -> None:
    constraint = lark('start: ("ab")+', TOKENIZER)
    generator = drafted("llama", model("llama", seed=1))
    for _ in range(2):
        result = generator.generate(PROMPT, constraint=constraint, stop="abab")
        assert (result.text, result.finish_reason) == ("", "stop")
        result = generator.generate(PROMPT, constraint=constraint, max_tokens=7)
        assert "abababa".startswith(result.text)


class Counting:
    """A logits processor whose result depends on its number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        return logits.at[:, 97 + self.calls % 5].add(3.0)


@pytest.mark.parametrize("right", [None, 0.7, 1.0])
@pytest.mark.parametrize("length", [1, 4])
def test_a_processor_with_a_state_sees_the_emitted_tokens_of_a_constraint(
    right: float | None, length: int
) -> None:
    def generated(generator: SpeculativeGenerator, length: int) -> tuple[Any, ...]:
        processor = Counting()
        sampling = Sampling(temperature=1.0, seed=2, logits_processors=[processor])
        result = generator.generate(
            PROMPT,
            draft_length=length,
            sampling=sampling,
            constraint=regex("([0-9a-f]{2}-){5}", TOKENIZER),
        )
        return result.tokens, result.finish_reason, processor.calls

    expected = generated(plain("llama"), 0)
    assert expected[1:] == ("stop", 15)
    draft: Any = model("llama", seed=1)
    if right is not None:
        draft = ScriptedDrafter(PROMPT + expected[0], right)
    assert generated(drafted("llama", draft), length) == expected
