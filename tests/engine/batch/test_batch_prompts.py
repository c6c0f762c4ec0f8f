"""Prompts of a batch are read in chunks, at most one chunk between two rounds."""

import gc
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    BatchGenerator,
    CascadeDraft,
    DrafterFaultWarning,
    LookupDraft,
    PrefixCache,
    Sampling,
)
from mlx_speculation.engine import DraftLengthPolicy
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from support.covering import covering
from support.drafters.batches import SAMPLINGS, Bench, Case, Watched, bench, finish
from support.drafters.scripted_draft_lengths import Planned
from support.identity import prompt_of

STEP = 18
LONG = 90
SERIAL = Sampling(logits_processors=[lambda tokens, logits: logits])
CASE = Case(6, SAMPLINGS[0], 30)
Fed = list[tuple[int, int]]


def started(made: Bench, batch: BatchGenerator, count: int = 2) -> dict[int, Case]:
    rows = {}
    for sampling in SAMPLINGS[:count]:
        case = Case(6, sampling, 30, draft_length=1)  # for 15 rounds at least
        rows[made.insert(batch, case)] = case
    batch.next()
    assert set(batch.running) == set(rows)
    return rows


def read_widths(fed: Fed) -> list[int]:
    """Return the widths of forwards that read a prompt: those wider than any round."""
    return [width for rows, width in fed if rows == 1 and width > 8]


@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
def test_one_chunk_at_most_is_read_between_two_rounds(kind: str) -> None:
    made = bench("llama")
    progress: list[int] = []
    with BatchGenerator(made.generator(kind)) as batch:
        rows = started(made, batch)
        case = Case(LONG, SAMPLINGS[0], 8, prefill_step=STEP)
        options: dict[str, Any] = {"max_tokens": 8, "stop_tokens": ()}
        options |= {"prefill_step_size": STEP, "prompt_progress": progress.append}
        long = batch.insert(prompt_of(LONG), **options)
        calls = 0
        while long in batch.waiting:
            running = batch.running
            before = sum(progress)
            with Watched(made.model) as fed:
                responses = batch.next()
            assert {one.uid for one in responses} >= set(running)
            assert sum(progress) - before <= STEP
            assert sum(read_widths(fed)) <= STEP
            calls += 1
        # If a plain step is in flight at the first call, that call reads no chunk.
        assert calls - -(-(LONG - 1) // STEP) in (0, 1)
        assert sum(progress) == LONG - 1
        assert set(progress[:-1]) == {STEP}
        finish(made, batch, rows | {long: case})


def test_a_draft_model_reads_one_chunk_at_most_too() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = started(made, batch)
        case = Case(LONG, SAMPLINGS[0], 30, prefill_step=STEP)
        long = made.insert(batch, case)
        stats = batch._rows[long].stream.stats
        chunks: list[int] = []
        while stats.drafted == 0:
            drafted = batch.stats.drafted
            with Watched(made.draft) as fed:
                batch.next()
            assert sum(read_widths(fed)) <= STEP
            assert batch.stats.drafted > drafted
            chunks += read_widths(fed)
        assert chunks[:-1] == [STEP] * 4
        assert stats.emitted > len(chunks)
        finish(made, batch, rows | {long: case})
        assert stats.accepted > 0


@pytest.mark.parametrize(
    ("alone", "draft"), covering([False, True], ["cascade", "reduced"])
)
def test_drafters_of_one_row_read_one_chunk_at_most(alone: bool, draft: str) -> None:
    made = bench("llama")
    options: dict[str, Any] = {"draft": made.draft, "draft_vocabulary": range(256)}
    if draft == "cascade":
        lookup = LookupDraft()
        options = {"draft": CascadeDraft(lookup, made.draft)}
    with BatchGenerator(made.generator("none", draft_length=4, **options)) as batch:
        rows = started(made, batch)
        case = Case(LONG, SAMPLINGS[0], 20, prefill_step=STEP)
        long = batch.insert(
            prompt_of(LONG),
            max_tokens=20,
            sampling=case.sampling,
            stop_tokens=(),
            prefill_step_size=case.prefill_step,
            explain=alone,
        )
        assert (batch.why_alone(long) is not None) == alone
        chunks = []
        while long in batch.waiting or long in batch.running:
            running = batch.running
            with Watched(made.draft) as fed, Watched(made.model) as target:
                responses = batch.next()
            assert {one.uid for one in responses} >= set(running)
            assert sum(read_widths(fed)) <= STEP
            assert sum(read_widths(target)) <= STEP
            chunks += read_widths(fed)
        assert chunks[:-1] == [STEP] * (len(chunks) - 1)
        assert sum(chunks) > LONG - 9
        assert batch.result(long).stats.accepted > 0
        finish(made, batch, rows | {long: case})


def test_a_plan_is_kept_while_the_draft_of_a_row_alone_reads() -> None:
    """Plain rounds run meanwhile. They follow no plan, so the policy notes none."""
    made, lengths = bench("llama"), Planned([4, 2])
    with BatchGenerator(made.generator("model")) as batch:
        uid = batch.insert(
            prompt_of(LONG),
            max_tokens=20,
            explain=True,
            stop_tokens=(),
            draft_length=lengths,
            prefill_step_size=STEP,
        )
        while batch.waiting or batch.running:
            batch.next()
        result = batch.result(uid)
        assert result.tokens == made.text(LONG, SAMPLINGS[0], STEP)[:20]
        assert result.stats.rounds == len(lengths.noted) + LONG // STEP
    assert [plan for plan, _ in lengths.noted] == lengths.planned[: len(lengths.noted)]
    assert lengths.noted[0][1].drafted == 4


def test_what_a_draft_has_missed_is_read_in_parts() -> None:
    """A row joins during many plain rounds. Then the other rows draft again."""

    class Late:
        longest = 4

        def plan(self, context: int, limit: int) -> Plan:
            length = 4 if context < 10 or context > 60 else 0
            return Plan(max(0, min(length, limit)), "fixed")

        def note(self, context: int, plan: Plan, outcome: Feedback) -> None:
            pass

    made, step = bench("llama"), 24
    options: dict[str, Any] = {"max_tokens": 90, "stop_tokens": ()}
    generator = made.generator("model")
    alone = generator.generate(prompt_of(6), draft_length=0, **options)
    lengths: DraftLengthPolicy = Late()
    with BatchGenerator(generator) as batch:
        options["prefill_step_size"] = step
        uids = [
            batch.insert(prompt_of(6), draft_length=lengths, **options)
            for _ in range(2)
        ]
        most: list[int] = []
        while batch.running or batch.waiting:
            if len(most) == 50:
                rows = {made.insert(batch, CASE): CASE}
            with Watched(made.draft) as fed:
                batch.next()
            most.append(max((w for _, w in fed), default=0))
        assert max(most) == step // 2  # of each of the two rows
        assert most.count(step // 2) >= 3
        assert most.count(2) > 2  # and then they draft
        for uid in uids:
            assert batch.result(uid).tokens == alone.tokens
            assert batch.result(uid).stats.accepted > 10
        finish(made, batch, rows)
        for uid in (*uids, *rows):
            assert batch.result(uid).stats.drafter_faults == []
            assert batch.result(uid).stats.acceptance_rate > 0.3


def test_short_prompts_share_a_chunk_and_rows_begin_in_their_order() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("none")) as batch:
        rows = started(made, batch)
        lengths = (5, 5, 5, 24, 7, 7)  # the last token of a prompt is not read here
        cases = [Case(n, SAMPLINGS[1], 30, prefill_step=13) for n in lengths]
        uids = [made.insert(batch, case) for case in cases]
        rows |= dict(zip(uids, cases, strict=True))
        began = []
        while batch.waiting:
            before = len(batch.waiting)
            batch.next()
            began.append(before - len(batch.waiting))
            assert batch.waiting == tuple(uids[len(uids) - len(batch.waiting) :])
        # Chunks: 4 + 4 + 4, then 13, 10 with no room for the next, then 6 + 6.
        assert [n for n in began if n] == [3, 1, 2]
        assert began[-4:] == [3, 0, 1, 2]
        finish(made, batch, rows)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("lookup")) as batch:
        cases = [Case(n, SAMPLINGS[1], 20, prefill_step=STEP) for n in (LONG, 40, 6)]
        rows = {made.insert(batch, case): case for case in cases}
        long, middle, short = rows
        began: dict[int, int] = {}
        for call in range(9):
            batch.next()
            for uid in batch.running:
                began.setdefault(uid, call)
        # Chunks: long, short, long, long, long, long (no other is much shorter), middle
        assert began == {short: 1, long: 5, middle: 8}
        assert batch.running == (long, middle, short)
        finish(made, batch, rows)


def test_a_long_prompt_is_read_in_every_second_chunk() -> None:
    made = bench("llama")
    short = Case(6, SAMPLINGS[0], 2, prefill_step=STEP)
    with BatchGenerator(made.generator("none")) as batch:
        long = made.insert(batch, Case(LONG, SAMPLINGS[0], 4, prefill_step=STEP))
        chunks, calls = -(-(LONG - 1) // STEP), 0
        while long in batch.waiting and calls < 2 * chunks:
            for _ in range(3):
                made.insert(batch, short)
            batch.next()
            calls += 1
        assert long in batch.running
        assert calls > chunks


def test_the_last_place_is_kept_for_the_oldest_prompt() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("none"), max_rows=2) as batch:
        rows = started(made, batch, count=1)
        cases = [Case(n, SAMPLINGS[1], 20, prefill_step=STEP) for n in (LONG, 6)]
        long, short = (made.insert(batch, case) for case in cases)
        for _ in range(20):
            if long in batch.waiting:
                assert short in batch.waiting
                batch.next()
        assert long not in batch.waiting
        finish(made, batch, rows | {long: cases[0], short: cases[1]})


def test_nothing_waits_where_nothing_runs() -> None:
    """Each call reads one chunk; the first row runs as soon as its prompt is read."""
    made = bench("llama")
    with BatchGenerator(made.generator("none")) as batch:
        cases = [Case(40, s, 9, prefill_step=STEP) for s in SAMPLINGS[:2]]
        rows = {made.insert(batch, case): case for case in cases}
        for _ in range(2):
            assert batch.next() == []
            assert batch.running == ()
            assert batch.memory > 0
        assert {one.uid for one in batch.next()} == {min(rows)}
        assert batch.stats.rounds == 1
        finish(made, batch, rows)


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_chunks_end_where_those_of_the_prompt_alone_do(name: str, keeps: bool) -> None:
    made = bench(name)
    options: dict[str, Any] = {"prefill_step_size": STEP}
    options |= {"max_tokens": 3, "stop_tokens": ()}
    prompts = [prompt_of(6), prompt_of(40), prompt_of(LONG)]

    def cache() -> PrefixCache | None:
        return PrefixCache(64 << 20, every=16) if keeps else None

    generator = made.generator("none", prefix_cache=cache())
    with Watched(made.model) as alone:
        for prompt in prompts:
            generator.generate(prompt, **options)
    with BatchGenerator(made.generator("none", prefix_cache=cache())) as batch:
        batch.insert(prompt_of(3), max_tokens=60, stop_tokens=(), draft_length=0)
        batch.next()
        with Watched(made.model) as fed:
            for prompt in prompts:
                batch.insert(prompt, **options)
            while batch.waiting:
                batch.next()
    widths = [[w for rows, w in each if rows == 1 and w > 1] for each in (alone, fed)]
    assert widths[0] == widths[1]
    assert sum(widths[0]) in range(127, 134)  # forwards of one token are left out


@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
def test_an_interrupted_chunk_is_taken_up_again(kind: str) -> None:
    made = bench("llama")
    for count in (1, 3, 4) if kind == "model" else (3,):
        with BatchGenerator(made.generator(kind)) as batch:
            rows = started(made, batch)
            case = Case(LONG, SAMPLINGS[1], 9, prefill_step=STEP)
            rows[made.insert(batch, case)] = case
            with (
                pytest.raises(KeyboardInterrupt),
                Watched(made.model, count, width=STEP),
            ):
                finish(made, batch, rows)
            assert len(batch.waiting) == 1
            made.text(LONG, SAMPLINGS[1], STEP)
            with Watched(made.model) as fed:
                finish(made, batch, rows)
            assert read_widths(fed) == [STEP] * (5 - count) + [LONG - 1 - 4 * STEP]


@pytest.mark.parametrize(
    ("error", "sampling"),
    covering([RuntimeError("mine"), MemoryError("mine")], [SAMPLINGS[1], SERIAL]),
)
def test_a_chunk_that_fails_ends_its_row(error: Exception, sampling: Any) -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = started(made, batch)
        case = Case(LONG, sampling, 9, prefill_step=STEP)
        bad = made.insert(batch, case)
        later = Case(23, SAMPLINGS[2], 9, prefill_step=STEP)
        rows[made.insert(batch, later)] = later
        with Watched(made.model, 3, error, STEP):
            finish(made, batch, rows)
        assert batch.error(bad) is error
        assert batch.result(bad).finish_reason == "error"
        assert batch.result(bad).tokens == []
        assert (batch.stats.failed, batch.stats.finished) == (1, 4)


def test_a_draft_that_fails_in_a_chunk_is_disabled() -> None:
    made = bench("llama")
    for ids in (None, range(256)):  # one draft for all rows, or one for each row
        generator = made.generator("model", draft_vocabulary=ids)
        with BatchGenerator(generator) as batch:
            rows = started(made, batch)
            case = Case(LONG, SAMPLINGS[1], 30, prefill_step=STEP)
            long = made.insert(batch, case)
            with (
                pytest.warns(DrafterFaultWarning, match="mine"),
                Watched(made.draft, 3, RuntimeError("mine"), STEP),
            ):
                finish(made, batch, rows | {long: case})
            (fault,) = batch.result(long).stats.drafter_faults
            assert fault.call == "begin"


def test_an_interrupted_chunk_of_a_draft_is_taken_up_again() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = started(made, batch)
        case = Case(LONG, SAMPLINGS[0], 30, prefill_step=STEP)
        long = made.insert(batch, case)
        with (
            pytest.raises(KeyboardInterrupt),
            Watched(made.draft, 3, width=STEP),
        ):
            finish(made, batch, rows)
        finish(made, batch, rows | {long: case})
        assert batch.result(long).stats.accepted > 0


def test_a_draft_that_is_kept_to_the_last_token_of_a_prompt_is_in_step() -> None:
    """The lane of the draft holds as many tokens as its drafter counts."""
    made = bench("llama")
    generator = made.generator("model", prefix_cache=PrefixCache(64 << 20))
    case = Case(23, SAMPLINGS[0], 30)
    alone = generator.generate(prompt_of(23), max_tokens=30, stop_tokens=())
    with BatchGenerator(generator) as batch:
        uid = made.insert(batch, case)
        finish(made, batch, {uid: case})
        stats = batch.result(uid).stats
    assert stats.reused == 22
    assert stats.acceptance_rate >= alone.stats.acceptance_rate - 0.2


@pytest.mark.parametrize(("name", "chunks"), covering(["llama", "qwen3_5"], [1, 4]))
def test_a_row_is_removed_while_it_is_read(name: str, chunks: int) -> None:
    """A later request with the same beginning reuses the part that was read."""
    made = bench(name)
    prefixes = PrefixCache(64 << 20, every=STEP)  # chunks end where states are kept
    generator = made.generator("model", prefix_cache=prefixes)
    with BatchGenerator(generator) as batch:
        rows = started(made, batch)
        while batch._groups[None].in_flight:
            batch.next()
        case = Case(LONG, SAMPLINGS[0], 9, prefill_step=STEP)
        long = made.insert(batch, case)
        for _ in range(chunks):
            batch.next()
        assert batch.waiting == (long,)
        result = batch.remove(long)
        assert (result.finish_reason, result.tokens) == ("closed", [])
        assert result.cached_tokens == prompt_of(LONG)[: chunks * STEP]
        again = made.insert(batch, case)
        finish(made, batch, rows | {again: case})
        assert batch.result(again).stats.reused == chunks * STEP


def test_a_batch_is_closed_while_prompts_are_read() -> None:
    made = bench("llama")
    generator = made.generator("model")
    with BatchGenerator(generator) as batch:
        finish(made, batch, started(made, batch))  # allocates what stays allocated
    gc.collect()
    mx.synchronize()
    memory_before = mx.get_active_memory()
    batch = BatchGenerator(generator)
    started(made, batch)
    case = Case(LONG, SAMPLINGS[0], 30, prefill_step=STEP)
    uids = [made.insert(batch, case) for _ in range(3)]
    for _ in range(8):  # the draft reads the first prompt, the target the second
        batch.next()
    assert batch.waiting == tuple(uids[1:])
    assert batch._rows[uids[0]].lanes[1].seen > 0
    batch.close()
    assert batch.memory == 0
    assert [batch.result(uid).finish_reason for uid in uids] == ["closed"] * 3
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() <= memory_before + 4096


def test_a_row_that_ends_before_its_draft_has_read_lets_go_of_it() -> None:
    made = bench("llama")
    with BatchGenerator(made.generator("model")) as batch:
        rows = started(made, batch)
        case = Case(LONG, SAMPLINGS[0], 3, prefill_step=STEP)
        short = made.insert(batch, case)
        while batch.error(short) is None and not batch._rows[short].ended:
            batch.next()
        target, draft = batch._rows[short].lanes
        assert 0 < draft.seen < LONG - 2
        assert target.caches == draft.caches == []
        finish(made, batch, rows | {short: case})
