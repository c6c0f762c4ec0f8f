"""Replays traces through the draft length rule, for streams and batches.

Rounds are those of `engine.round.decoder` and `engine.batch.running`: lookups propose
first and at no cost, also while a plain step is in flight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.replays.replay import FIXED, Machine, Replayed, Text, run, texts_of
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength, Plan
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.draft_length.cost_store import Source
from mlx_speculation.engine.draft_length.rule import Credit
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.lookup.survival import lookup_buckets, lookup_rates

LONGEST = 16


class Generator:
    """State that the streams of a generator share; empty at first."""

    def __init__(self, names: Sequence[str], credit: Credit | None = None) -> None:
        self.each = [Source(free="lookup" in name, name=name) for name in names]
        self.free = [index for index, each in enumerate(self.each) if each.free]
        self.credit, self.lookups = credit or Credit(), lookup_rates()

    def looked_up(self, count: int) -> tuple[list[float], list[int]]:
        """Return the survival of a lookup's proposal, and the buckets of its tokens."""
        buckets = [*lookup_buckets(count, 0, [(0, 0)] * count, None)]
        survival = self.lookups.survival(buckets)
        return survival, buckets[: len(survival)]


def replay_rule(
    known: Generator,
    machine: Machine,
    text: Text,
    result: Replayed,
) -> None:
    """Generate a text, and add its rounds to `result`."""
    policy = RuleDraftLength(known.each, known.credit, LONGEST)
    at, behind, rounds = 0, False, 0
    plan: Plan | None = None
    next_plan: Plan | None = None
    while at < len(text):
        budget, context = len(text) - at, text.context + at
        limit = budget - 1 - behind
        if plan is None:
            plan = policy.plan(context, limit)
        if plan.length == 0 and next_plan is None:
            next_plan = policy.plan(context + 1, budget - 2)
        source, length, buckets = 0, plan.length, {}
        if policy.late and length:
            survivals = policy.survivals()
            for index in known.free:
                count = int(text.proposed[index][at])
                survivals[index], buckets[index] = known.looked_up(count)
            chosen = policy.choose(context, limit, [survivals], behind=behind)
            source, length = _picked(chosen)
        drafted = max(0, min(int(text.proposed[source][at]) - behind, length))
        accepted = 0
        if drafted:
            right = int(text.right[source][at])
            accepted = min(max(0, right - behind), drafted)
            emitted, ahead = accepted + 1 + behind, False
            steps = machine.rounds[source][drafted] + machine.left * behind
        else:
            emitted = 1
            ahead = plan.length > 0 or (next_plan is not None and next_plan.length == 0)
            steps = machine.left if behind else machine.cold
            steps += (1.0 - machine.left) * ahead
        emitted = min(emitted, budget)
        observed = steps * machine.noise[rounds % len(machine.noise)]
        feedback = Feedback(drafted, min(accepted, emitted), observed, behind, ahead)
        plan = policy.note(context, plan, feedback)
        for index, table in buckets.items():
            right = min(int(text.right[index][at]), emitted)
            known.lookups.note(table[:emitted], right)
        if result.decisions is not None:
            result.decisions.append((plan, feedback))
        at, rounds, behind = at + emitted, rounds + 1, ahead
        result.steps += steps
        result.tokens += emitted
        plan, next_plan = next_plan, None


def _picked(plan: Plan) -> tuple[int, int]:
    """Return the index of the source that drafts, and the length."""
    return 0 if plan.source is None else plan.source.index, plan.length


@dataclass(frozen=True)
class Judged:
    """Result of a group of texts, beside plain decoding and the best fixed length."""

    group: str
    ours: Replayed
    plain: float
    least: float
    best: str

    @property
    def over_plain(self) -> float:
        """The rule's speed over that of plain decoding."""
        return self.plain / self.ours.steps

    @property
    def over_best(self) -> float:
        """The rule's speed over that of the best fixed length, of a single source."""
        return self.least / self.ours.steps


def judged(
    traces: dict[str, np.ndarray],
    pairs: Sequence[str],
    machine: Machine,
    tokens: int,
    *,
    explain: bool = False,
) -> Iterator[Judged]:
    """Replay each group as the requests of a new generator."""
    for group, texts in texts_of(traces, pairs).items():
        fixed: dict[str, float] = {}
        for index, pair in enumerate(pairs):
            single = [
                Text(one.context, (one.right[index],), (one.proposed[index],))
                for one in texts
            ]
            alone = Machine([machine.rounds[index]], machine.left, machine.cold)
            for length in FIXED:
                steps = run(
                    partial(FixedDraftLength, length), alone, single, tokens
                ).steps
                fixed[f"{pair} {length}" if length else "plain"] = steps
        known = Generator(pairs)
        ours = Replayed(decisions=[] if explain else None)
        for text in texts:
            for request in text.requests(tokens):
                replay_rule(known, machine, request, ours)
        best = min(fixed, key=lambda name: fixed[name])
        yield Judged(group, ours, fixed["plain"], fixed[best], best)


@dataclass
class Member:
    """A request of a replayed batch."""

    policy: RuleDraftLength
    text: Text
    at: int = 0
    planner: Any = None

    def __len__(self) -> int:
        return len(self.text) - self.at


# A row, the index of its lookup, its position then, and the weights of the proposal.
Probed = tuple[Member, int, int, Any]


def replay_batch(
    known: Generator,
    machine: Machine,
    texts: Sequence[Text],
    result: Replayed,
) -> None:
    """Generate texts as one batch: all requests are fed the same width.

    The device is taken to be busy: a plain step of the remaining requests costs their
    share of a plain step of the whole batch.
    """
    credit = known.credit
    lengths = BatchDraftLength(lambda _: known.each, credit, credit, LONGEST)
    rows = [
        Member(RuleDraftLength(known.each, Credit(), LONGEST), text) for text in texts
    ]
    late, behind = rows[0].policy.late, False
    lengths.take(rows)
    while live := [row for row in rows if len(row)]:
        context = max(row.text.context + row.at for row in live)
        room = [len(row) - 1 - behind for row in live]
        limits = lengths.limits(live, context, room, 1)
        source = 0
        probed: list[Probed] = []
        if any(limits) and late:
            offered, probed = _probe_lookups(known, live, limits, behind)
            chosen = lengths.choose(context, max(limits), offered, behind=behind)
            source, width = _picked(chosen)
            limits = [min(limit, width) for limit in limits]
        drafted, accepted = _drafted(live, source, limits, behind)
        width = max(drafted)
        if width:
            steps, ahead = machine.rounds[source][width] + machine.left * behind, False
            emitted = [
                min(len(row), n + 1 + behind)
                for row, n in zip(live, accepted, strict=True)
            ]
        else:
            emitted = [1] * len(live)
            after = [limit - 1 + behind for limit in room]
            ahead = late if any(limits) else not lengths.early(live, context + 1, after)
            steps = machine.left if behind else machine.cold
            steps += (1.0 - machine.left) * ahead
        widest = max(range(len(live)), key=drafted.__getitem__)
        feedback = Feedback(width, accepted[widest], steps, behind, ahead)
        lengths.note(live, context, drafted, accepted, feedback)
        for row, count in zip(live, emitted, strict=True):
            row.at += count
        for row, index, at, weights in probed:
            hits = min(int(row.text.right[index][at]), row.at - at)
            known.lookups.note(weights[: row.at - at], hits)
        if not all(map(len, live)):
            lengths.take(live)
        behind = ahead
        result.steps += steps * len(live) / len(texts)
        result.tokens += sum(emitted)


def _probe_lookups(
    known: Generator, live: list[Member], limits: list[int], behind: bool
) -> tuple[list[Any], list[Probed]]:
    """Return the survival of sources for each row with room, and the lookups' finds."""
    offered, probed = [], []
    for row, limit in zip(live, limits, strict=True):
        if limit <= 0:
            continue
        survivals = row.policy.survivals()
        for index in known.free:
            count = min(limit + behind, int(row.text.proposed[index][row.at]))
            survivals[index], weights = known.looked_up(count)
            probed.append((row, index, row.at, weights))
        offered.append(survivals)
    return offered, probed


def _drafted(
    live: list[Member], source: int, limits: list[int], behind: bool
) -> tuple[list[int], list[int]]:
    """Return the number of tokens that each row drafts, and how many are right."""
    drafted, accepted = [], []
    for row, limit in zip(live, limits, strict=True):
        count = int(row.text.proposed[source][row.at]) - behind
        drafted.append(max(0, min(limit, count)))
        right = max(0, int(row.text.right[source][row.at]) - behind)
        accepted.append(min(right, drafted[-1]))
    return drafted, accepted
