"""The draft rule: the source and the length with the most expected tokens a second.

With survival s_i, the chance that tokens 1 to i are all accepted, n tokens bring

    E(n) = 1 + s_1 + ... + s_n        in T(n) seconds

of which the rule takes what is worth most over plain decoding: E(n) - rate x T(n), the
rate being the tokens a second that are usual. So a token is drafted while its survival
is at least the rate times the seconds of its row, and nothing where no token is.
Sources that propose for free have the survival of the proposal in hand; costly ones
forecast it. Several requests are fed the same width: the tokens of all of them count.

Unknown costs and forecasts are tried short, out of a credit of each source. It is
filled by what the source's drafts gain over plain steps, and pays for what they lose;
a source without credit rests until a share of the plain steps has filled it, and keeps
no other from drafting. So the drafts of a source cost no more than the first credit,
that share and the round that uses the credit up, but for rounds that take longer than
is usual.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from mlx_speculation.engine.draft_length.base import Compared, Feedback, Option, Plan
from mlx_speculation.engine.draft_length.costs import (
    RoundCosts,
    few_lengths,
    left_of_step,
)

# In plain steps: the credit at first, the most and the least of it, and what a plain
# step adds. A round that took ten times as long, on a busy machine, is made up for in
# 200 plain steps.
FIRST_CREDIT, MOST_CREDIT, LEAST_CREDIT = 4.0, 24.0, -3.0
SHARE = 0.015
# First credit, most credit and share of a batch. The gain of a round varies less there,
# and a job that begins with a loss may be over before it has made up for it.
BATCH_CREDIT = (0.6, 1.0, 0.01)
# What a draft gains over plain steps where all of it is right, if it is to be tried.
LEAST_GAIN = 1.2
# The first draft.
FIRST_LENGTH = 2
# A round counts for at most so many times what is usual.
SLOWEST = 2.0
# Plain steps between trials of a source; twice as many after each one in vain.
PAUSE, MOST_DOUBLED = 8, 4
# Drafted rounds until plain steps are measured again, and how many of them tell.
REVIEW_ROUNDS, REVIEW_STEPS = 128, 4
# Plain steps that the usual rate looks back on.
MEMORY = 500.0

# By token, the chance that it and those before it are accepted: of a free source as
# long as its proposal, empty without one.
Survival = Sequence[float]
# Of each request, that of each source.
Offered = Sequence[Sequence[Survival]]


@dataclass(slots=True)
class Credit:
    """Credit for drafts that lose against plain decoding, in plain steps.

    Attributes:
        first: of each source at first.
        most: of each source at most.
        share: what a plain step adds to all of them, in equal parts.
        steps: left to each source, by its index.
        tokens: of each request, in the rounds so far, the older ones counting less.
        spent: plain steps that those took.
    """

    first: float = FIRST_CREDIT
    most: float = MOST_CREDIT
    share: float = SHARE
    steps: defaultdict[int, float] = field(init=False)
    tokens: float = MEMORY / 10
    spent: float = MEMORY / 10

    def __post_init__(self) -> None:
        self.steps = defaultdict(lambda: self.first)

    @property
    def rate(self) -> float:
        """Tokens in the time of a plain step, at least the one that it brings."""
        return max(1.0, self.tokens / self.spent)

    def count(self, tokens: float, steps: float) -> None:
        """Count a round for the usual rate."""
        keep = 1 - min(0.5, steps / MEMORY)
        self.tokens = self.tokens * keep + tokens
        self.spent = self.spent * keep + steps

    def add(self, index: int, gain: float) -> None:
        """Add what a round of a source has gained or lost."""
        steps = min(self.steps[index] + gain, self.most)
        self.steps[index] = max(steps, LEAST_CREDIT)


@dataclass(slots=True)
class Source:
    """State of one source of drafts.

    Attributes:
        costs: seconds of rounds that it drafts in, by length.
        free: whether its proposals cost nothing, and are made before the rule chooses.
        name: the kind of its drafts.
        pause: rounds until it may be tried again.
        vain: trials in a row that were in vain.
        lag: tokens that it has not read.
        reading: plain steps that it has read the prompt for.
        gained: plain steps that its drafts have gained.
        index: its place among the sources of a rule.
    """

    costs: RoundCosts
    free: bool = False
    name: str = "draft"
    pause: int = 0
    vain: int = 0
    lag: float = 0.0
    reading: float = 0.0
    gained: float = 0.0
    index: int = 0


class DraftRule:
    """Chooses the source and the length of each round, of one request or of several.

    Args:
        sources: what is known of each; costs are shared by the streams of a generator.
        credit: of each source; shared likewise.
        longest: no draft is longer.
    """

    def __init__(self, sources: Sequence[Source], credit: Credit, longest: int) -> None:
        self.sources, self.credit, self.longest = list(sources), credit, longest
        for index, source in enumerate(self.sources):
            source.index = index
        # Whether it chooses when the free proposals are there
        self.late = len(self.sources) > 1 or any(one.free for one in self.sources)
        self._measure = 1  # plain steps that are decided already
        self._since_plain = 0  # drafted rounds since a plain step was measured
        self._cold = 0.0  # seconds of a step that was not in flight, and submits one

    def plan(self, context: int, limit: int, forecasts: Callable[[], Offered]) -> Plan:
        """Plan by forecasts, or the most, where it is chosen late; see `choose`."""
        if not self.late or self.measures(context):
            return self.choose(context, limit, forecasts())
        longest = min(limit, self.longest)
        return Plan(longest, "free") if longest > 0 else Plan(0, "budget")

    def choose(
        self, context: int, limit: int, offered: Offered, *, behind: bool = False
    ) -> Plan:
        """Return the next round's plan.

        Args:
            context: how many tokens the target's caches hold.
            limit: the most tokens that may be drafted.
            offered: the drafts that can be made.
            behind: whether a plain step is in flight.
        """
        longest, plain = min(limit, self.longest), self.plain(context)
        if longest <= 0:
            return Plan(0, "budget")
        if plain is None or self.measures(context):
            self._measure = max(0, self._measure - 1)
            return Plan(0, "measure")
        return self._decided(context, longest, offered, plain, behind)

    def expects(self, context: int, offered: Offered) -> bool:
        """Return whether one of these would be taken up, if no step were in flight."""
        plain = self.plain(context)
        if plain is None or self.measures(context):
            return False
        return self._decided(context, self.longest, offered, plain, False).length > 0

    def measures(self, context: int) -> bool:
        """Return whether a plain step is due that tells what drafts have to gain."""
        if self._since_plain >= REVIEW_ROUNDS:
            self._since_plain, self._measure = 0, REVIEW_STEPS
        return self._measure > 0 or self.plain(context) is None

    def _decided(
        self,
        context: int,
        longest: int,
        offered: Offered,
        plain: float,
        behind: bool,
    ) -> Plan:
        """Return the plan that is worth most, or tells most."""
        rate = self.credit.rate / plain
        judged = [
            self._judged(
                context, source, _mean(offered, source, longest + behind), plain, behind
            )
            for source in sorted(self.sources, key=lambda source: not source.free)
        ]
        known = (tuple(judged), plain)
        best, worth = Plan(0, "plain", None, *known), 1.0 - rate * plain
        trial: Plan | None = None
        for each in judged:
            if not each.options or each.credit <= 0:
                continue
            source = each.source
            option = max(each.options, key=lambda option: option.worth(rate))
            if option.worth(rate) > worth:
                best = Plan(option.length, "best", source, *known)
                worth = option.worth(rate)
            elif not source.free and trial is None and source.pause <= 0:
                option = max(each.options, key=lambda option: option.speed)
                unread = 0.0 if source.reading else context * source.costs.reading
                if each.credit >= (option.seconds + unread) / plain - 1:
                    trial = Plan(option.length, "trial", source, *known)
        return best if best.length or trial is None else trial

    def _judged(
        self,
        context: int,
        source: Source,
        survival: list[float],
        plain: float,
        behind: bool,
    ) -> Compared:
        """Return the lengths that may pay, and that the credit pays for if they do not.

        Half of the first credit may be lost in one round while any is left: where all
        rounds are dear, a credit that is spent in part would end them for good. Drafts
        grow to twice the longest measured one; a free one costs at most what a costly
        one of its length does. Behind a plain step its token counts, and the first
        drafted one stands for it.
        """
        tokens = [*accumulate(survival[behind:], initial=1.0 + behind)]
        known = [source.costs]
        if source.free:
            known += [each.costs for each in self.sources]
        measured = max(costs.longest() for costs in known)
        reach = min(len(tokens) - 1, max(FIRST_LENGTH, 2 * measured))
        curves = [
            costs.curve(context, reach, plain)
            for costs in known
            if costs is known[0] or costs.longest() > known[0].longest()
        ]
        left = left_of_step(plain, self._cold) if behind else 0.0
        credit = self.credit.steps[source.index]
        most = max(credit, self.credit.first / 2)  # steps that a round may lose
        result = []
        for n in sorted({*few_lengths(reach), reach} - {0}):
            seconds = min(curve[n] for curve in curves)
            over = seconds / plain
            if n + 1 >= LEAST_GAIN * over and over - 1 <= most:
                result.append(Option(n, tokens[n], seconds + left))
        return Compared(source, survival, tuple(result), credit)

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step; None: not known yet."""
        return self.sources[0].costs.plain(context)

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a round, which is committed by now. Must not raise."""
        source = plan.source
        if not feedback.drafted or source is None:
            self._note_plain(context, feedback)
            return
        lag, source.lag = source.lag, 0.0
        for other in self.sources:
            if other is not source:
                other.lag += feedback.accepted + 1
                other.pause -= 1
        self._since_plain += 1
        if plan.reason == "trial":
            right = feedback.drafted == feedback.accepted
            source.vain = 0 if right else min(source.vain + 1, MOST_DOUBLED)
            source.pause = (PAUSE << source.vain) + 1 if source.vain else 0
        plain = self.plain(context)
        if plain is None:
            return
        costs = source.costs
        if feedback.reading:
            costs.reading = feedback.reading / max(1, context)
            source.reading = feedback.reading / plain
        seconds = feedback.seconds
        if feedback.behind:
            seconds -= left_of_step(plain, self._cold)
        knows = costs.knows(context, feedback.drafted)
        if not feedback.fresh and (lag <= 1 or not knows):
            costs.note(context, feedback.drafted, max(seconds, 0.1 * plain))
        # A machine that was busy for a moment tells nothing of drafts.
        usual = costs.curve(context, feedback.drafted, plain)[-1]
        steps = min(seconds, SLOWEST * usual) / plain
        gain = feedback.accepted + 1 - steps
        source.gained += gain
        self.credit.add(source.index, gain)
        self.credit.count(feedback.accepted + 1, steps)

    def _note_plain(self, context: int, feedback: Feedback) -> None:
        for source in self.sources:
            source.lag += 1
            source.pause -= 1
        if feedback.steady:
            self._since_plain = 0
            share = self.credit.share / len(self.sources)
            for source in self.sources:
                self.credit.add(source.index, share)
            self.credit.count(1, 1)
        if feedback.ahead and not feedback.fresh:
            if feedback.behind:
                for source in self.sources:
                    source.costs.note(context, 0, feedback.seconds)
            else:
                self._cold = feedback.seconds

    def end(self) -> None:
        """Pay for prompts that were read in vain."""
        for source in self.sources:
            vain = source.reading - max(0.0, source.gained)
            self.credit.add(source.index, -max(0.0, vain))


def _mean(offered: Offered, source: Source, longest: int) -> list[float]:
    """Return the mean survival of a source's drafts over the requests."""
    each = [survivals[source.index][:longest] for survivals in offered]
    return [sum(column) / len(each) for column in zip_longest(*each, fillvalue=0.0)]
