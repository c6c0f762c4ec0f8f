"""Every row of a batch has the text that its prompt has alone.

Hypothesis draws rows that join and leave between rounds. Where wide forwards change the
last bits of a family's logits, the two texts can differ after a near-tie.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_speculation import BatchGenerator
from mlx_speculation.models import PREFILL_STEP
from mlx_speculation.models.exclusions import TOGETHER
from support.covering import covering
from support.drafters.batch_heads import KNOWING, head_bench, knowing
from support.drafters.batches import (
    LONGEST,
    MODELS,
    PROMPTS,
    SAMPLINGS,
    Bench,
    Case,
    bench,
)

MOST_ROWS = 4
QUICK = [
    ("llama", "lookup"),
    ("gemma3_text", "model"),
    ("qwen3_5", "model"),
    ("llama", "mtp"),
    ("gemma3_text", "eagle"),
]
# Dense, sliding and hybrid targets, with heads that know the texts; see `batch_heads`.
HEADS = [
    (name, kind)
    for name in ("llama", "gemma3_text", "qwen3_5", "llama(sliding)")
    for kind in KNOWING
]
OTHERS = [
    *(
        (name, kind)
        for name, tiny in MODELS.items()
        if tiny.module in TOGETHER
        for kind in ("model", "lookup")
        if (name, kind) not in QUICK
    ),
    *(pair for pair in HEADS if pair not in QUICK),
]
CASES = st.builds(
    Case,
    prompt=st.sampled_from(PROMPTS),
    sampling=st.sampled_from(SAMPLINGS),
    max_tokens=st.integers(0, LONGEST),
    draft_length=st.sampled_from([None, None, None, 0, 2, 5]),
    prefill_step=st.sampled_from([PREFILL_STEP, 4]),  # 4: prompts in up to 10 parts
)


def bench_for(name: str, kind: str) -> Bench:
    return head_bench(name) if kind in KNOWING else bench(name)


def machine(name: str, kind: str, sizes: bool) -> type[RuleBasedStateMachine]:
    """Return a state machine of batches; `sizes`: numbers of rows are rounded up."""
    most = 12 if sizes else MOST_ROWS

    class Machine(RuleBasedStateMachine):
        @initialize(cases=st.lists(CASES, min_size=5 * sizes, max_size=7 * sizes))
        def open(self, cases: list[Case]) -> None:
            self.bench = bench_for(name, kind)
            self.generator = generator = self.bench.generator(kind)
            self.batch = BatchGenerator(generator, max_rows=most, row_sizes=sizes)
            self.cases: dict[int, Case] = {}
            self.got: dict[int, list[int]] = {}
            self.ended: dict[int, str] = {}
            for case in cases:
                self.a_row_joins(case)

        @rule(case=CASES)
        def a_row_joins(self, case: Case) -> None:
            uid = self.bench.insert(self.batch, case)
            self.cases[uid], self.got[uid] = case, []

        @rule(case=CASES, count=st.integers(1, 3))
        def rows_join(self, case: Case, count: int) -> None:
            for _ in range(count):
                self.a_row_joins(case)

        @rule(rounds=st.integers(1, 6))
        def rounds(self, rounds: int) -> None:
            for _ in range(rounds):
                self.round()

        @precondition(lambda self: self.batch.running or self.batch.waiting)
        @rule(data=st.data())
        def a_row_leaves(self, data: st.DataObject) -> None:
            rows = (*self.batch.waiting[:1], *self.batch.running)
            uid = data.draw(st.sampled_from(rows))
            result = self.batch.remove(uid)
            assert result.finish_reason == "closed"
            assert result.tokens == self.got[uid]
            self.check(uid)

        def round(self) -> None:
            for response in self.batch.next():
                assert response.error is None
                uid = response.uid
                if response.chunk is not None:
                    self.got[uid].append(response.chunk.token)
                if response.finish_reason is not None:
                    self.ended[uid] = response.finish_reason
                    result = self.batch.remove(uid)
                    assert result.tokens == self.got[uid]
                    assert len(result.tokens) == self.cases[uid].max_tokens
                    self.check(uid)

        def check(self, uid: int) -> None:
            self.bench.check(self.cases[uid], self.got[uid])

        def teardown(self) -> None:
            while self.batch.waiting or self.batch.running:
                self.round()
            assert self.batch.memory == 0
            assert all("one token" in reason for reason in self.batch.stats.alone)
            if kind in KNOWING and not self.bench.ties:
                # Only rows with a prompt of one token have no state for a draft.
                short = sum(case.prompt == 1 for case in self.cases.values())
                assert knowing(self.generator).unknown <= short
            self.batch.close()

    return Machine


@pytest.mark.parametrize(
    ("drafted", "sizes"),
    [
        *covering(QUICK, (False, True)),
        *(
            pytest.param(drafted, sizes, marks=pytest.mark.slow)
            for drafted in OTHERS
            for sizes in (False, True)
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_rows_that_come_and_go_write_what_they_do_alone(
    drafted: tuple[str, str], sizes: bool
) -> None:
    name, kind = drafted
    few = settings(max_examples=2 if sizes else 3, stateful_step_count=8, deadline=None)
    run_state_machine_as_test(machine(name, kind, sizes), settings=few)
    print(f"{name}: {bench_for(name, kind).ties} near-ties")  # noqa: T201


@pytest.mark.parametrize("kind", ["model", "lookup", "none"])
def test_rows_share_forwards_and_keep_different_numbers(kind: str) -> None:
    made, cases = bench("llama"), [Case(p, s, 20) for p in (2, 23) for s in SAMPLINGS]
    with BatchGenerator(made.generator(kind), max_rows=8) as batch:
        uids = [made.insert(batch, case) for case in cases]
        while batch.waiting or batch.running:
            batch.next()
        for uid, case in zip(uids, cases, strict=True):
            made.check(case, batch.remove(uid).tokens)
        stats = batch.stats
    assert stats.mean_rows > 5
    assert stats.emitted == 20 * len(cases)
    if kind == "none":
        assert stats.drafted == 0
        assert stats.forwards == 2 * 20
    else:
        # Lookups draft after any match, and matches of one token are seldom right.
        least = 0.1 if kind == "lookup" else 0.3
        assert least < stats.acceptance_rate < 0.95
        assert stats.forwards < 35
