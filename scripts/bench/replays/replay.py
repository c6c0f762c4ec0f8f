"""Replays traces of texts through draft length policies, without a clock.

A trace has the result of each draft from each position (see scripts/traces.py), and a
`Machine` has the cost of each round. The rounds are those of `engine.round.decoder` and
`engine.batch.running`: a plain step submits the next plain step, unless the next round
is planned as a draft. A draft made while a step is in flight begins after the token of
that step. Lookups are free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from mlx_speculation.engine.draft_length.base import (
    DraftLengthPolicy,
    Feedback,
    FixedDraftLength,
    Plan,
)
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.draft_length.rule import Credit
from mlx_speculation.engine.draft_length.ruled import BatchDraftLength, RuleDraftLength
from mlx_speculation.engine.lookup.survival import lookup_buckets, lookup_rates

LONGEST = 16
FIXED = (0, 1, 2, 3, 4, 6, 8, 12, 15)  # lengths that a policy is compared with
MACHINES = ("cpu", "h100", "mac", "linear")
Traces = dict[str, np.ndarray]


@dataclass(frozen=True)
class Text:
    """A greedy text, and the proposals of each drafter at each of its tokens."""

    context: int  # tokens of the prompt
    # By drafter and position: how many drafted tokens come before the first wrong one,
    # and how many are drafted
    right: tuple[Sequence[int], ...]
    proposed: tuple[Sequence[int], ...]

    def __len__(self) -> int:
        return len(self.right[0])

    def requests(self, tokens: int) -> Iterator["Text"]:
        """Cut the text into requests of `tokens` tokens; the rest is dropped."""
        for start in range(0, max(1, len(self) - tokens + 1), tokens):
            stop = start + tokens
            yield Text(
                self.context + start,
                tuple(each[start:stop] for each in self.right),
                tuple(each[start:stop] for each in self.proposed),
            )


@dataclass(frozen=True)
class Machine:
    """Costs of rounds, in plain steps."""

    rounds: Sequence[Sequence[float]]  # of each drafter, by number of drafted tokens
    left: float = 0.0  # the rest of a plain step in flight when a round begins
    cold: float = 1.0  # a plain step that is not in flight when its round begins
    noise: Sequence[float] = (1.0,)  # factors of the observed times, in a cycle

    def plain(self, behind: bool, ahead: bool) -> float:
        """Return a plain step's cost.

        `behind`: it was in flight when its round began. `ahead`: the next step is in
        flight when the round ends.
        """
        steps = self.left if behind else self.cold
        return steps + (1.0 - self.left) * ahead


@dataclass
class Replayed:
    """Result of one request or several."""

    steps: float = 0.0  # cost of the rounds, in plain steps
    tokens: int = 0  # emitted
    decisions: list[tuple[Plan, Feedback]] | None = None  # None: not kept

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step."""
        return self.tokens / self.steps


class Generator:
    """State that the streams of a generator share; empty at first."""

    def __init__(self, names: Sequence[str], credit: Credit | None = None) -> None:
        self.each = [Source(free="lookup" in name, name=name) for name in names]
        self.free = [index for index, each in enumerate(self.each) if each.free]
        self.credit, self.lookups = credit or Credit(), lookup_rates()

    def survival(self, text: Text, index: int, at: int, most: int = LONGEST + 1) -> Any:
        """Return survival and buckets of a lookup's proposal at a position."""
        count = min(most, int(text.proposed[index][at]))
        buckets = [*lookup_buckets(count, 0, [(0, 0)] * count, None)]
        survival = self.lookups.survival(buckets)
        return survival, buckets[: len(survival)]


def replay_rule(
    known: Generator, machine: Machine, text: Text, result: Replayed
) -> None:
    """Generate a text by the rule, and add its rounds to `result`."""
    policy = RuleDraftLength(known.each, known.credit, LONGEST)
    replay(policy, machine, text, result, known)


def replay(
    policy: DraftLengthPolicy,
    machine: Machine,
    text: Text,
    result: Replayed,
    known: Generator | None = None,
) -> None:
    """Generate a text, and add its rounds to `result`; the rule needs `known`."""
    at, behind = 0, False
    plan: Plan | None = None
    next_plan: Plan | None = None
    for noise in cycle(machine.noise):
        budget, context = len(text) - at, text.context + at
        if not budget:
            break
        limit = budget - 1 - behind
        plan = plan or policy.plan(context, limit)
        if plan.length == 0 and next_plan is None:
            next_plan = policy.plan(context + 1, budget - 2)
        source, length, buckets = 0, max(0, min(plan.length, limit)), {}
        if known and isinstance(policy, RuleDraftLength) and policy.late and length:
            survivals = policy.survivals()
            for index in known.free:
                survivals[index], buckets[index] = known.survival(text, index, at)
            chosen = policy.choose(context, limit, [survivals], behind=behind)
            source, length = _picked(chosen)
        (drafted,), (accepted,) = _drafted([text], [at], source, [length], behind)
        if drafted:
            emitted, ahead = accepted + 1 + behind, False
            steps = machine.rounds[source][drafted] + machine.left * behind
        else:
            emitted = 1
            ahead = plan.length > 0 or (next_plan is not None and next_plan.length == 0)
            steps = machine.plain(behind, ahead)
        emitted = min(emitted, budget)
        accepted = min(accepted, emitted)
        feedback = Feedback(drafted, accepted, steps * noise, behind, ahead)
        plan = policy.note(context, plan, feedback) or plan
        for index, table in buckets.items():
            assert known is not None
            right = min(int(text.right[index][at]), emitted)
            known.lookups.note(table[:emitted], right)
        if result.decisions is not None:
            result.decisions.append((plan, feedback))
        at, behind = at + emitted, ahead
        result.steps += steps
        result.tokens += emitted
        plan, next_plan = next_plan, None


def _picked(plan: Plan) -> tuple[int, int]:
    return 0 if plan.source is None else plan.source.index, plan.length


def _drafted(
    texts: Sequence[Text],
    places: Sequence[int],
    source: int,
    limits: Sequence[int],
    behind: bool,
) -> tuple[list[int], list[int]]:
    """Return the number of tokens that each text drafts, and how many are right."""
    drafted, accepted = [], []
    for text, at, limit in zip(texts, places, limits, strict=True):
        count = int(text.proposed[source][at]) - behind
        drafted.append(max(0, min(limit, count)))
        right = max(0, int(text.right[source][at]) - behind)
        accepted.append(min(right, drafted[-1]))
    return drafted, accepted


def texts_of(traces: Traces, pairs: Sequence[str]) -> dict[str, list[Text]]:
    """Return the texts by group; several pairs of target and drafter are a cascade."""
    places = [name.split("/") for name in traces if name.startswith(f"{pairs[0]}/")]
    groups = dict.fromkeys(place[1] for place in places if len(place) == 3)

    def rows(group: str, what: str, row: int, tokens: int) -> tuple[list[int], ...]:
        each = [traces[f"{pair}/{group}/{what}"] for pair in pairs]
        return tuple(array[row, :tokens].tolist() for array in each)

    result: dict[str, list[Text]] = {}
    for group in groups:
        contexts = traces[f"{pairs[0]}/{group}/context"]
        tokens = traces[f"{pairs[0]}/{group}/tokens"]
        result[group] = [
            Text(
                int(context),
                rows(group, "right", row, count),
                rows(group, "found", row, count),
            )
            for row, (context, count) in enumerate(zip(contexts, tokens, strict=True))
        ]
    return result


# Cost of drafting one token on a GPU, in plain steps
_DRAFTING = {"lookup": 0.0, "model": 0.4, "mtp": 0.1, "eagle": 0.1, "assistant": 0.1}
# Cost, in plain steps, of verifying a number of drafted tokens, with a llama of 8 B on
# an H100 (mostly the host's time) and an M4 Pro (mostly 4-bit products)
_H100 = {0: 1.0, 1: 1.7, 2: 1.72, 4: 1.81, 8: 1.89, 16: 1.96}
_MAC = {0: 1.0, 1: 1.03, 2: 1.22, 3: 1.47, 5: 2.07, 7: 2.69, 11: 3.0, 16: 3.4}
# Without BLAS: each row costs a plain step, and no draft pays
_LINEAR = {0: 1.0, 16: 17.0}


def machines_of(traces: Traces, pairs: Sequence[str]) -> dict[str, Machine]:
    """Return the machines for a pair, or for a cascade of several."""
    kinds = [pair.split("-")[1] for pair in pairs]

    def made(verify: dict[int, float], left: float, cold: float) -> Machine:
        each = [_spread(verify) + np.arange(17) * _DRAFTING[kind] for kind in kinds]
        return Machine([one.tolist() for one in each], left, cold)

    measured = [
        _spread(dict(zip(traces[f"{p}/lengths"], traces[f"{p}/costs"], strict=True)))
        for p in pairs
    ]
    return {
        "cpu": Machine([one.tolist() for one in measured]),
        "h100": made(_H100, 0.5, 1.0),
        "mac": made(_MAC, 0.9, 1.05),
        "linear": made(_LINEAR, 0.0, 1.0),
    }


def _spread(costs: dict[int, float]) -> np.ndarray:
    """Return the costs of 0 to 16 drafted tokens, interpolated linearly."""
    return np.interp(range(17), list(costs), list(costs.values()))


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
        """The rule's speed over that of the best fixed length of a single drafter."""
        return self.least / self.ours.steps


def judged(
    traces: Traces,
    pairs: Sequence[str],
    machine: Machine,
    tokens: int,
    *,
    explain: bool = False,
) -> Iterator[Judged]:
    """Replay each group as the requests of a new generator."""
    for group, texts in texts_of(traces, pairs).items():
        requests = [each for text in texts for each in text.requests(tokens)]
        fixed: dict[str, float] = {}
        for index, pair in enumerate(pairs):
            alone = Machine([machine.rounds[index]], machine.left, machine.cold)
            for length in FIXED:
                single = Replayed()
                for one in requests:
                    rows = (one.right[index],), (one.proposed[index],)
                    policy = FixedDraftLength(length)
                    replay(policy, alone, Text(one.context, *rows), single)
                fixed[f"{pair} {length}" if length else "plain"] = single.steps
        known = Generator(pairs)
        ours = Replayed(decisions=[] if explain else None)
        for request in requests:
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


# A row, the index of a lookup, the row's position, the proposal's buckets
Probed = tuple[Member, int, int, Any]


def replay_batch(
    known: Generator,
    machine: Machine,
    texts: Sequence[Text],
    result: Replayed,
) -> None:
    """Generate texts as one batch: all requests get forwards of the same width.

    A round of the remaining requests costs their share of a round of the whole batch.
    """
    credit = known.credit
    lengths = BatchDraftLength(lambda _: known.each, credit, LONGEST)
    rows = [
        Member(RuleDraftLength(known.each, credit, LONGEST), text) for text in texts
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
        each, places = [row.text for row in live], [row.at for row in live]
        drafted, accepted = _drafted(each, places, source, limits, behind)
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
            steps = machine.plain(behind, ahead)
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
    """Return the survivals of the rows that may draft, and the probed lookups."""
    offered, probed = [], []
    for row, limit in zip(live, limits, strict=True):
        if limit <= 0:
            continue
        survivals = row.policy.survivals()
        for index in known.free:
            survivals[index], weights = known.survival(
                row.text, index, row.at, limit + behind
            )
            probed.append((row, index, row.at, weights))
        offered.append(survivals)
    return offered, probed
