"""Failures in a batch: of one row, of the shared draft, of a whole round."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    BatchGenerator,
    DrafterFaultWarning,
    NonFiniteLogitsError,
    Sampling,
    SpeculativeGenerator,
    pure,
)
from mlx_speculation.engine import Proposal, Sequence
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength, Plan
from mlx_speculation.engine.shared_drafters.shared_model import SharedModel
from support.drafters.batches import (
    SAMPLINGS,
    Case,
    Watched,
    bench,
    finish,
    interrupt_commit,
    run,
)
from support.identity import prompt_of
from support.models.tiny_tokenizer import byte_tokenizer

CASES = [Case(p, s, 18) for p in (2, 17, 40) for s in SAMPLINGS[:2]]


@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
def test_a_row_whose_logits_are_unusable_ends_alone(kind: str) -> None:
    made = bench("llama")

    @pure
    def breaks(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * mx.nan if len(tokens) > 12 else logits

    with BatchGenerator(made.generator(kind)) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        bad = batch.insert(
            prompt_of(6),
            sampling=Sampling(logits_processors=[breaks]),
            stop_tokens=(),
        )
        responses = []
        while batch.waiting or batch.running:
            responses += [r for r in batch.next() if r.uid == bad]
        assert isinstance(responses[-1].error, NonFiniteLogitsError)
        assert responses[-1].finish_reason == "error"
        assert batch.error(bad) is responses[-1].error
        # A row emits nothing in the round in which it fails.
        assert len(batch.result(bad).tokens) == len(responses) - 1 in (5, 6, 7)
        finish(made, batch, rows)
        assert (batch.stats.failed, batch.stats.finished) == (1, 7)
        assert batch.memory == 0


def test_a_processor_that_raises_ends_its_row_alone() -> None:
    made = bench("llama")

    @pure
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > 9:
            raise KeyError("mine")
        return logits

    for kind in ("model", "lookup", "none"):
        with BatchGenerator(made.generator(kind)) as batch:
            rows = {made.insert(batch, case): case for case in CASES[:3]}
            options = Sampling(logits_processors=[raises])
            bad = batch.insert(prompt_of(6), sampling=options, stop_tokens=())
            finish(made, batch, rows)
            assert isinstance(batch.error(bad), KeyError)
            assert batch.result(bad).finish_reason == "error"


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("qwen3_5", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
def test_a_round_that_fails_for_all_is_run_again(name: str, kind: str) -> None:
    made = bench(name)
    for forward in range(1, 9, 2):  # forwards of three prompts, then of rounds
        with BatchGenerator(made.generator(kind)) as batch:
            rows = {made.insert(batch, case): case for case in CASES[::2]}
            with Watched(made.model, forward), pytest.raises(KeyboardInterrupt):
                run(batch)
            finish(made, batch, rows)


@pytest.mark.parametrize("forward", [1, 2, 5, 9])
def test_an_interrupt_while_drafting_leaves_the_draft_as_it_was(forward: int) -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        with Watched(made.draft, forward), pytest.raises(KeyboardInterrupt):
            run(batch)
        for _ in range(2):
            batch.next()
        assert_two_unread(batch)
        finish(made, batch, rows)
        assert batch.stats.acceptance_rate > 0.4


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_target_that_cannot_commit_leaves_the_draft_as_it_was(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        batch.next()
        interrupt_commit(batch, calls, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            run(batch)
        for _ in range(2):
            batch.next()
        assert_two_unread(batch)
        finish(made, batch, rows)


def assert_two_unread(batch: BatchGenerator) -> None:
    """Require that the draft's caches hold all known tokens but the last two."""
    drafter = batch._groups[None]._rounds.proposals.shared
    assert isinstance(drafter, SharedModel)
    offsets: Any = drafter.lane.caches[0].offset.tolist()
    known = [len(one.sequence.tokens) for one in drafter._requests]
    assert offsets == [count - 2 for count in known] != []


def test_a_draft_model_that_raises_is_disabled_for_all_rows() -> None:
    made = bench("llama")
    for forward in (1, 4, 9):
        with BatchGenerator(made.generator("model")) as batch:
            rows = {made.insert(batch, case): case for case in CASES}
            batch.next()
            broken = Watched(made.draft, forward, RuntimeError("broken"))
            with broken, pytest.warns(DrafterFaultWarning, match="broken"):
                run(batch)
            finish(made, batch, rows)
            # The draft's first forward after the first call of `next` reads prompts.
            for uid in rows:
                (fault,) = batch.result(uid).stats.drafter_faults
                assert fault.call == ("begin" if forward == 1 else "propose")
            assert batch.memory == 0


def test_a_draft_model_whose_logits_are_unusable_is_disabled_for_those_rows() -> None:
    made = bench("llama")
    strange = 200  # a token at which the draft's logits are NaN

    class Breaking(type(made.draft)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, **options: Any) -> mx.array:
            logits = super().__call__(inputs, **options)
            seen = (inputs == strange).any(axis=-1)[:, None, None]
            return mx.where(seen, mx.nan, logits)

    plain = type(made.draft)
    with BatchGenerator(made.generator("model")) as batch:
        rows = {made.insert(batch, case): case for case in CASES[1:3]}
        bad = batch.insert([*prompt_of(5), strange], max_tokens=9, stop_tokens=())
        Breaking.__module__ = plain.__module__
        made.draft.__class__ = Breaking
        try:
            with pytest.warns(DrafterFaultWarning, match="NaN"):
                finish(made, batch, rows)
        finally:
            made.draft.__class__ = plain
        faults = batch.result(bad).stats.drafter_faults
        assert len(faults) == 1
        assert len(batch.result(bad).tokens) == 9
        assert all(batch.result(uid).stats.drafted for uid in rows)


def test_a_drafter_of_ones_own_that_raises_is_disabled() -> None:
    made = bench("llama")

    class Raises:
        def begin(self, sequence: Sequence) -> None:
            pass

        def propose(self, sequence: Sequence, limit: int, choose: Any) -> Proposal:
            if len(sequence.tokens) > 8:
                raise OSError("gone")
            return Proposal(mx.array([1] * limit))

        def settle(self, accepted: int) -> None:
            pass

        def discard(self) -> None:
            pass

    generator = SpeculativeGenerator(
        made.model, byte_tokenizer(), draft=Raises(), draft_length=3
    )
    with BatchGenerator(generator) as batch:
        uid = made.insert(batch, CASES[0])
        with pytest.warns(DrafterFaultWarning, match="gone"):
            finish(made, batch, {uid: CASES[0]})
        assert len(batch.result(uid).stats.drafter_faults) == 1


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_other_rules_give_rows_what_they_do_alone(acceptance: Any) -> None:
    made = bench("llama")
    generator = made.generator("model", acceptance=acceptance)
    options: dict[str, Any] = {"max_tokens": 12, "stop_tokens": ()}
    sampling = [Sampling(temperature=0.8, seed=seed) for seed in (1, 2, 3)]
    prompts = [prompt_of(n) for n in (3, 20, 9)]
    each: list[Any] = [{"sampling": one} for one in sampling]
    results = generator.generate_batch(prompts, each=each, **options)
    for prompt, row_sampling, result in zip(prompts, sampling, results, strict=True):
        alone = generator.generate(prompt, sampling=row_sampling, **options)
        assert result.tokens == alone.tokens
        assert result.stats.accepted == alone.stats.accepted > 0


def test_reports_stops_and_origins_are_those_of_a_row_alone() -> None:
    made = bench("llama")
    generator = made.generator("model")
    text = made.text(17, SAMPLINGS[1])
    rows: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"logprobs": 0},
        {"stop_tokens": text[7:8]},
        {"stop": generator.tokenizer.decode(text[3:6])},
        {},
    ]
    options: dict[str, Any] = {"max_tokens": 16, "sampling": SAMPLINGS[1]}
    with BatchGenerator(generator) as batch:
        uids = [batch.insert(prompt_of(17), **options, **row) for row in rows]
        run(batch)
        for uid, row in zip(uids, rows, strict=True):
            result = batch.result(uid)
            alone = generator.generate(prompt_of(17), **options, **row)
            assert result.tokens == alone.tokens
            assert (result.text, result.finish_reason) == (
                alone.text,
                alone.finish_reason,
            )
            assert result.origins == alone.origins
            known = prompt_of(17) + result.tokens
            assert result.cached_tokens == known[: len(result.cached_tokens)]
            assert result.logprobs == alone.logprobs
            assert result.stats.accepted == alone.stats.accepted
            assert result.stats.rounds == alone.stats.rounds


def test_a_policy_that_fails_as_it_learns_costs_no_token() -> None:
    """The policy learns after the commit, so a further `next` returns the tokens."""
    made = bench("llama").generator("none")
    options: dict[str, Any] = {"max_tokens": 12, "stop_tokens": ()}
    wanted = made.generate(prompt_of(5), **options).tokens

    class Failing(FixedDraftLength):
        failed = 0

        def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
            self.failed += 1
            if self.failed in (3, 12):  # in the middle, and as the text ends
                raise RuntimeError("cannot learn")

    with BatchGenerator(made) as batch:
        uid = batch.insert(prompt_of(5), draft_length=Failing(0), **options)
        failures, tokens = 0, list[int]()
        while len(tokens) < len(wanted):
            try:
                responses = batch.next()
            except RuntimeError:
                failures += 1  # the next call returns the tokens of this round
                continue
            tokens += [each.chunk.token for each in responses if each.chunk]
        assert failures == 2
        assert batch.result(uid).tokens == wanted
        assert batch.result(uid).stats.emitted == len(wanted) == 12
    assert tokens == wanted
