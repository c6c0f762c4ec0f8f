"""Decisions for many requests at once are those for each request alone, to the bit."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation import Sampling, pure
from mlx_speculation.samplers import (
    Acceptance,
    Ask,
    Chooser,
    Rows,
    Verifier,
    decide,
    propose_all,
)

VOCAB = 40
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "draft_temperature": 0.5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 5, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"logits_processors": [pure(lambda tokens, logits: logits.at[:, 3].add(2.0))]},
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Ask], int]:
    """Draw some requests, and a draft length that none of them exceeds."""
    rules: list[Acceptance] = ["keyed", "keyed", "keyed", "rejection", "block"]
    rows, width = [], draw(st.integers(0, 4))
    for _ in range(draw(st.integers(1, 6))):
        ours = {**draw(st.sampled_from(OPTIONS)), "seed": draw(st.integers(0, 3))}
        chooser = Chooser(Sampling(**ours), VOCAB)
        verifier = Verifier(chooser, draw(st.sampled_from(rules)))
        known = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        count = draw(st.integers(0, width))
        drafted = draw(
            st.lists(st.sampled_from([1, 2]), min_size=count, max_size=count)
        )
        tokens = mx.array(drafted, mx.uint32) if drafted else None
        probs = mx.full((count, VOCAB), 1 / VOCAB) if drafted else None
        allowed = None
        if draw(st.booleans()):
            masks = st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)
            allowed = mx.array([[True, *draw(masks)[1:]] for _ in range(count + 1)])
        keyed = verifier.shared is not None or verifier._rule is None
        rows.append(
            Ask(
                verifier,
                Rows(known, tokens, count + 1, allowed=allowed),
                tokens,
                None if keyed else probs,
                draw(st.sampled_from([None, None, 0, 3])),
            )
        )
    return rows, width


def logits_of(rows: int, width: int, key: int) -> mx.array:
    """Return logits in which tokens 0, 1 and 2 are likely."""
    noise = mx.random.normal((rows, width + 1, VOCAB), key=mx.random.key(key))
    return noise + 2 * (mx.arange(VOCAB) % VOCAB < 3)


@settings(max_examples=60)
@given(drawn=requests(), key=st.integers(0, 1000))
def test_requests_are_decided_as_each_alone(
    drawn: tuple[list[Ask], int], key: int
) -> None:
    requests, width = drawn
    logits = logits_of(len(requests), width, key)
    padded = np.ones((len(requests), width), np.uint32)  # likely tokens
    for row, one in enumerate(requests):
        if one.drafted is not None:
            padded[row, : len(one.drafted)] = np.array(one.drafted)
    decided_rows = decide(requests, logits, mx.array(padded) if width else None)
    assert not decided_rows.failed
    seen = []
    for decided in decided_rows.groups:
        wide = len(decided.verified.tokens) // len(decided.members)
        for place, index in enumerate(decided.members):
            one, start = requests[index], place * wide
            alone = one.verifier.verify(
                logits[index, : one.rows.count],
                one.rows,
                one.drafted,
                one.draft_probs,
                top=one.top,
            )
            accepted: Any = 0 if alone.accepted is None else alone.accepted.item()
            together = decided.verified
            if together.accepted is not None:
                assert together.accepted.reshape(-1)[place].item() == accepted
            else:
                assert accepted == 0
            stop = start + accepted + 1
            same = np.testing.assert_array_equal
            same(together.tokens[start:stop], alone.tokens[: accepted + 1])
            same(together.normalizers[start:stop], alone.normalizers[: accepted + 1])
            assert (together.log_probs is None) == (alone.log_probs is None)
            if together.log_probs is not None and alone.log_probs is not None:
                for name in ("tokens", "top_ids", "top"):
                    ours, theirs = (
                        getattr(report, name)
                        for report in (together.log_probs, alone.log_probs)
                    )
                    same(ours[start:stop], theirs[: accepted + 1])
            seen.append(index)
    assert sorted(seen) == list(range(len(requests)))
    if width == 0:
        first: Any = decided_rows.first_tokens().tolist()
        for index, one in enumerate(requests):
            alone = one.verifier.verify(logits[index], one.rows)
            assert first[index] == alone.tokens.item()


@settings(max_examples=40)
@given(drawn=requests(), key=st.integers(0, 1000))
def test_requests_draft_as_each_alone(drawn: tuple[list[Ask], int], key: int) -> None:
    requests = [
        Ask(one.verifier, Rows(one.rows.known, one.rows.ahead)) for one in drawn[0]
    ]
    logits = logits_of(len(requests), 0, key)[:, 0]
    places = [one.rows.positions[0] for one in requests]
    proposed = propose_all(requests, places, logits)
    for index, one in enumerate(requests):
        alone = one.verifier.propose(logits[index][None], one.rows)
        assert proposed.tokens[index].item() == alone.tokens.item()
        assert (index in proposed.probs) == (alone.probs is not None)


def test_a_processor_that_raises_is_the_fault_of_its_request() -> None:
    @pure
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise KeyError("mine")

    ours = [Sampling(seed=1), Sampling(logits_processors=[raises], seed=1), Sampling()]
    requests = [
        Ask(Verifier(Chooser(one.with_seed(), VOCAB)), Rows([row, 1]))
        for row, one in enumerate(ours)
    ]
    logits = logits_of(3, 0, 5)
    decided = decide(requests, logits)
    assert isinstance(decided.failed.pop(1), KeyError)
    decided.failed[1] = KeyError()
    expected = mx.argmax(logits[:, 0], axis=-1).tolist()
    assert decided.first_tokens().tolist() == [expected[0], 0, expected[2]]  # type: ignore[index]
    proposed = propose_all(requests, [2, 2, 2], logits[:, 0])
    assert [*proposed.failed] == [1]
    assert proposed.tokens.tolist() == [expected[0], 0, expected[2]]  # type: ignore[index]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_decided_together(rule: Acceptance) -> None:
    def shared(acceptance: Acceptance = "keyed", **options: Any) -> Any:
        return Verifier(Chooser(Sampling(seed=1, **options), VOCAB), acceptance).shared

    assert shared() == shared(top_p=0.5) == shared(rule) is not None
    assert shared(temperature=0.8) == shared(temperature=0.8) != shared()
    assert shared(temperature=0.8) != shared(temperature=0.8, top_k=3)
    assert shared(rule, temperature=0.8) is None
    assert shared(temperature=0.8, repetition_penalty=1.1) is None
    assert shared(logit_bias={1: 2.0}) is None
    assert shared(sampler=lambda rows: mx.argmax(rows, axis=-1)) is None
