"""A head drafts for all rows of a batch what it drafts for each row alone."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    BatchGenerator,
    DrafterFaultWarning,
    LookupDraft,
    PrefixCache,
    Sampling,
)
from mlx_speculation.engine import CascadeDraft, EagleDraft
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.shared_drafters import shared_head
from mlx_speculation.engine.shared_drafters.shared_head import SharedHead
from mlx_speculation.models.checkpoints import HeadOutput
from mlx_speculation.models.mtp import HeadRound
from support.drafters import batches
from support.drafters.batch_heads import (
    HeadBench,
    KnowingMtp,
    compare,
    drafts_alone,
    drafts_of,
    eagle_on,
    generator_of,
    head_bench,
    knowing,
    mtp_on,
    options_of,
)
from support.drafters.batches import (
    SAMPLINGS,
    Case,
    Watched,
    interrupt_commit,
    run,
)
from support.drafters.scripted_draft_lengths import Planned
from support.identity import prompt_of

CASES = [Case(p, s, 18) for p in (2, 17, 40) for s in SAMPLINGS[:2]]
# In order: a hybrid target, and heads with a window, with two caches, with drafts of
# one token, and with a chain of layers.
COMMON = ("qwen3_5", "mimo_v2_flash", "deepseek_v32", "mimo", "step3p5")
OTHERS = (
    *("qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm_moe_dsa", "glm4_moe"),
    *("glm4_moe_lite", "ernie4_5_moe", "longcat_flash", "nemotron_h", "exaone_moe"),
    *("bailing_moe", "bailing_hybrid", "bailing_moe_v3"),
)
KINDS = ("mtp", "eagle", "sliding")
# The first call to interrupt, and the distance to the next. Slow tests try all calls.
CALLS = {"mtp": (1, 2), "eagle": (1, 3), "sliding": (2, 2)}


def finish(made: HeadBench, batch: BatchGenerator, rows: dict[int, Case]) -> None:
    batches.finish(made, batch, rows)
    assert not batch.stats.alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_is_one_forward_of_the_target_and_one_of_the_head_a_token(
    kind: str,
) -> None:
    made = head_bench("llama")
    generator = made.generator(kind, draft_length=3)
    head = knowing(generator)
    with BatchGenerator(generator) as batch, Watched(made.model) as target:
        rows = {made.insert(batch, case): case for case in CASES}
        while len(batch.running) < len(CASES):
            batch.next()
        for _ in range(2):
            target.clear()
            head.fed.clear()
            batch.next()
            assert target == [(6, 4)]
            wide, *steps = head.fed
            assert wide[:2] == ("history", 6)  # keys and values of accepted tokens
            assert 1 <= wide[2] <= 3
            assert steps == [("step", 6, 1)] * 3
        finish(made, batch, rows)
    assert head.unknown == 0
    assert batch.stats.acceptance_rate > 0.5


@pytest.mark.parametrize(
    "layout",
    [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_drafts_of_rows_are_those_of_the_rows_alone(layout: str) -> None:
    target, draft = mtp_on(layout)
    compare(generator_of(target, draft))


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("llama", "specforge"),
        pytest.param("gemma3_text", "specforge", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "specforge", marks=pytest.mark.slow),
        pytest.param("llama", "norm_output", marks=pytest.mark.slow),
        pytest.param("llama", "whole", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_eagle_are_those_of_the_rows_alone(name: str, dialect: str) -> None:
    model = head_bench(name).model
    compare(generator_of(model, eagle_on(model, dialect)))


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_other_rules_and_few_ids_give_rows_what_they_do_alone(acceptance: Any) -> None:
    made = head_bench("llama")
    generator = made.generator("random", acceptance=acceptance)
    cases = [
        Case(p, Sampling(temperature=0.8, seed=s), 12)
        for p, s in ((3, 1), (20, 2), (9, 3))
    ]
    for case, (result, drafts) in zip(cases, drafts_of(generator, cases), strict=True):
        alone, expected = drafts_alone(generator, case)
        assert drafts == expected
        assert result.tokens == alone.tokens
        assert result.stats.accepted == alone.stats.accepted


def test_a_head_of_few_ids_drafts_no_others() -> None:
    made = head_bench("llama")
    generator = made.generator("reduced")
    for result, drafts in drafts_of(generator, CASES[:4]):
        assert all(token % 2 == 0 for draft in drafts for token in draft)
        assert result.stats.accepted > 0


@pytest.mark.parametrize("kind", ["mtp", "sliding"])
def test_rounds_without_drafts_are_caught_up_with(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps can be in flight, and a head can lack more tokens than its window holds."""
    made, drafted = head_bench("llama"), []
    for lag in (1, 3, 64):
        monkeypatch.setattr(shared_head, "LONGEST_LAG", lag)
        generator = made.generator(kind)
        head = knowing(generator)
        with BatchGenerator(generator) as batch:
            lengths = [4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2]
            rows = insert_planned(made, batch, lengths, CASES)
            most = 0
            while batch.waiting or batch.running:
                batch.next()
                shared: Any = batch._groups[None]._rounds.proposals.shared
                most = max(most, 0, *shared._counts())
            finish(made, batch, rows)
            assert batch.stats.forwards < 20
        assert (most <= 6) == (lag < 64)
        assert head.unknown == 0
        drafted.append((head.chains, batch.stats.drafted, batch.stats.accepted))
    assert drafted[0] == drafted[1] == drafted[2]
    assert drafted[0][0] >= 3


def test_rows_that_never_draft_are_not_followed() -> None:
    made = head_bench("llama")
    generator = made.generator("mtp")
    head = knowing(generator)
    with BatchGenerator(generator) as batch:
        cases = [Case(c.prompt, c.sampling, 18, draft_length=0) for c in CASES[:3]]
        rows = {made.insert(batch, case): case for case in cases}
        while batch.waiting or batch.running:
            batch.next()
            lane = batch._groups[None]._lane
            assert all(member.follower is None for member in lane.members)
        for case in (cases[0], CASES[3], cases[1]):
            rows[made.insert(batch, case)] = case
        head.fed.clear()
        finish(made, batch, rows)
    assert {rows for how, rows, _ in head.fed if how == "step"} == {1}
    assert head.unknown == 0


@pytest.mark.parametrize(
    ("kind", "calls"),
    [*CALLS.items(), *(pytest.param(k, (1, 1), marks=pytest.mark.slow) for k in KINDS)],
)
def test_an_interrupt_anywhere_leaves_rows_and_head_as_they_were(
    kind: str, calls: tuple[int, int]
) -> None:
    made, cases = head_bench("llama"), [CASES[0], CASES[3], CASES[4]]
    cases = [replace(case, max_tokens=14) for case in cases]
    for case in cases:
        made.text(case.prompt, case.sampling)
    first, every = calls
    for forward in range(first, 9, every):
        generator = made.generator(kind)
        with BatchGenerator(generator) as batch:
            rows = {made.insert(batch, case): case for case in cases}
            with Watched(made.model, forward), pytest.raises(KeyboardInterrupt):
                run(batch)
            finish(made, batch, rows)
        assert knowing(generator).unknown == 0
    for call in range(first, 12, every):
        generator = made.generator(kind)
        head = knowing(generator)
        with BatchGenerator(generator) as batch:
            rows = {made.insert(batch, case): case for case in cases}
            fail_in(head, call, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                run(batch)
            finish(made, batch, rows)
            assert batch.stats.acceptance_rate > 0.5
            assert not any(batch.result(uid).stats.drafter_faults for uid in rows)
        assert head.unknown == 0


def insert_planned(
    made: HeadBench, batch: BatchGenerator, lengths: list[int], cases: list[Case]
) -> dict[int, Case]:
    rows = {}
    for case in cases:
        made.text(case.prompt, case.sampling)
        planned = {**options_of(case), "draft_length": Planned(lengths)}
        rows[batch.insert(**planned)] = case
    return rows


@pytest.mark.parametrize("where", ["forward", "read"])
def test_an_interrupt_among_plain_steps_takes_their_states_back(where: str) -> None:
    """A plain step is committed at once, but read after the next is submitted."""
    made, cases = head_bench("llama"), [CASES[0], CASES[3], CASES[4]]
    plain = Pending.read
    for number in range(1, 7):
        generator = made.generator("mtp")
        left = number

        def read(step: Pending, *args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return plain(step, *args)

        forward = 4 + number if where == "forward" else 0
        with pytest.MonkeyPatch.context() as patch, BatchGenerator(generator) as batch:
            rows = insert_planned(made, batch, [2, 0, 0, 0, 3, 0], cases)
            if where == "read":
                patch.setattr(Pending, "read", read)
            with Watched(made.model, forward), pytest.raises(KeyboardInterrupt):
                run(batch)
            finish(made, batch, rows)
            assert batch.stats.acceptance_rate > 0.4
        assert knowing(generator).unknown == 0


@pytest.mark.parametrize("where", ["feed", "commit"])
def test_an_interrupt_while_catching_up_leaves_the_head_as_it_was(where: str) -> None:
    """The states of plain steps are held after the interrupt, and none is fed twice."""
    made, cases = head_bench("llama"), [CASES[0], CASES[3], CASES[4]]
    plain = getattr(HeadRound, where)
    generator, catching = made.generator("mtp"), []
    catch_up = SharedHead._catch_up

    def noting(drafter: SharedHead) -> None:
        catching.append(True)
        catch_up(drafter)
        catching.append(False)

    def failing(head_round: HeadRound, *args: Any) -> None:
        plain(head_round, *args)
        if catching[-1:] == [True]:
            catching.clear()
            patch.setattr(HeadRound, where, plain)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, BatchGenerator(generator) as batch:
        patch.setattr(shared_head, "LONGEST_LAG", 1)
        patch.setattr(SharedHead, "_catch_up", noting)
        patch.setattr(HeadRound, where, failing)
        rows = insert_planned(made, batch, [2, 0, 0, 0, 3, 0], cases)
        with pytest.raises(KeyboardInterrupt):
            run(batch)
        assert batch.running
        finish(made, batch, rows)
        assert False in catching  # the head has caught up after the interrupt
        assert batch.stats.acceptance_rate > 0.4
        assert not any(batch.result(uid).stats.drafter_faults for uid in rows)
    assert knowing(generator).unknown == 0


def fail_in(head: KnowingMtp, call: int, error: BaseException) -> None:
    """Let one call of a head, the `call`-th from now on, run and then raise."""
    left = call
    for name in ("history", "step"):
        plain = getattr(head, name)

        def failing(*args: Any, plain: Any = plain, **options: Any) -> HeadOutput:
            nonlocal left
            left -= 1
            if left == 0:
                plain(*args, **options)
                raise error
            made: HeadOutput = plain(*args, **options)
            return made

        setattr(head, name, failing)


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_target_that_cannot_commit_leaves_the_head_as_it_was(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = head_bench("llama")
    generator = made.generator("mtp")
    with BatchGenerator(generator) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        batch.next()
        interrupt_commit(batch, calls, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            run(batch)
        finish(made, batch, rows)
        assert batch.stats.acceptance_rate > 0.5
    assert knowing(generator).unknown == 0


@pytest.mark.parametrize("call", [1, 3, 7, 8, 9, 12])
def test_a_head_that_raises_is_disabled(call: int) -> None:
    """An error in a prefill disables the head for one row; in a round, for all rows."""
    made = head_bench("llama")
    generator = made.generator("mtp")
    with BatchGenerator(generator) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        fail_in(knowing(generator), call, RuntimeError("broken"))
        with pytest.warns(DrafterFaultWarning, match="broken"):
            run(batch)
        finish(made, batch, rows)
        faults = [batch.result(uid).stats.drafter_faults for uid in rows]
        prompts = sum(case.prompt > 2 for case in CASES)
        reading = call <= prompts
        assert [len(each) for each in faults].count(1) == (1 if reading else len(rows))
        named = {fault.call for each in faults for fault in each}
        assert named == {"begin" if reading else "propose"}
        later = {made.insert(batch, case): case for case in CASES[:2]}
        finish(made, batch, later)
        assert all(batch.result(uid).stats.accepted for uid in later)


def test_a_want_of_memory_in_the_head_is_raised() -> None:
    made = head_bench("llama")
    generator = made.generator("mtp")
    with BatchGenerator(generator) as batch:
        rows = {made.insert(batch, case): case for case in CASES}
        fail_in(knowing(generator), 9, MemoryError())
        with pytest.raises(MemoryError):
            run(batch)
        finish(made, batch, rows)
        assert batch.stats.acceptance_rate > 0.5


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS[1], SAMPLINGS[5]])
def test_a_head_whose_logits_are_unusable_is_disabled_for_those_rows(
    sampling: Sampling,
) -> None:
    made = head_bench("llama")
    generator = made.generator("mtp")
    head = knowing(generator)
    plain, strange = head.step, made.text(23, sampling)[7]

    def step(hidden: mx.array, tokens: mx.array, *args: Any) -> HeadOutput:
        out = plain(hidden, tokens, *args)
        seen = (tokens[:, -1:] == strange)[:, :, None]
        return HeadOutput(out.recycled, mx.where(seen, mx.nan, out.logits))

    head.step = step  # type: ignore[method-assign,assignment]
    with BatchGenerator(generator) as batch:
        bad = Case(23, sampling, 18)
        rows = {made.insert(batch, case): case for case in (bad, *CASES[:4])}
        with pytest.warns(DrafterFaultWarning, match="NaN"):
            run(batch)
        finish(made, batch, rows)
        faults = {uid: batch.result(uid).stats.drafter_faults for uid in rows}
        for uid, case in rows.items():
            text = made.text(case.prompt, case.sampling)[:17]
            assert len(faults[uid]) <= (strange in text)
        assert sum(map(bool, faults.values())) < len(rows)
        assert faults[min(rows)]
    assert head.unknown == 0


def test_a_text_of_a_batch_is_found_by_a_later_request() -> None:
    made = head_bench("llama")
    generator = made.generator("random", prefix_cache=PrefixCache(64 << 20))
    cases = [Case(40, SAMPLINGS[0], 12), Case(23, SAMPLINGS[1], 12)]
    with BatchGenerator(generator) as batch:
        rows = {made.insert(batch, case): case for case in cases}
        finish(made, batch, rows)
        for uid, case in rows.items():
            assert not batch.result(uid).stats.reused
            text = [*prompt_of(case.prompt), *batch.result(uid).tokens]
            later = generator.generate([*text, 7], max_tokens=1)
            assert later.stats.reused >= len(text) - 2
    assert batch.stats.failed == 0


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_rows_of_heads_in_a_prefix_cache_are_those_of_the_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached row of a head holds its position and the token after that position."""

    def check(
        head: KnowingMtp, head_rows: list[list[int]], text: int, position: int
    ) -> None:
        tokens = head.known.texts[text]
        places = range(position + 1 - len(head_rows), position + 1)
        assert head_rows == [[place, tokens[place + 1]] for place in places]

    monkeypatch.setattr(KnowingMtp, "_check", check)
    made = head_bench("llama")
    cases = [Case(p, s, 12) for p in (40, 23) for s in SAMPLINGS[:2]]
    for case in cases:
        made.text(case.prompt, case.sampling)
    prefixes = PrefixCache(64 << 20)
    generator = made.generator(kind, prefix_cache=prefixes)
    kept: list[int] = []
    for tokens in (1, 9):
        for case in cases[::2]:
            prompt = prompt_of(case.prompt)
            result = generator.generate(prompt, max_tokens=tokens, stop_tokens=())
            assert not result.stats.drafter_faults
        kept.append(len(_head_rows(prefixes)))
        with BatchGenerator(generator) as batch:
            rows = {made.insert(batch, case): case for case in cases}
            finish(made, batch, rows)
            assert not any(batch.result(uid).stats.drafter_faults for uid in rows)
        kept.append(len(_head_rows(prefixes)))
    assert min(kept) > 40


def _head_rows(prefixes: PrefixCache) -> list[list[int]]:
    """Return position and token of every row of a head; check them against the text."""
    result: list[list[int]] = []
    for node in prefixes._tree.nodes():
        text, above = list(node.tokens), node.parent
        while above is not None:
            text, above = [*above.tokens, *text], above.parent
        for part in node.rows[1].leaves[0].rows if 1 in node.rows else ():
            rows: Any = part.arrays[0][0, 0].astype(mx.int32).tolist()
            places = range(part.start, part.stop)
            assert rows == [[place, text[place + 1]] for place in places]
            result += rows
    return result


def test_a_prompt_out_of_a_prefix_cache_is_not_in_the_slots() -> None:
    """In each row the head begins where the target began to read."""
    made = head_bench("llama")
    prefixes = PrefixCache(64 << 20, every=8)
    plain = made.generator("none", prefix_cache=prefixes)
    plain.generate(prompt_of(40)[:33], max_tokens=1)
    plain.generate(prompt_of(17), max_tokens=1)
    generator = made.generator("random", prefix_cache=prefixes)
    cases = [Case(40, SAMPLINGS[1], 12), Case(23, SAMPLINGS[0], 12)]
    cases.append(Case(17, SAMPLINGS[2], 12))
    drafted = drafts_of(generator, cases)
    # The first prompt has 33 cached tokens. The last one can use 16, since a prompt's
    # last token is always fed. In both, one of these is fed again, for the state that
    # the head reads.
    assert [result.stats.reused for result, _ in drafted][::2] == [32, 15]
    for case, (result, drafts) in zip(cases, drafted, strict=True):
        made.check(case, result.tokens)
        assert len(drafts) >= 8


def test_what_drafts_otherwise_shares_the_target_alone() -> None:
    made = head_bench("llama")
    head = made.generator("random")._setup.draft
    assert isinstance(head, EagleDraft)
    generator = generator_of(made.model, CascadeDraft(LookupDraft(), head))
    with BatchGenerator(generator) as batch:
        options: dict[str, Any] = {"max_tokens": 6, "stop_tokens": ()}
        uids = [batch.insert(prompt_of(n), **options) for n in (6, 9)]
        assert [batch.why_alone(uid) for uid in uids] == [None, None]
        run(batch)
        for uid, n in zip(uids, (6, 9), strict=True):
            alone = generator.generate(prompt_of(n), **options)
            assert batch.result(uid).tokens == alone.tokens


def test_a_row_that_leaves_while_it_is_read_lets_go_of_what_was_read() -> None:
    made = head_bench("llama")
    with BatchGenerator(made.generator("random")) as batch:
        uid = made.insert(batch, Case(40, SAMPLINGS[0], 12, prefill_step=4))
        for _ in range(3):
            batch.next()
        assert uid in batch.waiting
        drafter: Any = batch._rows[uid].request.drafter
        assert drafter.inner.committed.arrays
        row = batch._rows[uid]
        assert batch.remove(uid).finish_reason == "closed"
        assert row.drafter.batch_head is not None
        assert drafter.inner.committed.arrays == []
        assert batch.memory == 0
