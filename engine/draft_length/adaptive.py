"""Adaptive draft length: the most tokens per second, without losing to plain decoding.

    speed(k) = (1 + r0 + r0 r1 + ... + r0 ... r(k-1)) / seconds(k)

Drafts begin short: only lengths up to twice the longest measured one are options.
Where plain steps are the fastest, a draft is tried now and then, for a round and on
while all of it is right. What drafts lose against plain steps is paid out of a credit,
which is filled by what they gain; without credit there are plain steps until a share of
their time has filled it. So drafts cost no more than the first credit, that share and
the round that uses the credit up, but for rounds that take longer than is usual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.base import Feedback, Option, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts, left_of_step
from mlx_speculation.models import row_size

# In plain steps: the credit at first, the most of it, the least after rounds that took
# longer than usual, and what a plain step adds. A round that took ten times as long, on
# a busy machine, is made up for in 200 plain steps.
FIRST_CREDIT, MOST_CREDIT, LEAST_CREDIT = 2.0, 24.0, -3.0
SHARE = 0.015
# What a draft gains over plain steps where all of it is right, if it is to be tried.
LEAST_GAIN = 1.1
# The first draft.
FIRST_LENGTH = 2
# A round counts for at most so many times what is usual.
SLOWEST = 2.0
# Of so many rounds one drafts more than is best: nothing else tells of later tokens.
LONGER_ROUNDS = 12
# Plain steps after a decision for them; twice as many after each trial in vain.
PAUSE, MOST_DOUBLED = 8, 3
# Drafted rounds until plain steps are measured again, and how many of them tell.
REVIEW_ROUNDS, REVIEW_STEPS = 128, 4


@dataclass(slots=True)
class Credit:
    """What drafts may lose against plain decoding, in plain steps."""

    steps: float = FIRST_CREDIT

    def add(self, gain: float, usual: float = 0.0) -> None:
        """Add what a round has gained or lost.

        What it would have lost in its usual time counts whole; the rest does not lead
        below `LEAST_CREDIT`.
        """
        least = min(LEAST_CREDIT, self.steps + usual)
        self.steps = max(least, min(self.steps + gain, MOST_CREDIT))


class AdaptiveDraftLength:
    """Decides the draft lengths of one stream, or of all rows of a batch.

    Args:
        costs: what rounds cost; shared by the streams of a generator.
        rates: what was accepted, of earlier streams at first.
        credit: shared likewise.
        share: what a plain step adds to it.
        longest: no draft is longer.
        at_end: called with the rates when the stream has ended.
    """

    by_batch = True

    def __init__(
        self,
        costs: RoundCosts,
        rates: AcceptanceRates,
        credit: Credit,
        longest: int,
        *,
        share: float = SHARE,
        at_end: Callable[[AcceptanceRates], None] | None = None,
    ) -> None:
        self.costs, self.credit, self.longest = costs, credit, longest
        self.rates, self._share = rates, share
        self._at_end = at_end
        self._begun = False
        self._pause = 0  # plain steps that are decided already
        self._paused = Plan(0, "plain")
        self._vain = 0  # trials in a row that were in vain
        self._right = False  # whether the last draft was right to its end
        self._lag = 0.0  # tokens that the drafter has not read
        self._drafts = 0  # rounds with drafts
        self._since_plain = 0  # drafted rounds since a plain step was measured
        self._reading = 0.0  # plain steps that the drafter has read the prompt for
        self._gained = 0.0  # plain steps that drafts have gained
        self._cold = 0.0  # seconds of a step that was not in flight, and submits one

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next round's plan; see `DraftLengthPolicy`."""
        longest = min(limit, self.longest)
        if longest <= 0:
            return Plan(0, "budget")
        if self._pause > 0:
            self._pause -= 1
            return self._paused
        if not self._begun or self.costs.plain(context) is None:
            self._begun = True
            return Plan(0, "measure")
        if self._since_plain >= REVIEW_ROUNDS:
            return self._plain(Plan(0, "measure"), REVIEW_STEPS)
        options = self._options(context, longest)
        plain, credit = options[0], self.credit.steps
        measured = self.costs.longest(context)
        paying = [
            option
            for option in options
            if option.length + 1 >= LEAST_GAIN * option.over(plain)
            and (option.length <= measured or option.over(plain) - 1 <= credit)
        ]
        draft = max(paying, key=lambda option: option.speed, default=plain)
        if draft.speed > plain.speed and credit > 0:
            longer = [o.length for o in options if o.length > draft.length]
            if longer and self._drafts % LONGER_ROUNDS == LONGER_ROUNDS - 1:
                return Plan(longer[0], "longer", options, credit)
            return Plan(draft.length, "best", options, credit)
        if draft.length and (self._right or self._may_try(context, plain, draft)):
            return Plan(draft.length, "trial", options, credit)
        return self._plain(Plan(0, "plain", options, credit), PAUSE)

    def _plain(self, plan: Plan, steps: int) -> Plan:
        """Return a plan that holds for the steps after this one too."""
        self._paused, self._pause = plan, steps - 1
        return plan

    def _options(self, context: int, longest: int) -> tuple[Option, ...]:
        """Return the lengths to choose from, 0 the first."""
        reach = max(FIRST_LENGTH, 2 * self.costs.longest(context))
        lengths = few_lengths(min(longest, reach))
        tokens = self.rates.expected(lengths[-1])
        seconds = self.costs.curve(context, lengths[-1])
        return tuple(Option(n, tokens[n], seconds[n]) for n in lengths)

    def _may_try(self, context: int, plain: Option, draft: Option) -> bool:
        """Whether there is credit for a draft that is not expected to pay."""
        reading = 0.0 if self._reading else context * self.costs.reading
        return self.credit.steps >= draft.over(plain) - 1 + reading / plain.seconds

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a round; see `DraftLengthPolicy`."""
        if not feedback.drafted:
            self._note_plain(context, feedback)
            return
        lag, self._lag = self._lag, 0
        self._since_plain += 1
        self._drafts += 1
        self._right = feedback.drafted == feedback.accepted
        self.rates.note(feedback.drafted, feedback.accepted)
        if plan.reason == "trial":
            self._vain = 0 if self._right else min(self._vain + 1, MOST_DOUBLED)
            if self._vain:
                self._plain(Plan(0, "plain"), (PAUSE << self._vain) + 1)
        plain = self.costs.plain(context)
        if plain is None:
            return
        if feedback.reading:
            self.costs.reading = feedback.reading / max(1, context)
            self._reading = feedback.reading / plain
        seconds = feedback.seconds
        if feedback.behind:
            seconds -= left_of_step(plain, self._cold)
        knows = self.costs.knows(context, feedback.drafted)
        if not feedback.fresh and (lag <= 1 or not knows):
            self.costs.note(context, feedback.drafted, max(seconds, 0.1 * plain))
        # A machine that was busy for a moment tells nothing of drafts.
        usual = self.costs.curve(context, feedback.drafted)[-1]
        gain = feedback.accepted + 1 - min(seconds, SLOWEST * usual) / plain
        self._gained += gain
        self.credit.add(gain, feedback.accepted + 1 - usual / plain if knows else 0.0)

    def _note_plain(self, context: int, feedback: Feedback) -> None:
        self._lag += 1
        self._right = False
        if feedback.steady:
            self._since_plain = 0
            self.credit.add(self._share)
        if feedback.ahead and not feedback.fresh:
            if feedback.behind:
                self.costs.note(context, 0, feedback.seconds)
            else:
                self._cold = feedback.seconds

    def decide_anew(self) -> None:
        """Let the next round be decided: rows of a batch have come or gone."""
        self._pause = 0

    def end(self) -> None:
        """Leave what was learnt to the next stream."""
        self.credit.add(-max(0.0, self._reading - max(0.0, self._gained)))
        if self._at_end is not None:
            self._at_end(self.rates)


@cache
def few_lengths(longest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, ... up to a length; see `models/shape_buckets.py`."""
    return (0, *(n for n in range(1, longest + 1) if row_size(n) == n))
