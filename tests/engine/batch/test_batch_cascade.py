"""In a batch, the model or head of a cascade drafts for all rows in one forward."""

from typing import Any

import pytest

from mlx_speculation import BatchGenerator, CascadeDraft, LookupDraft
from mlx_speculation.engine.draft_length.base import Compared, Plan
from mlx_speculation.engine.draft_length.ruled import BatchDraftLength
from support.drafters.batch_heads import head_bench
from support.drafters.batches import SAMPLINGS, Bench, Case, bench


def made(kind: str) -> Bench:
    return head_bench("llama") if kind == "mtp" else bench("llama")


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let rounds cycle through a list of sources and widths."""
    rounds = [(1, 3), (0, 0), (0, 2), (1, 0), (1, 2), (0, 3)]
    done: list[tuple[int, int]] = []

    def choose(
        self: BatchDraftLength, context: int, limit: int, offered: Any, *, behind: bool
    ) -> Plan:
        planned = rounds[len(done) % len(rounds)]
        if behind and planned[0] == 0:
            planned = (
                1,
                min(2, planned[1]),
            )  # only lookups draft while a step is in flight
        done.append(planned)
        index, width = planned[0], min(limit, planned[1])
        by = Compared("", index, index > 0, [], (), 1.0)
        plan = self.plans[id(self.rule)] = Plan(width, "best", by)
        return plan

    monkeypatch.setattr(BatchDraftLength, "choose", choose)
    monkeypatch.setattr(BatchDraftLength, "expects", lambda *_: len(done) % 3 == 0)
    return done


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_sources_by_turns_change_no_text(
    kind: str, script: list[tuple[int, int]]
) -> None:
    bench_of_kind = made(kind)
    inner: Any = bench_of_kind.generator(kind)._setup.draft
    cascade = CascadeDraft(inner, LookupDraft())
    generator = bench_of_kind.generator("none", draft=cascade, draft_length=None)
    cases = [Case(p, s, 24) for p in (2, 23) for s in SAMPLINGS[:3]]
    cases[1] = Case(2, SAMPLINGS[1], 24, draft_length=3)
    with BatchGenerator(generator) as batch:
        uids = [bench_of_kind.insert(batch, case) for case in cases]
        while batch.waiting or batch.running:
            batch.next()
            if len(batch.running) > 1:
                assert batch._groups[None]._decoder._sequential
                assert batch._groups[None]._rounds.proposals.shared is not None
        assert batch.stats.row_rounds > 2 * batch.stats.forwards
        for uid, case in zip(uids, cases, strict=True):
            assert batch.why_alone(uid) is None
            bench_of_kind.check(case, batch.result(uid).tokens, width=17)
            assert not batch.result(uid).stats.drafter_faults
        sources = {name for uid in uids for name in batch.result(uid).stats.sources}
    assert len(script) > 6
    assert sources == {kind, "lookup"}


def test_every_member_drafts_at_a_fixed_length() -> None:
    """A head that comes after a lookup does not draft in place of the lookup."""
    bench_of_kind = made("mtp")
    inner: Any = bench_of_kind.generator("mtp")._setup.draft
    cascade = CascadeDraft(LookupDraft(), inner)
    generator = bench_of_kind.generator("none", draft=cascade, draft_length=3)
    with BatchGenerator(generator) as batch:
        cases = [Case(p, SAMPLINGS[0], 48) for p in (2, 9, 23)]
        uids = [bench_of_kind.insert(batch, case) for case in cases]
        while batch.waiting or batch.running:
            batch.next()
        stats = [batch.result(uid).stats for uid in uids]
    assert {name for each in stats for name in each.sources} == {"lookup", "mtp"}
