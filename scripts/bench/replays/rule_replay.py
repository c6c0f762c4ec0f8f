"""Replays traces through the rule: exact, without a clock.

Rounds are those of a stream: lookups propose first, at no cost, and behind a plain step
that is in flight as well; models and heads forecast. A plain step submits the next one
unless a draft of a costly source is expected to follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.replays.replay import FIXED, Machine, Replayed, Text, run, texts_of
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.draft_length.rule import (
    BATCH_SHARE,
    Credit,
    DraftRule,
    Offer,
    Source,
)
from mlx_speculation.engine.lookup.survival import SurvivalRates

LONGEST = 16


@dataclass
class Known:
    """What a generator knows: shared by its streams."""

    costs: list[RoundCosts]
    rates: list[AcceptanceRates]
    credit: Credit = field(default_factory=Credit)
    lookups: SurvivalRates = field(default_factory=SurvivalRates)


def replay_rule(
    known: Known, free: Sequence[bool], machine: Machine, text: Text, found: Replayed
) -> None:
    """Generate a text, and add what came of it."""
    sources = [
        Source(costs, free=own) for costs, own in zip(known.costs, free, strict=True)
    ]
    rates = [each.loosened() for each in known.rates]
    rule = DraftRule(sources, known.credit, LONGEST)
    at, behind, rounds = 0, False, 0
    while at < len(text):
        budget, context = len(text) - at, text.context + at
        limit = budget - 1 - behind
        offers, costly, buckets = [], [], {}
        for index, source in enumerate(sources):
            if not source.free:
                costly.append(Offer(source, [rates[index].survival(LONGEST + 1)]))
            elif text.found[index][at]:
                count = int(text.found[index][at])
                survival, own = known.lookups.survival(count, 0, [(0, 0)] * count, None)
                offers.append(Offer(source, [survival]))
                buckets[index] = own
        offers += costly
        plan = rule.choose(context, limit, offers, behind=behind)
        drafted = accepted = 0
        if plan.length:
            index = sources.index(plan.source)
            drafted = min(int(text.found[index][at]) - behind, plan.length)
            right = int(text.right[index][at])
        if drafted > 0:
            accepted = min(max(0, right - behind), drafted)
            emitted, ahead = accepted + 1 + behind, False
            steps = machine.rounds[index][drafted] + machine.left * behind
            rates[index].note(drafted, min(accepted, emitted))
        else:
            drafted, emitted = 0, 1
            ahead = limit + behind > 1 and not rule.expects(
                context + 1, limit - 1, costly
            )
            steps = machine.left if behind else machine.cold
            steps += (1.0 - machine.left) * ahead
        emitted = min(emitted, budget)
        observed = steps * machine.noise[rounds % len(machine.noise)]
        feedback = Feedback(drafted, min(accepted, emitted), observed, behind, ahead)
        rule.note(context, plan, feedback)
        for index, own in buckets.items():
            right = min(int(text.right[index][at]), emitted)
            known.lookups.note(own[:emitted], right)
        if found.decisions is not None:
            found.decisions.append((plan, feedback))
        at, rounds, behind = at + emitted, rounds + 1, ahead
        found.steps += steps
        found.tokens += emitted
    rule.end()
    known.rates = rates


@dataclass(frozen=True)
class Judged:
    """A group of texts under the rule, beside plain decoding and the best of all."""

    group: str
    own: Replayed
    plain: float
    least: float
    best: str

    @property
    def over_plain(self) -> float:
        """The rule's speed over that of plain decoding."""
        return self.plain / self.own.steps

    @property
    def over_best(self) -> float:
        """The rule's speed over that of the best single source and fixed length."""
        return self.least / self.own.steps


def judged(
    traces: dict[str, np.ndarray],
    pairs: Sequence[str],
    machine: Machine,
    tokens: int,
    *,
    explain: bool = False,
) -> Iterator[Judged]:
    """Replay each group as the requests of a generator that knows nothing at first."""
    free = ["lookup" in pair for pair in pairs]
    for group, texts in texts_of(traces, pairs).items():
        fixed: dict[str, float] = {}
        for index, pair in enumerate(pairs):
            single = [
                Text(one.context, (one.right[index],), (one.found[index],))
                for one in texts
            ]
            alone = Machine([machine.rounds[index]], machine.left, machine.cold)
            for length in FIXED:
                steps = run(
                    partial(FixedDraftLength, length), alone, single, tokens
                ).steps
                fixed[f"{pair} {length}" if length else "plain"] = steps
        count = len(pairs)
        known = Known(
            [RoundCosts() for _ in range(count)],
            [AcceptanceRates() for _ in range(count)],
        )
        own = Replayed(decisions=[] if explain else None)
        for text in texts:
            for request in text.requests(tokens):
                replay_rule(known, free, machine, request, own)
        best = min(fixed, key=lambda name: fixed[name])
        yield Judged(group, own, fixed["plain"], fixed[best], best)


def replay_batch(
    known: Known,
    free: Sequence[bool],
    machine: Machine,
    texts: Sequence[Text],
    found: Replayed,
) -> None:
    """Generate texts as one batch: all requests are fed the same width.

    A round costs what `machine` says in plain steps of the requests that are left, and
    these as many plain steps of the whole batch as is their share: the device is busy.
    """
    sources = [
        Source(costs, free=own) for costs, own in zip(known.costs, free, strict=True)
    ]
    rule = DraftRule(sources, known.credit, LONGEST, share=BATCH_SHARE)
    rates = [[each.loosened() for each in known.rates] for _ in texts]
    at, behind = [0] * len(texts), False
    while live := [r for r, text in enumerate(texts) if at[r] < len(text)]:
        offers, proposed = [], []
        for index, source in enumerate(sources):
            survival = []
            for r in live:
                own: list[int] = []
                if source.free:
                    count = int(texts[r].found[index][at[r]])
                    shares = [(0, 0)] * count
                    chances, own = known.lookups.survival(count, 0, shares, None)
                else:
                    chances = rates[r][index].survival(LONGEST + 1)
                survival.append(chances)
                proposed.append((r, index, own))
            offers.append(Offer(source, survival))
        room = max(len(texts[r]) - at[r] for r in live) - 1 - behind
        context = max(texts[r].context + at[r] for r in live)
        plan = rule.choose(context, room, offers, behind=behind)
        index = sources.index(plan.source) if plan.length else 0
        emitted, widths, right = {}, [], []
        for r in live:
            left = len(texts[r]) - at[r]
            drafted = accepted = 0
            if plan.length:
                most = min(
                    int(texts[r].found[index][at[r]]) - behind, left - 1 - behind
                )
                drafted = max(0, min(plan.length, most))
                accepted = min(
                    max(0, int(texts[r].right[index][at[r]]) - behind), drafted
                )
                rates[r][index].note(drafted, accepted)
            widths.append(drafted)
            right.append(accepted)
            emitted[r] = min(left, accepted + 1 + (behind and plan.length > 0))
        width, mean = max(widths), sum(right) / len(live)
        if width:
            steps, ahead = machine.rounds[index][width] + machine.left * behind, False
        else:
            emitted = dict.fromkeys(live, 1)
            costly = [offer for offer in offers if not offer.source.free]
            ahead = room > 0 and not rule.expects(context + 1, room - 1, costly)
            steps = machine.left if behind else machine.cold
            steps += (1.0 - machine.left) * ahead
        rule.note(context, plan, Feedback(width, mean, steps, behind, ahead))
        for r, index, own in proposed:
            hits = min(int(texts[r].right[index][at[r]]), emitted[r])
            known.lookups.note(own[: emitted[r]], hits)
        for r in live:
            at[r] += emitted[r]
        behind = ahead
        found.steps += steps * len(live) / len(texts)
        found.tokens += sum(emitted.values())
    rule.end()
    for index in range(len(sources)):
        known.rates[index] = rates[0][index]
