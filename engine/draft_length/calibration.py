"""Calibration: a policy that plans every draft length and records times of rounds."""

from collections import defaultdict
from statistics import median

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.costs import PartsTable, bucket_of, few_lengths
from mlx_speculation.engine.timing import RoundSeconds

PASSES = 3  # over all lengths; a busy moment then slows only some rounds of a length
# Plain steps of a pass, the first and the last not measured; drafts of each length.
# Before these, in an unmeasured draft, the drafter reads the plain steps' tokens.
PLAIN_STEPS, DRAFTS = 7, 2


class Calibration:
    """A policy that plans every length, and measures costs at one context length."""

    def __init__(self, context: int, longest: int) -> None:
        self.longest, self._context = longest, context
        self.prompt = calibration_prompt(context)
        lengths = _lengths(longest)
        self.rounds, self.done = len(lengths), 0  # all rounds; those that have run
        self._script = iter(lengths)
        self._parts: defaultdict[int, list[RoundSeconds]] = defaultdict(list)
        self._drafted = False

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next length; after the last one, plain steps."""
        return Plan(max(0, min(next(self._script, 0), limit)), "measure")

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Record the seconds of a `steady` round, or of a draft after another draft."""
        self.done += 1
        drafts = feedback.drafted > 0
        usual = feedback.steady or (drafts and self._drafted and not feedback.behind)
        if usual and not feedback.fresh:
            self._parts[feedback.drafted].append(feedback.parts)
        self._drafted = drafts

    @property
    def measured(self) -> PartsTable:
        """Median seconds of the rounds of each length, by part."""
        medians = {
            length: RoundSeconds(*map(median, zip(*rounds, strict=True)))
            for length, rounds in sorted(self._parts.items())
        }
        return {bucket_of(self._context): medians}


def _lengths(longest: int) -> list[int]:
    """Return the draft length of each round."""
    drafts = few_lengths(longest)[1:]
    once = [0] * PLAIN_STEPS + list(drafts[:1])
    once += [length for length in drafts for _ in range(DRAFTS)]
    return PASSES * once


def most_tokens(longest: int) -> int:
    """Return the largest number of tokens that a calibration's rounds can emit."""
    return sum(length + 1 for length in _lengths(longest))


def calibration_prompt(context: int) -> list[int]:
    """Return a prompt of `context` arbitrary tokens."""
    return [1 + index % 7 for index in range(context)]
