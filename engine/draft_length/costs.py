"""What a round costs, by the number of drafted tokens and the length of the context.

Only ratios decide a draft length, so a machine that becomes slower as a whole changes
nothing. An observed time therefore moves a factor that all costs share, and the cost
of its own length a little:

    ratio = observed / expected, at most LARGEST_CHANGE either way
    own   = own * ratio ** own share, which makes it a mean of what was seen, and is
            large after a long time without one and never below SLOWEST
    all   = all * ratio ** SHARED, of which costs that were seen a few times move a
            part: of those the luck in their first rounds is the likelier reason

Were it not for that, a length that was measured in a lucky moment would make plain
steps look dearer round by round, and stay the best.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from statistics import median

from mlx_speculation.engine.draft_length.base import Option
from mlx_speculation.engine.drafters.early_stop import Certainties, Stop

SAMPLES = 3
LARGEST_CHANGE = 1.5
SHARED = 0.1
SLOWEST = 0.03
# Of what is seen to be left of a step in flight, what counts once ten were seen.
LEFT_SHARE = 0.1
# Contexts up to here cost about the same; beyond it every doubling is a bucket.
SHORT_CONTEXT = 512
# Where only plain steps are known, a drafted token is taken for so many of them.
GUESSED_SHARE = 0.25
# A cost out of a file or another bucket moves like one that was seen so often.
SETTLED = 8
# One that was seen so often moves all by their whole share.
SEEN_OFTEN = 10


def bucket_of(context: int) -> int:
    """Return the bucket of a number of tokens: 0 up to 512, 1 up to 1,024, ..."""
    return ((max(1, context) - 1) // SHORT_CONTEXT).bit_length()


class _Cost:
    """One length's cost: samples at first, then an average.

    A guess is what it is taken for until the samples are there.
    """

    def __init__(self, seconds: float | None = None, *, guessed: bool = False) -> None:
        self.samples: list[float] = []
        self.seconds = seconds
        self.guessed = guessed
        self.noted = 0
        self.count = 0 if seconds is None else SETTLED


class RoundCosts:
    """Costs in seconds by context bucket and draft length; 0 is a plain step.

    Attributes:
        left: what is left of a plain step that is in flight when a round begins, as a
            share of it: nearly all where a device computes while the host goes on,
            hardly any on a CPU, where a step is computed while it is submitted.
        reading: seconds that the drafter takes for each token of a prompt, which it
            reads before its first draft; 0: not known.
    """

    def __init__(
        self,
        # Seconds by bucket and length, as `table` returns them
        known: Mapping[int, Mapping[int, float]] | None = None,
        *,
        left: float = 1.0,  # see below
        # A cost is a median of so many rounds before it is believed
        samples: int = SAMPLES,
        # Likewise of plain steps, by which drafts are judged; None: as many
        plain_samples: int | None = None,
    ) -> None:
        self.left = left
        self.reading = 0.0
        self._left_noted = 0
        self._samples = samples
        self._plain_samples = plain_samples or samples
        self._buckets: dict[int, dict[int, _Cost]] = {
            bucket: {length: _Cost(seconds) for length, seconds in costs.items()}
            for bucket, costs in (known or {}).items()
        }
        self._notes = 0
        self._all = 0.0  # the logarithm of the factor that all costs share

    def table(self) -> dict[int, dict[int, float]]:
        """Return what is known, in seconds; of guesses, only those of plain steps."""
        factor = math.exp(self._all)
        return {
            bucket: {
                length: cost.seconds * factor
                for length, cost in sorted(costs.items())
                if cost.seconds is not None and not (cost.guessed and length)
            }
            for bucket, costs in sorted(self._buckets.items())
        }

    def take(self, other: "RoundCosts") -> None:
        """Take over what other costs know, in place of what is known here."""
        for bucket, costs in other.table().items():
            factor = math.exp(self._all)
            own = self._buckets.setdefault(bucket, {})
            own |= {n: _Cost(seconds / factor) for n, seconds in costs.items()}
        self.left, self.reading = other.left, other.reading

    def guess(self, other: "RoundCosts") -> None:
        """Take what other costs know and these do not for a guess.

        Guesses are in proportion to the plain step, and go on so: when one of them is
        measured, the others move as it does.
        """
        if not self._buckets:
            self.left = other.left
        for bucket, costs in other.table().items():
            if 0 not in costs:
                continue
            own = self._buckets.setdefault(bucket, {})
            plain = own.get(0, _Cost()).seconds or costs[0] / math.exp(self._all)
            scale = plain / costs[0]
            for length, seconds in costs.items():
                cost = own.setdefault(length, _Cost())
                if cost.seconds is None:
                    cost.seconds, cost.guessed = seconds * scale, True

    def lengths(self, context: int) -> list[int]:
        """Return the lengths whose cost is known, in order."""
        costs = self._at(context)
        return sorted(n for n, cost in costs.items() if cost.seconds is not None)

    def sampled(self, context: int, length: int) -> int:
        """Return how many rounds were measured of a length that is not known yet."""
        cost = self._at(context).get(length)
        return len(cost.samples) if cost else 0

    def needed(self, length: int) -> int:
        """Return how many rounds are measured of a length that is not known."""
        return self._samples if length else self._plain_samples

    def noted(self, context: int, length: int) -> int:
        """Return when a length was last measured, in rounds; 0 if never."""
        cost = self._at(context).get(length)
        return cost.noted if cost else 0

    def age(self, context: int, length: int) -> int:
        """Return how many rounds ago a length was last measured."""
        return self._notes - self.noted(context, length)

    def reset(self, context: int, length: int) -> None:
        """Take a cost for a guess, until it was measured as at first."""
        cost = self._at(context).get(length)
        if cost is not None and cost.seconds is not None:
            cost.guessed, cost.samples, cost.noted = True, [], self._notes

    def seconds(self, context: int, length: int) -> float:
        """Return a round's cost; between known lengths by straight lines.

        Where it is not known, that of a plain step has to be.
        """
        cost = self._at(context).get(length)
        if cost is not None and cost.seconds is not None:
            return cost.seconds * math.exp(self._all)
        return self.curve(context, length)[length]

    def curve(self, context: int, longest: int) -> list[float]:
        """Return the costs of rounds with 0 to `longest` drafts, see `seconds`.

        Asked for in every round, so it goes through the known lengths once.
        """
        factor = math.exp(self._all)
        known = [
            (n, cost.seconds * factor)
            for n, cost in sorted(self._at(context).items())
            if cost.seconds is not None
        ]
        start, at_start = known[0]
        if len(known) == 1:
            return [at_start * (1 + GUESSED_SHARE * n) for n in range(longest + 1)]
        found = [at_start]
        slope = 0.0
        for stop, at_stop in known[1:]:
            slope = max(0.0, (at_stop - at_start) / (stop - start))
            found += [at_start + slope * n for n in range(1, stop - start)]
            found.append(at_stop)
            start, at_start = stop, at_stop
        found += [at_start + slope * n for n in range(1, longest - start + 1)]
        return found[: longest + 1]

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        self._notes += 1
        cost = self._at(context).setdefault(length, _Cost())
        factor = math.exp(self._all)
        if cost.seconds is None or cost.guessed:
            cost.samples.append(seconds / factor)
            if len(cost.samples) >= self.needed(length):
                found, guess = median(cost.samples), cost.seconds
                cost.seconds, cost.guessed = found, False
                cost.count = len(cost.samples)
                if guess:
                    self._scale_guesses(context, found / guess)
            return
        most = math.log(LARGEST_CHANGE)
        change = math.log(max(seconds, 1e-9) / (cost.seconds * factor))
        change = max(-most, min(most, change))
        cost.count += 1
        self._all += SHARED * min(1.0, cost.count / SEEN_OFTEN) * change
        # What was not measured for long is worth less than what is seen now.
        stale = min(0.2, 0.002 * (self._notes - cost.noted))
        cost.noted = self._notes
        cost.seconds *= math.exp(max(SLOWEST, 1 / cost.count, stale) * change)

    def note_left(self, context: int, seconds: float) -> None:
        """Learn from a round that only read a plain step which was in flight.

        It tells nothing before a plain step was measured.
        """
        cost = self._at(context).get(0, _Cost())
        known = [cost.seconds] if cost.seconds is not None else cost.samples
        if known:
            step = median(known) * math.exp(self._all)
            share = min(1.0, seconds / step)
            self._left_noted += 1
            self.left += max(LEFT_SHARE, 1 / self._left_noted) * (share - self.left)

    def note_reading(self, tokens: int, seconds: float) -> None:
        """Learn from a drafter that has read a prompt of so many tokens."""
        own = seconds / max(1, tokens)
        self.reading = (self.reading + own) / 2 if self.reading else own

    def step_left(self, context: int) -> float:
        """Return the seconds that a plain step takes which is in flight already."""
        return self.left * self.seconds(context, 0)

    def _scale_guesses(self, context: int, ratio: float) -> None:
        """Let the other guesses follow one that was measured."""
        for cost in self._at(context).values():
            if cost.guessed and cost.seconds is not None:
                cost.seconds *= ratio

    def _at(self, context: int) -> dict[int, _Cost]:
        """Return a bucket; a new one begins with what the nearest one knows."""
        bucket = bucket_of(context)
        found = self._buckets.get(bucket)
        if found is None:
            costs: dict[int, _Cost] = {}
            if self._buckets:
                nearest = min(self._buckets, key=lambda b: (abs(b - bucket), b))
                costs = {
                    length: _Cost(cost.seconds, guessed=cost.guessed)
                    for length, cost in self._buckets[nearest].items()
                    if cost.seconds is not None
                }
            found = self._buckets[bucket] = costs
        return found


def stop_of(options: Sequence[Option], certainties: Certainties | None) -> Stop | None:
    """Return where drafts end early: at tokens that bring less than their time does.

    The options are all lengths from 0 on, in order.
    """
    if certainties is None or len(options) < 3:
        return None
    return Stop(worth_of_time(options), certainties)


def worth_of_time(options: Sequence[Option]) -> float:
    """Return the tokens that come in the time of one more drafted token.

    By a straight line through the costs of two drafts or more, in which errors are
    relative: single ones are noisy, and of many speeds the highest had luck.
    """
    drafts = options[1:]
    weights = [option.seconds**-2 for option in drafts]

    def mean(values: Iterable[float]) -> float:
        found: float = sum(map(mul, weights, values)) / sum(weights)
        return found

    length = mean(option.length for option in drafts)
    seconds = mean(option.seconds for option in drafts)
    away = [option.length - length for option in drafts]
    slope = mean(map(mul, away, (option.seconds for option in drafts))) / mean(
        map(mul, away, away)
    )
    on_line = [seconds + slope * each for each in away]
    fastest = max(
        # Where costs are bent the line may come near to 0.
        option.tokens / max(line, 0.5 * option.seconds)
        for option, line in zip(drafts, on_line, strict=True)
    )
    return max(options[0].speed, fastest) * max(0.0, slope)
