"""In a batch, requests of every kind get the results and drafts that they get alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation import (
    BatchGenerator,
    CascadeDraft,
    LookupDraft,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    pure,
)
from mlx_speculation.caches import KVQuantization
from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.result import Result
from mlx_speculation.engine.shared_drafters.shared import SharedDrafter
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Constraint, TokenAutomaton
from mlx_speculation.samplers.constraints.llguidance import json_schema, regex
from support.covering import covering
from support.drafters.batch_heads import mtp_on
from support.drafters.block_oracle import load_block
from support.exact_drafters import assistant_on, peagle_on
from support.identity import prompt_of
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(("<end>",))
TOKENS = 14
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 22]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


class Counting:
    """A processor with a state: it shifts logits by its number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        return logits + 2.0 * (mx.arange(logits.shape[-1]) % 7 == self.calls % 7)


class Forkable(Counting):
    def copy_state(self) -> int:
        return self.calls

    def restore_state(self, state: int) -> None:
        self.calls = state


@pure
def shifted(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + 1.0 * (mx.arange(logits.shape[-1]) % 5 == tokens.shape[0] % 5)


@cache
def constraint(name: str) -> Constraint | None:
    if name == "schema":
        return json_schema(SCHEMA, TOKENIZER)
    if name == "regex":
        return regex(r"(ab|cd){1,9}[0-9]+", TOKENIZER)
    if name == "automaton":  # two of every three tokens are forced
        steps = {0: {7: 1}, 1: {9: 2}, 2: dict.fromkeys(range(40, 90), 0)}
        return TokenAutomaton(steps, accepting={0, 1, 2})
    return None


PROCESSORS: dict[str, Callable[[], Any]] = {
    "serial": Counting,
    "forkable": Forkable,
    "pure": lambda: shifted,
}


@dataclass(frozen=True)
class Asked:
    prompt: int
    joins: int  # number of the round
    leaves: int | None  # number of rounds after `joins`; None: it stays
    constraint: str | None = None
    processor: str | None = None
    temperature: float = 0.0
    logprobs: int | None = None
    draft_length: int | None = None
    tokens: int = TOKENS

    def options(self) -> dict[str, Any]:
        made = () if self.processor is None else (PROCESSORS[self.processor](),)
        sampling = Sampling(
            temperature=self.temperature, seed=self.prompt, logits_processors=made
        )
        return {
            "max_tokens": self.tokens,
            "sampling": sampling,
            "constraint": constraint(self.constraint or ""),
            "logprobs": self.logprobs,
            "draft_length": self.draft_length,
            "stop_tokens": (256,),
        }


ASKED = st.builds(
    Asked,
    prompt=st.sampled_from([2, 5, 17, 23]),
    joins=st.integers(0, 6),
    leaves=st.sampled_from([None, None, None, 2, 5]),
    constraint=st.sampled_from([None, "schema", "regex", "automaton"]),
    processor=st.sampled_from([None, None, "serial", "forkable", "pure"]),
    temperature=st.sampled_from([0.0, 0.8]),
    logprobs=st.sampled_from([None, 2]),
    draft_length=st.sampled_from([None, 0, 3]),
    tokens=st.integers(1, TOKENS),
)


def plain_of(generator: SpeculativeGenerator) -> SpeculativeGenerator:
    return SpeculativeGenerator(generator.model, TOKENIZER)


@cache
def made(name: str, kind: str) -> SpeculativeGenerator:
    target = build(name, vocab=260)
    draft: Any = None
    if kind in ("model", "cascade"):
        draft = build(name, vocab=260)
    if kind in ("lookup", "cascade"):
        lookup = LookupDraft()
        draft = lookup if draft is None else CascadeDraft(lookup, draft)
    prefixes = PrefixCache(64 << 20, every=8)
    return SpeculativeGenerator(
        target, TOKENIZER, draft=draft, draft_length=4, prefix_cache=prefixes
    )


def played(generator: SpeculativeGenerator, requests: list[Asked]) -> list[Result]:
    with BatchGenerator(generator, max_rows=len(requests)) as batch:
        uids: dict[int, int] = {}
        results: dict[int, Result] = {}
        for number in range(200):
            for place, one in enumerate(requests):
                if one.joins == number:
                    uids[place] = batch.insert(prompt_of(one.prompt), **one.options())
                    assert batch.why_alone(uids[place]) is None
                gone = one.leaves is not None and one.joins + one.leaves == number
                if gone and place in uids:
                    results[place] = batch.remove(uids.pop(place))
            if number > 6 and not (batch.waiting or batch.running):
                break
            batch.next()
        for place, uid in uids.items():
            assert batch.error(uid) is None
            results[place] = batch.remove(uid)
        assert batch.memory == 0
    return [results[place] for place in range(len(requests))]


def assert_as_alone(generator: SpeculativeGenerator, one: Asked, got: Result) -> None:
    """Compare a row with its request alone, decoded plainly and by this generator."""
    alone = plain_of(generator).generate(prompt_of(one.prompt), **one.options())
    again = generator.generate(prompt_of(one.prompt), **one.options())
    assert again.tokens == alone.tokens
    count = len(got.tokens)
    assert got.tokens == alone.tokens[:count]
    if got.finish_reason != "closed":
        assert (got.text, got.finish_reason) == (alone.text, alone.finish_reason)
    known = prompt_of(one.prompt) + got.tokens
    assert got.cached_tokens in (known, known[:-1])
    if one.logprobs is not None:
        for ours, theirs in zip(got.logprobs or [], alone.logprobs or [], strict=False):
            np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-3, atol=1e-3)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(["llama", "gemma3_text", "qwen3_5"], ["model", "lookup", "cascade"]),
)
def test_requests_of_all_kinds_write_what_they_do_alone(name: str, kind: str) -> None:
    generator = made(name, kind)

    @settings(max_examples=5, deadline=None)
    @given(requests=st.lists(ASKED, min_size=2, max_size=4))
    def plays(requests: list[Asked]) -> None:
        for one, got in zip(requests, played(generator, requests), strict=True):
            assert_as_alone(generator, one, got)

    plays()


@cache
def with_head(kind: str, *, lookup: bool) -> SpeculativeGenerator:
    """Return a generator with a random head, behind a `KnownDraft` if `lookup`."""
    target: Any
    draft: Any
    if kind == "chained":
        target, draft = mtp_on("step3p5")
    elif kind == "peagle":
        target, draft = peagle_on("llama", (0, 1))
    elif kind == "assistant":
        target, draft = assistant_on("shared")
    else:
        target = build("llama")
        draft = load_block(kind, target, (0, 1))
    made: Any = draft
    if lookup:
        plain = SpeculativeGenerator(target, byte_tokenizer())
        options: dict[str, Any] = {"max_tokens": 30, "stop_tokens": ()}
        texts = [
            prompt_of(n) + plain.generate(prompt_of(n), **options).tokens
            for n in PROMPTS
        ]
        made = CascadeDraft(KnownDraft(texts), draft)
    return SpeculativeGenerator(target, byte_tokenizer(), draft=made, draft_length=3)


class KnownDraft(Draft):
    """Drafts two right tokens and a wrong one, at every fourth token of known texts."""

    kind = "known"
    reusable = True

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def open(self, lane: Any, sequence: Any, draft_cache: Any = None) -> Any:
        return KnownDrafter(self.texts)


class KnownDrafter(OpenDrafter):
    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def propose(self, sequence: Any, limit: int, choose: Any) -> Proposal:
        known = sequence.tokens
        for text in self.texts:
            if text[: len(known)] == known and len(known) % 4 == 0:
                right = text[len(known) : len(known) + 2]
                wrong = [(text[len(known) + 2 : len(known) + 3] or [0])[0] ^ 1]
                return Proposal(mx.array([*right, *wrong][:limit], mx.uint32))
        return NOTHING


PROMPTS = (3, 9, 17, 30)
HEADS = [
    "full",
    "dflash2",
    "deepspec",
    "speculators, given",
    "peagle",
    "assistant",
    "chained",
]
QUICK_HEADS = ("full", "peagle", "assistant", "chained")  # a head of each kind
Drafts = dict[tuple[int, ...], list[int]]


def noted(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Record the drafts of heads from now on, by the tokens that they follow."""
    by_text = Drafts()

    def propose_alone(self: Any, sequence: Any, limit: int, choose: Any) -> Any:
        draft = alone(self, sequence, limit, choose)
        if limit == 3:
            tokens: Any = draft.tokens.tolist()
            by_text[tuple(sequence.tokens)] = tokens
        return draft

    alone = MtpDrafter.propose
    monkeypatch.setattr(MtpDrafter, "propose", propose_alone)
    plain = SharedDrafter.propose

    def propose(self: Any, requests: Any, limits: Any) -> Any:
        drafts, failed = plain(self, requests, limits)
        for request, limit, draft in zip(requests, limits, drafts, strict=True):
            if limit == 3 and draft.length:
                tokens: Any = draft.tokens.tolist()
                by_text[tuple(request.sequence.tokens)] = tokens
        return drafts, failed

    monkeypatch.setattr(SharedDrafter, "propose", propose)
    return by_text


@pytest.mark.parametrize(
    ("kind", "lookup"), covering(HEADS, (False, True), quick=(0, QUICK_HEADS))
)
def test_heads_draft_in_a_batch_what_they_do_alone(
    kind: str, lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = with_head(kind, lookup=lookup)
    options: dict[str, Any] = {"max_tokens": 24, "stop_tokens": ()}
    alone = noted(monkeypatch)
    texts = {n: generator.generate(prompt_of(n), **options).tokens for n in PROMPTS}
    monkeypatch.undo()
    batched = noted(monkeypatch)
    with BatchGenerator(generator) as batch:
        uids = {n: batch.insert(prompt_of(n), **options) for n in PROMPTS[:3]}
        for _ in range(4):
            batch.next()
        batch.remove(uids.pop(PROMPTS[0]))  # later rows move up
        uids[PROMPTS[3]] = batch.insert(prompt_of(PROMPTS[3]), **options)
        while batch.waiting or batch.running:
            batch.next()
        for n, uid in uids.items():
            assert batch.why_alone(uid) is None
            assert batch.remove(uid).tokens == texts[n]
    both = alone.keys() & batched.keys()
    assert len(both) > (15 if lookup else 40)
    assert {known: batched[known] for known in both} == {
        known: alone[known] for known in both
    }


def forwards_of(
    fresh: Callable[[], SpeculativeGenerator],
    prompts: list[int],
    options: dict[str, Any],
) -> tuple[int, int]:
    """Return the batch's forwards, and the most rounds that a request takes alone."""
    with BatchGenerator(fresh()) as batch:
        uids = [batch.insert(prompt_of(n), **options) for n in prompts]
        while batch.waiting or batch.running:
            batch.next()
        results = [batch.result(uid) for uid in uids]
        assert not batch.stats.alone
        forwards = batch.stats.forwards
    most = 0
    for n, result in zip(prompts, results, strict=True):
        alone = fresh().generate(prompt_of(n), **options)
        assert result.tokens == alone.tokens
        most = max(most, alone.stats.rounds)
    return forwards, most


def test_schemas_share_the_forwards_of_the_target() -> None:
    options = {"max_tokens": 24, "constraint": constraint("schema")}

    def fresh() -> SpeculativeGenerator:  # lookups remember what has been written
        target = made("llama", "lookup").model
        return SpeculativeGenerator(target, TOKENIZER, draft="lookup", draft_length=4)

    together, alone = forwards_of(fresh, [9, 17, 23, 30, 5, 9, 12, 14], options)
    assert together <= 1.1 * alone


def test_requests_with_a_dspark_drafter_share_the_forwards_of_the_target() -> None:
    generator = with_head("deepspec", lookup=False)
    options = {"max_tokens": 16, "stop_tokens": ()}
    together, alone = forwards_of(lambda: generator, [*range(9, 17)], options)
    assert together <= 1.1 * alone


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("kind", "names"),
    covering(
        ["lookup", "model", "cascade"],
        [("schema",), ("schema", "automaton", None, None)],
    ),
)
def test_forced_tokens_are_no_drafts_of_a_source(
    kind: str, names: tuple[str | None, ...]
) -> None:
    """Tokens are forced also in rounds for which the policy plans no draft."""
    fixed = made("llama", kind)
    generator = SpeculativeGenerator(fixed.model, TOKENIZER, draft=fixed.draft)
    each: list[StreamKeywords] = [
        {"constraint": constraint(name or "")} for name in names
    ]
    prompts = [prompt_of(n) for n in (9, 17, 23, 30)[: len(names)]]
    for _ in range(2):
        results = generator.generate_batch(prompts, each=each, max_tokens=40)
        for prompt, options, result in zip(prompts, each, results, strict=True):
            alone = generator.generate(
                prompt,
                constraint=options["constraint"],
                max_tokens=40,
                draft_length=0,
            )
            assert result.tokens == alone.tokens
    assert any(result.stats.sources["forced"].drafted for result in results)


@cache
def quantizable() -> tuple[Any, Any]:
    """Return a target and an equal draft model; their caches can be quantized."""
    tiny = TINY_MODELS["llama"]
    wide = replace(tiny, args={**tiny.args, "head_dim": 32})
    return build_tiny(wide), build_tiny(wide)


QUANTIZED = st.tuples(
    st.sampled_from([1, 2, 5, 17, 23]),  # the prompt
    st.integers(0, 5),  # when it joins
    st.sampled_from([None, None, 3]),  # when it leaves
    st.sampled_from([None, KVQuantization(8, 32), KVQuantization(4, 32, start=1)]),
    st.sampled_from([0.0, 0.8]),
)


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_quantized_requests_write_what_they_do_alone(kind: str) -> None:
    target, draft = quantizable()

    def generator() -> SpeculativeGenerator:
        source: Any = draft if kind == "model" else "lookup"
        return SpeculativeGenerator(
            target, byte_tokenizer(), draft=source, draft_length=3
        )

    @settings(max_examples=5, deadline=None)
    @given(requests=st.lists(QUANTIZED, min_size=2, max_size=5))
    def plays(requests: list[Any]) -> None:
        made, uids, got = generator(), {}, {}
        with BatchGenerator(made) as batch:
            for number in range(60):
                for place, (prompt, joins, leaves, how, temperature) in enumerate(
                    requests
                ):
                    options: dict[str, Any] = {
                        "max_tokens": 12,
                        "stop_tokens": (),
                        "kv_quantization": how,
                        "sampling": Sampling(temperature=temperature, seed=place),
                    }
                    if joins == number:
                        uids[place] = batch.insert(prompt_of(prompt), **options)
                        alone = batch.why_alone(uids[place])
                        assert (alone is None) == (how is None or prompt > 1)
                    if leaves is not None and joins + leaves == number:
                        got[place] = batch.remove(uids.pop(place)), options
                batch.next()
            assert not batch.running
            for place, uid in uids.items():
                assert batch.error(uid) is None
                how = {"kv_quantization": requests[place][3]}
                sampling = Sampling(temperature=requests[place][4], seed=place)
                options = {"max_tokens": 12, "stop_tokens": (), "sampling": sampling}
                got[place] = batch.remove(uid), options | how
            assert batch.memory == 0
        for place, (result, options) in got.items():
            by_itself = generator().generate(prompt_of(requests[place][0]), **options)
            assert result.tokens == by_itself.tokens[: len(result.tokens)]

    plays()


def test_quantized_requests_share_forwards() -> None:
    target, _ = quantizable()
    made = SpeculativeGenerator(target, byte_tokenizer())
    options: dict[str, Any] = {"max_tokens": 20, "stop_tokens": ()}
    with BatchGenerator(made) as batch:
        for n in range(8):
            batch.insert(
                prompt_of(9 + n), kv_quantization=KVQuantization(8, 32), **options
            )
        later = KVQuantization(8, 32, start=20)
        uid = batch.insert(prompt_of(9), kv_quantization=later, **options)
        assert "begins after the prompt" in str(batch.why_alone(uid))
        uid = batch.insert(
            prompt_of(1), kv_quantization=KVQuantization(8, 32), **options
        )
        assert "begins after the prompt" in str(batch.why_alone(uid))
        while batch.waiting or batch.running:
            batch.next()
        assert batch.stats.forwards <= 22


def test_a_shared_draft_model_reads_what_others_have_drafted() -> None:
    """Forced tokens and lookups make the draft model lag differently in each row."""
    target = build("llama", vocab=260)
    for draft in (target, CascadeDraft(target, LookupDraft())):
        made = SpeculativeGenerator(target, TOKENIZER, draft=draft, draft_length=3)
        with BatchGenerator(made) as batch:
            for n, name in ((5, "automaton"), (9, None), (17, "schema"), (6, None)):
                row_constraint = constraint(name or "")
                batch.insert(prompt_of(n), max_tokens=14, constraint=row_constraint)
            compared = 0
            while batch.waiting or batch.running:
                batch.next()
                shared: Any = batch._groups[None]._rounds.proposals.shared
                for place, request in enumerate(shared._requests):
                    own_lane = shared._lanes[request]
                    twin = Lane(target)
                    twin.feed(request.sequence.tokens[: own_lane.seen])
                    (draft_cache, *_), (expected, *_) = (
                        shared.lane.extract(place),
                        twin.caches,
                    )
                    assert draft_cache.offset == expected.offset
                    keys = expected.keys[..., : draft_cache.offset, :]
                    assert mx.allclose(draft_cache.keys, keys, atol=1e-4).item()
                    compared += 1
            assert compared > 12
