"""The draft rule: picks the source of drafts and the draft length of each round.

The survival s_i is the probability that tokens 1 to i of a draft are all accepted. A
round with n drafted tokens is expected to commit

    E(n) = 1 + s_1 + ... + s_n        tokens in T(n) seconds

The rule maximizes E(n) - rate x T(n), where the rate is the usual number of tokens per
second. In a batch, which has one draft length, E(n) is the mean over the requests.

Each source has a credit, counted in plain steps. A round adds its gain over plain steps
to the credit of its source, or subtracts its loss; a plain step adds a small share to
all credits. A source without credit rests. Thus the drafts of a source lose at most the
first credit, these shares, and the loss of one more round.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from mlx_speculation.engine.draft_length.base import Compared, Feedback, Option, Plan
from mlx_speculation.engine.draft_length.costs import Source, few_lengths

# Credits, and the share that each plain step adds, all in plain steps.
FIRST_CREDIT, MOST_CREDIT, LEAST_CREDIT = 4.0, 24.0, -3.0
SHARE = 0.015
# First, most and share of a batch: small, since it may end before it regains a loss.
BATCH_CREDIT = (0.6, 1.0, 0.01)
LEAST_GAIN = 1.2  # least speed of a fully accepted draft, relative to plain steps
FIRST_LENGTH = 2  # the longest draft before any is measured
SLOWEST = 2.0  # a round's seconds count as at most this many times the usual ones
# After this many rounds with drafts, this many plain steps are measured again.
REVIEW_ROUNDS, REVIEW_STEPS = 128, 4
MEMORY = 500.0  # the usual rate is an average over about this many plain steps

Survival = Sequence[float]  # of each token that a source offers; can be empty
Offers = Sequence[Sequence[Survival]]  # for each request, one for each source


@dataclass(slots=True)
class Credit:
    """The credit of each source, in plain steps, and the usual rate of tokens."""

    first: float = FIRST_CREDIT
    most: float = MOST_CREDIT
    share: float = SHARE  # added by a plain step, divided among the sources
    steps: defaultdict[int, float] = field(init=False)  # by the index of the source
    # Tokens per request in the rounds so far, of which older ones count less
    tokens: float = MEMORY / 10
    spent: float = MEMORY / 10  # the duration of these rounds in plain steps

    def __post_init__(self) -> None:
        self.steps = defaultdict(lambda: self.first)

    @property
    def rate(self) -> float:
        """The usual number of tokens in the time of a plain step, at least 1."""
        return max(1.0, self.tokens / self.spent)

    def count(self, tokens: float, steps: float) -> None:
        """Count a round's tokens, and its time in plain steps, for the usual rate."""
        keep = 1 - min(0.5, steps / MEMORY)
        self.tokens = self.tokens * keep + tokens
        self.spent = self.spent * keep + steps

    def add(self, index: int, gain: float) -> None:
        """Add the gain of a round, which may be negative, to a source's credit."""
        steps = min(self.steps[index] + gain, self.most)
        self.steps[index] = max(steps, LEAST_CREDIT)


class DraftRule:
    """Chooses the source and the length of each round of a stream or a batch."""

    def __init__(self, sources: Sequence[Source], credit: Credit, longest: int) -> None:
        self.sources, self.credit, self.longest = sources, credit, longest
        # Whether the rule decides after free sources have proposed
        self.late = len(sources) > 1 or any(one.free for one in sources)
        self._measure = 1  # plain steps to measure before the next draft
        self._since_plain = 0  # rounds with drafts since a plain step was measured
        # Seconds of a plain step that began with no step in flight and submitted the
        # next one; 0: not known
        self._cold = 0.0
        self._unread = True  # whether the drafters have yet to read the prompt

    def choose(
        self, context: int, limit: int, offers: Offers | None, *, behind: bool = False
    ) -> Plan:
        """Return the next round's plan; `behind`: whether a plain step is in flight.

        `offers` None: free sources have yet to propose.
        """
        longest = min(limit, self.longest)
        if longest <= 0:
            return Plan(0, "budget")
        if self._measures(context):
            self._measure = max(0, self._measure - 1)
            return Plan(0, "measure")
        if offers is None:
            return Plan(longest, "free")
        return self._best(context, longest, offers, behind)

    def expects(self, context: int, offers: Offers) -> bool:
        """Return whether the rule would choose a draft if no step were in flight."""
        if self._measures(context):
            return False
        return self._best(context, self.longest, offers, False).length > 0

    def _measures(self, context: int) -> bool:
        """Return whether the next round has to be a plain step, to measure its cost."""
        if self._since_plain >= REVIEW_ROUNDS:
            self._since_plain, self._measure = 0, REVIEW_STEPS
        return self._measure > 0 or self._plain(context) is None

    def _best(self, context: int, longest: int, offers: Offers, behind: bool) -> Plan:
        """Return the plan that is worth most, or a trial if no draft pays."""
        plain = self._plain(context)
        assert plain is not None
        sources = self._judged(context, longest, offers, plain, behind)
        judged = tuple(sorted(sources, key=lambda each: not each.free))
        allowed = [each for each in judged if each.credit > 0 and each.options]
        step: tuple[Compared | None, Option] = None, Option(0, 1.0, plain)
        pairs = [(each, option) for each in allowed for option in each.options]
        rate = self.credit.rate / plain
        best, option = max(
            [step, *pairs], key=lambda pair: pair[1].tokens - rate * pair[1].seconds
        )
        if best is not None:
            return Plan(option.length, "best", best, judged, plain)
        for each in allowed:
            option = max(each.options, key=lambda option: option.speed)
            reading = self.sources[each.index].costs.reading * self._unread
            lost = (option.seconds + context * reading) / plain - 1
            if not each.free and lost <= each.credit:
                return Plan(option.length, "trial", each, judged, plain)
        return Plan(0, "plain", compared=judged, seconds=plain)

    def _judged(
        self, context: int, longest: int, offers: Offers, plain: float, behind: bool
    ) -> Iterator[Compared]:
        """Yield each source, with the lengths that may pay and that its credit allows.

        A length is at most twice the longest measured one. For a free source, the costs
        measured with other sources count too, as upper bounds. If a plain step is in
        flight, its token counts too, and the first drafted token guesses it.
        """
        left = self._left_of_step(plain) if behind else 0.0
        for index, source in enumerate(self.sources):
            rows = [survivals[index][: longest + behind] for survivals in offers]
            columns = zip_longest(*rows, fillvalue=0.0)
            survival = [sum(column) / len(rows) for column in columns]
            tokens = [*accumulate(survival[behind:], initial=1.0 + behind)]
            credit, reached = self.credit.steps[index], source.costs.longest()
            known = [one.costs for one in self.sources if source.free or one is source]
            measured = max(costs.longest() for costs in known)
            reach = min(len(tokens) - 1, max(FIRST_LENGTH, 2 * measured))
            curves = [
                costs.curve(context, reach, plain)
                for costs in known
                if costs is source.costs or costs.longest() > reached
            ]
            options = []
            for n in sorted({*few_lengths(reach), reach} - {0}):
                seconds = min(curve[n] for curve in curves)
                over = seconds / plain
                if n + 1 >= LEAST_GAIN * over and over - 1 <= credit:
                    options.append(Option(n, tokens[n], seconds + left))
            name, free = source.name, source.free
            yield Compared(name, index, free, survival, tuple(options), credit)

    def _plain(self, context: int) -> float | None:
        """Return the seconds of a plain step; None: not measured yet."""
        return self.sources[0].costs.plain(context)

    def _left_of_step(self, plain: float) -> float:
        """Return the seconds that a step in flight still needs when a round begins."""
        # Two steps take 2 * plain, and `_cold` of that has passed when the first ends.
        # A CPU computes steps while submitting them, so there nothing is left.
        return min(plain, max(0.0, 2 * plain - self._cold)) if self._cold else plain

    def learn(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a committed round. Must not raise."""
        if not feedback.drafted or plan.source is None:
            usual_time = feedback.ahead and not feedback.fresh
            if feedback.steady:
                self._since_plain = 0
                for index in range(len(self.sources)):
                    self.credit.add(index, self.credit.share / len(self.sources))
                self.credit.count(1, 1)
            if usual_time and not feedback.behind:
                self._cold = feedback.seconds
            elif usual_time:
                for source in self.sources:
                    source.costs.note(context, 0, feedback.seconds)
            return
        self._since_plain += 1
        plain, index = self._plain(context), plan.source.index
        if plain is None:
            return
        costs, gain = self.sources[index].costs, 0.0
        if feedback.reading:
            self._unread, costs.reading = False, feedback.reading / max(1, context)
            gain -= feedback.reading / plain if plan.reason == "trial" else 0.0
        seconds = feedback.seconds
        if feedback.behind:
            seconds -= self._left_of_step(plain)
        if not feedback.fresh:
            costs.note(context, feedback.drafted, max(seconds, 0.1 * plain))
        # Limited, so that a round on a busy machine does not use up the credit
        usual = costs.curve(context, feedback.drafted, plain)[-1]
        steps = min(seconds, SLOWEST * usual) / plain
        self.credit.add(index, gain + feedback.accepted + 1 - steps)
        self.credit.count(feedback.accepted + 1, steps)
