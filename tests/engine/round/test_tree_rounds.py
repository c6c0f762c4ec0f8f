"""Rounds with drafts that are random trees: the text is that of plain decoding."""

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.caches import KVQuantization, Speculation
from mlx_speculation.engine.drafters.base import Branches, Proposal
from mlx_speculation.engine.round import outcome, tree_round
from mlx_speculation.errors import (
    DrafterFaultWarning,
    InvalidRequestError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from mlx_speculation.models import LaneRound
from mlx_speculation.samplers import TokenAutomaton
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.drafters.tree_drafter import TreeDrafter
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models import census
from support.models.tiny_models import TINY_MODELS, build, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = prompt_of(40)  # more than two windows
TOKENS, LEVELS, NODES = 18, 5, 12
MODELS = ("llama", "gemma3_text", "llama(sliding)")
SHORT = Sampling(temperature=0.8, top_k=20, seed=4)


@cache
def plain(name: str, sampling: Sampling) -> list[int]:
    generator = SpeculativeGenerator(build(name), byte_tokenizer())
    result = generator.generate(PROMPT, max_tokens=TOKENS + LEVELS, sampling=sampling)
    return PROMPT + result.tokens


def with_trees(name: str, drafter: Any, **options: Any) -> SpeculativeGenerator:
    options = {"draft_length": LEVELS, "draft_tree": NODES, **options}
    return SpeculativeGenerator(build(name), byte_tokenizer(), draft=drafter, **options)


@pytest.mark.parametrize(
    ("name", "right", "sampling"),
    covering(MODELS, (1.0, 0.7, 0.0), (GREEDY, SAMPLED, SHORT)),
)
def test_trees_leave_the_text_as_it_is(
    name: str, right: float, sampling: Sampling
) -> None:
    text = plain(name, sampling)
    drafter = TreeDrafter(text, right, seed=len(name))
    result = with_trees(name, drafter).generate(
        PROMPT, max_tokens=TOKENS, sampling=sampling
    )
    assert PROMPT + result.tokens == text[: len(PROMPT) + TOKENS]
    assert not result.stats.drafter_faults
    # Right tokens are accepted, and no others.
    *settled, last = drafter.settled
    assert all(accepted == deepest for accepted, deepest in settled)
    assert last[0] <= last[1]
    assert drafter.proposed >= len(settled)
    assert not drafter.chains
    if right == 1.0:
        assert any(accepted > 1 for accepted, _ in settled)
    if not right:
        assert not result.stats.accepted


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), greedy=st.booleans(), native=st.booleans())
def test_after_any_trees_the_caches_hold_the_text(
    seed: int, greedy: bool, native: bool
) -> None:
    sampling = GREEDY if greedy else SAMPLED
    text = plain("gemma3_text", sampling)
    generator = trees_of("native" if native else "slack")
    drafter: Any = generator.draft
    drafter.inner = TreeDrafter(text, 0.8, seed)
    stream = generator.stream(PROMPT, max_tokens=TOKENS, sampling=sampling)
    written = [chunk.token for chunk in stream]
    assert PROMPT + written == text[: len(PROMPT) + TOKENS]
    lane = stream.request.target
    model: Any = generator.model
    row = model(mx.array([text[lane.seen :][:1]]), cache=lane.caches)[0, -1]
    alone = model(mx.array([text[: lane.seen + 1]]))[0, -1]
    assert mx.allclose(row, alone, atol=1e-3).item()


@cache
def trees_of(sliding: Any) -> SpeculativeGenerator:
    """Return one generator for all examples: making one runs its model on a tree."""
    drafter = TreeDrafter(plain("gemma3_text", GREEDY), 1.0)
    return with_trees("gemma3_text", drafter, sliding=sliding)


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 20, "sampling": SAMPLED, "logprobs": 3}
    options["explain"] = True
    drafter = TreeDrafter(plain("llama", SAMPLED), 0.8)
    stream = with_trees("llama", drafter).stream(PROMPT, **options)
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer())
    for chunk, wanted in zip(stream, generator.stream(PROMPT, **options), strict=True):
        assert chunk.token == wanted.token
        assert chunk.logprob is not None
        assert wanted.logprob is not None
        assert chunk.logprob.value == pytest.approx(wanted.logprob.value, abs=1e-3)
        assert [i for i, _ in chunk.logprob.top] == [i for i, _ in wanted.logprob.top]
    assert drafter.proposed


def test_what_a_tree_counts_is_its_levels() -> None:
    drafter = TreeDrafter(plain("llama", GREEDY), 1.0, seed=2)
    stats = with_trees("llama", drafter).generate(PROMPT, max_tokens=TOKENS).stats
    assert stats.drafted <= stats.drafts * LEVELS
    assert stats.accepted <= stats.drafted
    assert len(stats.accepted_per_position) == LEVELS
    assert stats.accepted + stats.rounds >= TOKENS


CHAINS: dict[str, dict[str, Any]] = {
    "penalties": {"sampling": Sampling(repetition_penalty=1.3)},
    "XTC": {"sampling": Sampling(temperature=1, xtc_probability=0.5, seed=1)},
    "a constraint": {
        "constraint": TokenAutomaton(
            {0: dict.fromkeys(range(0, 256, 3), 0)}, accepting=()
        )
    },
    "quantized caches": {"kv_quantization": KVQuantization(8, 32, start=24)},
}


@pytest.mark.parametrize("what", CHAINS)
def test_where_trees_cannot_be_judged_chains_are_drafted(what: str) -> None:
    options = {"max_tokens": 12, **CHAINS[what]}
    drafter = TreeDrafter(plain("llama", GREEDY), 1.0)
    args = TINY_MODELS["llama"].args | {"head_dim": 32}  # mlx cannot quantize fewer
    generator = SpeculativeGenerator(
        build_tiny(replace(TINY_MODELS["llama"], args=args)),
        byte_tokenizer(),
        draft=drafter,
        draft_length=LEVELS,
        draft_tree=NODES,
    )
    result = generator.generate(PROMPT, **options)
    expected = generator.generate(PROMPT, draft_length=0, **options)
    assert result.tokens == expected.tokens
    assert drafter.chains
    assert not drafter.proposed


def test_under_rejection_only_greedy_texts_have_trees() -> None:
    drafter = TreeDrafter(plain("llama", GREEDY), 1.0)
    generator = with_trees("llama", drafter, acceptance="rejection")
    generator.generate(PROMPT, max_tokens=8, sampling=SAMPLED)
    assert drafter.chains
    assert not drafter.proposed
    text = generator.generate(PROMPT, max_tokens=TOKENS).tokens
    assert PROMPT + text == plain("llama", GREEDY)[: len(PROMPT) + TOKENS]
    assert drafter.proposed


def test_passed_caches_have_trees_where_they_hold_them() -> None:
    text, model = plain("llama", GREEDY), build("llama")
    drafter = TreeDrafter(text, 1.0)
    generator = with_trees("llama", drafter)
    caches = make_prompt_cache(model)
    result = generator.generate(PROMPT, max_tokens=TOKENS, prompt_cache=caches)
    assert PROMPT + result.tokens == text[: len(PROMPT) + TOKENS]
    assert caches[0].offset == len(result.cached_tokens) == len(PROMPT) + TOKENS
    assert drafter.proposed
    trees, rings = drafter.proposed, [RotatingKVCache(16, keep=2) for _ in caches]
    generator.generate(PROMPT[:9], max_tokens=6, prompt_cache=rings)
    assert drafter.proposed == trees
    assert drafter.chains


def test_behind_a_step_in_flight_a_chain_is_drafted() -> None:
    """A step is in flight after an empty draft."""
    text = plain("llama", GREEDY)
    drafter: Any = TreeDrafter(text, 1.0)
    proposals = 0
    propose = drafter.propose

    def every_other(sequence: Any, limit: int, choose: Any) -> Any:
        nonlocal proposals
        proposals += 1
        if proposals % 3 == 1:
            return Proposal(mx.array([], mx.uint32))
        return propose(sequence, limit, choose)

    drafter.propose = every_other
    result = with_trees("llama", drafter).generate(PROMPT, max_tokens=TOKENS)
    assert PROMPT + result.tokens == text[: len(PROMPT) + TOKENS]
    assert result.stats.empty_drafts
    assert drafter.chains
    assert drafter.proposed


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LaneRound, "forward"),
        (tree_round, "tree_rows"),
        (tree_round, "verify_tree"),
        (tree_round, "keep_path"),
        (outcome, "outcomes"),
        (Speculation, "move"),
        (Speculation, "prepare"),
        (Speculation, "commit"),
    ],
)
def test_after_an_error_the_round_has_not_been(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SAMPLED
    text = plain("gemma3_text", sampling)
    generator = with_trees("gemma3_text", TreeDrafter(text, 1.0, seed=1))
    stream = generator.stream(PROMPT, max_tokens=TOKENS, sampling=sampling)
    stream.next_round()
    before = content(stream.request.target.caches)
    known = list(stream.request.sequence.tokens)
    original = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise RuntimeError(name)

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(RuntimeError, match=name):
        stream.next_round()
    assert_same_content(content(stream.request.target.caches), before)
    assert stream.request.sequence.tokens == known
    for _ in range(3):  # and the text goes on
        stream.next_round()
    known = stream.request.sequence.tokens
    assert known == text[: len(known)]


@pytest.mark.parametrize("branches", ["parents", "levels"])
def test_a_tree_that_is_none_disables_its_drafter(branches: str) -> None:
    text = plain("llama", GREEDY)
    drafter: Any = TreeDrafter(text, 1.0)
    wrong = {
        "parents": Branches(mx.array([-1]), 2),
        "levels": Branches(mx.array([-1, 0]), LEVELS + 1),
    }[branches]
    tokens = mx.array([1, 2], mx.uint32)
    drafter.propose = lambda *_: Proposal(tokens, branches=wrong)
    with pytest.warns(DrafterFaultWarning):
        result = with_trees("llama", drafter).generate(PROMPT, max_tokens=6)
    assert PROMPT + result.tokens == text[: len(PROMPT) + 6]
    (fault,) = result.stats.drafter_faults
    assert "as their parents" in fault.reason.replace("\n", " ")


def test_parents_that_come_later_are_taken_for_the_token_before() -> None:
    text = plain("llama", GREEDY)
    drafter: Any = TreeDrafter(text, 1.0)
    parents = mx.array([7, -9, 2, 99])

    def propose(sequence: Any, limit: int, choose: Any) -> Proposal:
        tokens = mx.array(text[len(sequence.tokens) :][:4], mx.uint32)
        return Proposal(tokens, branches=Branches(parents, min(4, limit)))

    drafter.propose = propose
    result = with_trees("llama", drafter).generate(PROMPT, max_tokens=TOKENS)
    assert PROMPT + result.tokens == text[: len(PROMPT) + TOKENS]
    assert not result.stats.drafter_faults


def test_a_batch_drafts_chains() -> None:
    text = plain("llama", GREEDY)
    generator = with_trees("llama", TreeDrafter(text, 1.0))
    (result,) = generator.generate_batch([PROMPT], max_tokens=TOKENS)
    assert PROMPT + result.tokens == text[: len(PROMPT) + TOKENS]


def test_what_cannot_have_trees_is_refused_when_the_generator_is_made() -> None:
    drafter = TreeDrafter(plain("llama", GREEDY), 1.0)
    for nodes in (1, 65, True, 8.0):
        with pytest.raises(InvalidRequestError, match="draft_tree is"):
            with_trees("llama", drafter, draft_tree=nodes)
    for draft in ("lookup", None, build("llama", seed=1)):
        with pytest.raises(InvalidRequestError, match="which drafts no trees"):
            with_trees("llama", draft)
    with pytest.raises(InvalidRequestError, match="with exact drafts are"):
        with_trees("llama", drafter, exact=True)
    with pytest.raises(UnsupportedCacheError, match="cannot hold a draft tree"):
        with_trees("qwen3_5", drafter)
    model = census.build("nanochat")  # its rotary embedding is no module
    with pytest.raises(UnsupportedModelError, match="a tree than for its paths"):
        SpeculativeGenerator(model, byte_tokenizer(), draft=drafter, draft_tree=8)
