"""Calls of a batch (insert, next, remove, close), and refused arguments."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    BatchGenerator,
    InvalidRequestError,
    Sampling,
    SpeculationError,
    SpeculativeGenerator,
    derived_seed,
)
from mlx_speculation.engine import BatchResponse
from support.drafters.scripted_draft_lengths import Planned
from support.identity import prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

SAMPLED = Sampling(temperature=0.8, seed=3)


def generator(**options: Any) -> SpeculativeGenerator:
    model = build("llama")
    made: dict[str, Any] = {"draft": model, "draft_length": 3}
    return SpeculativeGenerator(model, byte_tokenizer(), **(made | options))


def run(batch: BatchGenerator) -> list[BatchResponse]:
    responses = []
    while batch.waiting or batch.running:
        responses += batch.next()
    return responses


def test_rows_are_what_the_prompts_are_alone() -> None:
    made = generator()
    rows: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(n), {"max_tokens": 5 + n, "sampling": SAMPLED}) for n in (3, 9)
    ]
    with BatchGenerator(made) as batch:
        uids = [batch.insert(prompt, **options) for prompt, options in rows]
        responses = run(batch)
        results = [batch.remove(uid) for uid in uids]
    for uid, result, (prompt, options) in zip(uids, results, rows, strict=True):
        alone = made.generate(prompt, **options)
        row_responses = [response for response in responses if response.uid == uid]
        chunks = [
            response.chunk for response in row_responses if response.chunk is not None
        ]
        assert [chunk.token for chunk in chunks] == result.tokens == alone.tokens
        assert "".join(chunk.text for chunk in chunks) == result.text == alone.text
        assert [response.finish_reason for response in row_responses[:-1]] == [None] * (
            len(row_responses) - 1
        )
        assert row_responses[-1].finish_reason == result.finish_reason == "length"


def test_a_rows_own_lengths_are_noted_as_a_streams_are() -> None:
    noted_kinds = []
    for together in (False, True):
        planned = Planned([0, 0, 0, 2, 0, 2])
        options: Any = {"max_tokens": 20, "draft_length": planned, "stop_tokens": ()}
        if together:
            with BatchGenerator(generator()) as batch:
                batch.insert(prompt_of(6), **options)
                run(batch)
        else:
            generator().generate(prompt_of(6), **options)
        kinds = [(o.drafted, o.behind, o.ahead) for _, o in planned.noted]
        noted_kinds.append(kinds[:6])
    assert noted_kinds[0] == noted_kinds[1]
    assert [behind and ahead for _, behind, ahead in noted_kinds[0]].count(True) == 1


def test_rows_beyond_the_room_wait_in_their_order() -> None:
    with BatchGenerator(generator(), max_rows=2) as batch:
        uids = [batch.insert(prompt_of(4), max_tokens=3) for _ in range(5)]
        assert (batch.waiting, batch.running) == (tuple(uids), ())
        first = batch.next()
        assert {response.uid for response in first} == set(uids[:2])
        responses = first + run(batch)
    assert [r.uid for r in responses] == sorted(r.uid for r in responses)
    assert batch.stats.finished == 5
    assert batch.stats.emitted == 15


def test_a_row_is_removed_at_any_time() -> None:
    with BatchGenerator(generator(), max_rows=2) as batch:
        uids = [batch.insert(prompt_of(4 + n), max_tokens=40) for n in range(3)]
        emitted = [r for r in batch.next() if r.uid == uids[0]]
        result = batch.remove(uids[0])
        assert result.finish_reason == "closed"
        chunks = [r.chunk.token for r in emitted if r.chunk is not None]
        assert result.tokens == chunks != []
        waiting = batch.remove(uids[2])
        assert (waiting.finish_reason, waiting.tokens) == ("closed", [])
        rest = run(batch)
        assert {r.uid for r in rest} == {uids[1]}
        assert batch.result(uids[1]).finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="There is no row"):
            batch.result(uids[0])


def test_arguments_are_checked_at_once() -> None:
    with BatchGenerator(generator()) as batch:
        batch.insert([1, 2], max_tokens=2)
        for prompt, options in (
            ([], {}),
            ([999], {}),
            ([1], {"max_tokens": -1}),
            ([1], {"stop": [""]}),
            ([1], {"draft_length": -1}),
            ([1], {"logprobs": True}),
        ):
            with pytest.raises(InvalidRequestError):
                batch.insert(prompt, **options)
        assert len(batch.waiting) == 1
        assert len(run(batch)) == 2
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidRequestError, match="max_rows"):
            BatchGenerator(generator(), max_rows=wrong)  # type: ignore[arg-type]


def test_a_row_without_a_budget_ends_without_a_token() -> None:
    with BatchGenerator(generator()) as batch:
        uid = batch.insert([1, 2], max_tokens=0)
        assert run(batch) == [BatchResponse(uid, None, "length")]
        assert batch.result(uid).tokens == []


def test_a_row_that_fails_ends_alone() -> None:
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > 6:
            raise KeyError("of its own")
        return logits

    made = generator()
    with BatchGenerator(made) as batch:
        good = batch.insert(prompt_of(4), max_tokens=12)
        bad = batch.insert(
            prompt_of(5), max_tokens=12, sampling=Sampling(logits_processors=[fails])
        )
        responses = run(batch)
        last = [response for response in responses if response.uid == bad][-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, KeyError)
        assert batch.error(bad) is last.error
        assert batch.result(bad).finish_reason == "error"
        assert (
            batch.result(good).tokens
            == made.generate(prompt_of(4), max_tokens=12).tokens
        )
        assert batch.stats.failed == 1


def test_a_closed_batch_takes_no_rows_and_keeps_results() -> None:
    batch = BatchGenerator(generator())
    uids = [batch.insert(prompt_of(n + 2), max_tokens=9) for n in range(2)]
    batch.next()
    batch.close()
    batch.close()
    assert [batch.result(uid).finish_reason for uid in uids] == ["closed"] * 2
    assert (batch.waiting, batch.running, batch.next()) == ((), (), [])
    with pytest.raises(SpeculationError, match="was closed"):
        batch.insert([1])


def test_many_prompts_have_options_of_their_own() -> None:
    made = generator()
    prompts = [prompt_of(n) for n in (3, 8, 5)]
    results = made.generate_batch(
        prompts,
        each=[{"max_tokens": 4}, {}, {"max_tokens": 8}],
        max_tokens=6,
        sampling=SAMPLED,
        stop=("zzz",),
    )
    assert [len(result.tokens) for result in results] == [4, 6, 8]
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        seed = derived_seed(3, index)
        assert result.seed == seed
        alone = made.generate(
            prompt,
            max_tokens=4 + 2 * index,
            sampling=Sampling(temperature=0.8, seed=seed),
        )
        assert result.tokens == alone.tokens
    row_samplings = [Sampling(temperature=0.8, seed=seed) for seed in (7, 7, 9)]
    again = made.generate_batch(
        prompts[:1] * 3, each=[{"sampling": one} for one in row_samplings], max_tokens=5
    )
    assert again[0].tokens == again[1].tokens != again[2].tokens
    assert made.generate_batch([]) == []


def test_options_of_other_prompts_and_lone_prompts_are_refused() -> None:
    made = generator()
    with pytest.raises(InvalidRequestError, match="each= has 2 entries"):
        made.generate_batch([[1], [2], [3]], each=[{"max_tokens": 1}, {}])
    with pytest.raises(InvalidRequestError, match="prompts is a str"):
        made.generate_batch("a prompt")
