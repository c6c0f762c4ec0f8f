"""The draft length with the most tokens per second, by measured costs and acceptance.

    speed(k) = (1 + r0 + r0 r1 + ... + r0 ... r(k-1)) / seconds(k)

Every k is searched, since cost goes in steps. Where plain decoding is the fastest, or
nearly so, drafting is paused, and tried again now and then for a round, and on while
all that is drafted is right. What such trials cost beside plain decoding, catching up
of a draft's caches included, stays below a share of the time and an allowance of each
stream; so it is when drafting pays little and the plain step is measured again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.base import Option, Outcome, Plan, Reason
from mlx_speculation.engine.draft_length.costs import RoundCosts, stop_of
from mlx_speculation.engine.draft_length.exploration import Allowance, PlainRun
from mlx_speculation.engine.drafters.early_stop import Certainties
from mlx_speculation.models import row_size

# Up to here every length is measured, beyond it every fourth.
SHORT = 8
# The share of the time that may go into trials, beside the allowance of a stream.
TRIAL_SHARE = 0.015
# What a draft has to gain over plain decoding, when all of it is accepted, to be used
# or tried. With less there is little to gain, and costs are not known that well: where
# rows cost what steps do, drafts seem to gain a tenth by what was measured in a lucky
# moment. In simulated streams of 320 tokens on such a machine (noise of 12 %, drifts of
# 15 %) adaptive lengths lose 2 to 3.7 % with 1.05, 1 with 1.1, and 0.6 with this.
LEAST_GAIN = 1.15
# What a draft has to gain to be preferred to plain steps: the best of many lengths is
# one whose measurements were lucky. In simulated streams with noisy clocks, a draft
# that is right and costs a tenth more than it saves loses 3.3 % so, and 4.7 without.
PLAIN_SURE = 1.03
# What was learnt counts for so many rounds in a new stream, and in a trial. Fewer
# follow another text sooner, more are paused by bad luck less often. In simulated
# streams of 192 tokens (5 machines, 9 texts, with the rates of another text or none)
# it loses 2.6 % to the best length, and 3.3 with 3.0, `INHERITED` 2.0, `GUESSED` 1.0
# and 32 `REVIEW_ROUNDS`.
KNOWN_WEIGHT = 1.5
TRIAL_WEIGHT = 4.0
FEW_STEPS = 64  # steps that a draft has missed, and reads for next to nothing
# A stream whose drafts were the best in fewer rounds has tried in vain: in a batch, one
# of many rows that is lucky at its end is such a case.
DRAFTED_SHARE = 1 / 8
# Where so many rounds tell of acceptance, a length is measured only if it pays with
# rates that are higher by so much.
WELL_KNOWN = 20.0
HOPED = 0.1
# Rounds until another length that is nearly as good is measured again, and how near.
REVIEW_ROUNDS = 64
REVIEW_SPEED = 0.75
# Rounds, of all streams, until the plain step is measured again if it would be the best
# were it so many times as fast: where it was measured in a bad moment, drafting would
# go on for good. In simulated streams of 1,000 tokens it costs 0.1 %.
PLAIN_REVIEW_ROUNDS = 256
PLAIN_REVIEW_SPEED = 3.0
# Of a run of plain steps the first and the last tell nothing, see `Outcome.steady`.
AT_ENDS = 2
# How many tell in a run that is measured by turns with other lengths.
PLAIN_RUN = 3
# Lengths are measured in this order, those between follow.
_MEASURED_FIRST = (0, 4, 1, 8, 2)


@dataclass(slots=True)
class _Run:
    """Rounds of one length, one after the other, to learn from."""

    length: int
    reason: Reason
    left: int


class AdaptiveLengths:
    """Decides the draft lengths of one stream."""

    def __init__(
        self,
        costs: RoundCosts,  # what rounds cost; shared by the streams of a generator
        # What drafts of the last stream were accepted; updated at the end
        rates: AcceptanceRates,
        longest: int,  # no draft is longer
        *,
        # Measure every length first, also those that cannot pay
        thorough: bool = False,
        few: bool = False,  # choose among few lengths, see `few_lengths`
        at_end: Callable[[], None] | None = None,  # called when the stream has ended
        # For trials; shared by the streams of a generator
        allowance: Allowance | None = None,
        # Let drafts end early where the drafter is unsure, by what these say; None:
        # they are as long as planned. Shared likewise.
        certainties: Certainties | None = None,
    ) -> None:
        self.costs, self.rates = costs, rates.loosened(KNOWN_WEIGHT)
        self._known = rates
        self.longest = longest
        self._thorough = thorough
        self._few = few
        self._at_end = at_end
        self._certainties = certainties
        self._run: _Run | None = None
        self._plain_run = PlainRun()
        self._begun = False
        self._allowance = allowance or Allowance()
        self._allowed = self._allowance.steps
        self._elapsed = 0.0
        self._spent = self._saved = 0.0
        self._tried = False
        self._drafting = False  # whether the drafter has read the prompt
        self._right = False  # whether the last round's draft was right to its end
        self._decided = self._drafted = 0  # rounds of the best length, and with drafts
        self._context = 0
        self._lag = 0  # plain steps that a draft has not read
        self._caught_up = 0  # of such steps, all that were read, and their seconds
        self._catch_up_seconds = 0.0
        self._since_review = 0

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next round's plan; see `DraftLengthPolicy`."""
        longest = min(limit, self.longest)
        if longest > 0 and (again := self._plain_run.next()) is not None:
            self._decided += 1
            return again
        self._learn_plain_run()
        if not self._begun:
            self._begun = True
            return Plan(0, "first")
        if longest <= 0:
            return Plan(0, "budget")
        if self._run is None or self._run.left <= 0:
            self._run = self._measurement(context, longest)
        if self._run is None:
            options = self._options(context, longest)
            plain, hopeful = options[0], _most_hopeful(options)
            # Drafts that end early gain more than options say.
            sure = PLAIN_SURE if self._certainties is None else 1.0
            best = hopeful if hopeful.speed > sure * plain.speed else plain
            if best.length:
                self._run = self._review(context, best, options)
            else:
                self._run = self._trial(context, plain, hopeful)
            if self._run is None:
                self._decided += 1
                if best.length:
                    self._drafted += 1
                    stop = stop_of(options, self._certainties)
                    length = best.length if stop is None else longest
                    return Plan(length, "best", tuple(options), stop=stop)
                return self._plain_run.begin(Plan(0, "plain", tuple(options)))
        self._run.left -= 1
        return Plan(min(self._run.length, longest), self._run.reason)

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Learn from a round; see `DraftLengthPolicy`."""
        if self._plain_run.keep(context, plan, outcome):
            self._lag, self._right = self._lag + 1, False
            return
        self._learn_plain_run()
        self._since_review += 1
        self._context = context
        self._elapsed += outcome.seconds
        self._right = 0 < outcome.drafted == outcome.accepted
        lag, self._lag = self._lag, 0 if outcome.drafted else self._lag + 1
        if outcome.reading:
            self.costs.note_reading(context, outcome.reading)
        self._drafting = self._drafting or bool(outcome.reading or outcome.drafted)
        if outcome.drafted:
            self.rates.note(outcome.drafted, outcome.accepted)
        if self._certainties is not None and outcome.certainties:
            self._certainties.note(outcome.certainties, outcome.accepted)
        if outcome.fresh:
            pass  # what it lost counts below, what it took tells nothing
        elif outcome.drafted and lag > 1 and not outcome.reading:
            self._note_catch_up(context, outcome, lag)
        elif outcome.steady or (outcome.drafted and not outcome.behind):
            self.costs.note(context, outcome.drafted, outcome.seconds)
        elif outcome.behind and not outcome.drafted:
            self.costs.note_left(context, outcome.seconds)
        elif outcome.behind and 0 in self.costs.lengths(context):
            own = outcome.seconds - self.costs.step_left(context)
            own = max(own, 0.1 * outcome.seconds)
            self.costs.note(context, outcome.drafted, own)
        if 0 in self.costs.lengths(context):
            self._count_gain(context, plan, outcome)

    def _learn_plain_run(self) -> None:
        """Learn from the plain steps since the last decision."""
        for context, seconds in self._plain_run.taken():
            self._since_review += 1
            self._context = context
            self._elapsed += seconds
            self.costs.note(context, 0, seconds)

    def use_costs(self, costs: RoundCosts) -> None:
        """Go on with other costs, and decide anew."""
        self._learn_plain_run()
        self._plain_run.stop()
        self.costs = costs

    def reconsider(self) -> None:
        """Decide anew in the next round: the rates are those of other rows."""
        self._plain_run.stop()

    def _count_gain(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Count what a trial has lost, and what a draft has saved, in seconds."""
        # Of a step in flight a part was computed in the round that submitted it.
        elsewhere = (1 - self.costs.left) * (outcome.behind - outcome.ahead)
        first = outcome.drafted > 0 and outcome.behind  # the step's own token
        emitted = outcome.accepted + 1 + first - elsewhere
        if plan.reason in ("trial", "review"):
            lost = (
                outcome.seconds + outcome.reading - emitted / self._best_speed(context)
            )
            self._spent += max(0.0, lost)
        elif plan.reason == "best" and outcome.drafted:
            plain = emitted * self.costs.seconds(context, 0)
            self._saved += plain - outcome.seconds

    def passed_over(self, tokens: int) -> None:
        """Take note that another drafter's round has committed so many tokens."""
        self._lag += tokens

    def end(self) -> None:
        """Leave what was learnt to the next stream."""
        self._learn_plain_run()
        self._known.take(self.rates)
        if self._elapsed and 0 in self.costs.lengths(self._context):
            left = TRIAL_SHARE * self._elapsed - self._spent
            left = self._allowed + left / self.costs.seconds(self._context, 0)
            drafted = self._drafted > DRAFTED_SHARE * self._decided
            saved = self._saved / self.costs.seconds(self._context, 0)
            self._allowance.end(left, drafted=drafted, tried=self._tried, saved=saved)
        if self._at_end is not None:
            self._at_end()

    def _note_catch_up(self, context: int, outcome: Outcome, lag: int) -> None:
        if outcome.drafted in self.costs.lengths(context):
            more = outcome.seconds - self.costs.seconds(context, outcome.drafted)
            self._catch_up_seconds += max(0.0, more)
            self._caught_up += lag

    def _options(self, context: int, longest: int) -> list[Option]:
        expected = self.rates.expected(longest)
        seconds = self.costs.curve(context, longest)
        if self._few:
            return [Option(n, expected[n], seconds[n]) for n in few_lengths(longest)]
        return list(map(Option, range(longest + 1), expected, seconds))

    def _best_speed(self, context: int) -> float:
        return max(o.speed for o in self._options(context, self.longest))

    def measured(self, context: int) -> bool:
        """Whether there is no length left to measure."""
        return self._measurement(context, self.longest) is None

    def progress(self, context: int) -> tuple[int, int]:
        """Return how many lengths are measured, in rounds, and how many there are."""
        costs, known = self.costs, self.costs.lengths(context)
        lengths = _to_measure(self.longest, few=self._few)
        done = sum(
            costs.needed(n) if n in known else costs.sampled(context, n)
            for n in lengths
        )
        return done, sum(map(costs.needed, lengths))

    def _measurement(self, context: int, longest: int) -> _Run | None:
        """Return rounds that measure a length whose cost is not known.

        Lengths take turns, so that none of them meets a busy machine alone, but for the
        plain step where not all are measured: it decides which of them are.
        """
        costs = self.costs
        known = costs.lengths(context)
        lengths = _to_measure(longest, few=self._few)
        missing = [n for n in lengths if n not in known]
        if missing and not self._thorough:
            if missing[0] == 0:
                return _Run(0, "measure", costs.needed(0) + AT_ENDS)
            seconds = costs.curve(context, longest)
            plain = seconds[0]
            missing = [n for n in missing if self._is_worth(n, seconds[n], plain)]
        if not missing:
            return None
        fewest = min(missing, key=lambda n: costs.sampled(context, n) / costs.needed(n))
        # The first may have to read what the draft has missed.
        rounds = 2 if fewest else PLAIN_RUN + AT_ENDS
        return _Run(fewest, "measure", rounds)

    def _is_worth(self, length: int, seconds: float, plain: float) -> bool:
        """Whether a length is worth its measurement."""
        if self.rates.tried < WELL_KNOWN:
            return may_pay(length, seconds, plain)
        tokens = reached = 1.0
        for rate in self.rates.rates(length):
            reached *= min(1.0, rate + HOPED)
            tokens += reached
        return tokens * plain > LEAST_GAIN * seconds

    def _trial(self, context: int, plain: Option, hopeful: Option) -> _Run | None:
        """Return a round with a draft where none is the best, if it may be lost."""
        if hopeful is plain:
            return None
        if self._right:
            return _Run(hopeful.length, "trial", 1)  # what is right loses nothing
        # A few steps are read for little, and would tell more of noise than of a rate.
        # What it really takes is in what was spent, so that too low a rate delays the
        # trial after this one, while too high a one would end all trials.
        rate = self._catch_up_seconds / (self._caught_up + FEW_STEPS)
        rate = min(rate, TRIAL_SHARE / 2 * plain.seconds)
        missed = self._lag * rate if self._drafting else context * self.costs.reading
        slower = hopeful.seconds - hopeful.tokens * plain.seconds
        lost = missed + plain.seconds + max(0.0, slower)
        saved = self._allowance.of_saved(self._saved / plain.seconds)
        allowed = (self._allowed + saved) * plain.seconds + TRIAL_SHARE * self._elapsed
        if self._spent + lost > allowed:
            return None
        self._tried = True
        self.rates = self.rates.loosened(TRIAL_WEIGHT)
        return _Run(hopeful.length, "trial", 1)

    def _review(self, context: int, best: Option, options: list[Option]) -> _Run | None:
        """Return rounds of a length that is nearly as good, the longest not measured.

        Its cost may be lower than it was, and nothing else would show it.
        """
        may_win = options[0].speed * PLAIN_REVIEW_SPEED > best.speed
        if may_win and self.costs.age(context, 0) >= PLAIN_REVIEW_ROUNDS:
            self.costs.reset(context, 0)
            return _Run(0, "review", self.costs.needed(0) + AT_ENDS)
        if self._since_review < REVIEW_ROUNDS:
            return None
        near = [
            option
            for option in options
            if option is not best and option.speed > REVIEW_SPEED * best.speed
        ]
        self._since_review = 0
        if not near:
            return None
        oldest = min(near, key=lambda o: self.costs.noted(context, o.length))
        rounds = 1 if oldest.length else 1 + AT_ENDS
        return _Run(oldest.length, "review", rounds)


def may_pay(length: int, seconds: float, plain: float) -> bool:
    """Whether a draft pays when every token of it is accepted."""
    return (length + 1) * plain > LEAST_GAIN * seconds


def _most_hopeful(options: list[Option]) -> Option:
    """Return the fastest draft that pays if it is right, or the plain step."""
    plain = options[0]
    paying = [o for o in options[1:] if may_pay(o.length, o.seconds, plain.seconds)]
    return max(paying, key=lambda option: option.speed, default=plain)


@cache
def few_lengths(longest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, 12, 16, ... up to a length: those of batches.

    Where the number of positions of a forward is new, the first one may be dear, see
    `models/shape_buckets.py`, and there are other lengths for each number of rows.
    """
    return (0, *(n for n in range(1, longest + 1) if row_size(n) == n))


@cache
def _to_measure(longest: int, *, few: bool) -> tuple[int, ...]:
    """Return the lengths whose costs are measured, in this order."""
    order = [*_MEASURED_FIRST, *range(1, SHORT + 1), *range(SHORT, longest + 1, 4)]
    chosen = few_lengths(longest) if few else range(longest + 1)
    return tuple(dict.fromkeys(length for length in order if length in chosen))
