"""Calibration: a policy that plans every draft length and records times of rounds."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from mlx_speculation.engine.draft_length.base import (
    DraftLengthPolicy,
    Feedback,
    FixedDraftLength,
    Plan,
)
from mlx_speculation.engine.draft_length.costs import (
    SAMPLES,
    RoundCosts,
    bucket_of,
    few_lengths,
)
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.models import PART_SIZES, usual_part

# Median seconds of a round's parts, by context bucket and draft length; length 0: a
# plain step.
PartsTable = dict[int, dict[int, RoundSeconds]]
# Called with the number of finished rounds, and of all rounds.
Progress = Callable[[int, int], None]

# The number of passes over all lengths. With several, a moment in which the machine is
# busy does not fall on all rounds of one length.
PASSES = 3
# Rounds of a pass: plain steps, the first and last of which are not counted, then
# drafts of each length. The first draft is not counted: in it the drafter also reads
# the tokens of the plain steps.
PLAIN_STEPS, DRAFTS = 7, 2
# Rounds with each part size, their draft length, and the least share of a round that
# another part size than the usual one has to save.
PART_ROUNDS, PART_DRAFT, PART_GAIN = 5, 4, 0.05


class MeasuredStream(Protocol):
    """A stream whose rounds are measured; see `Stream`."""

    @property
    def request(self) -> Any:
        """The stream's request; its `target` is the lane of the measured model."""
        ...

    def next_round(self) -> list[Any]:
        """Run one round."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def __enter__(self) -> "MeasuredStream": ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None: ...


# Starts a stream on a prompt with a policy.
Start = Callable[[list[int], DraftLengthPolicy], MeasuredStream]


class Calibration:
    """A policy that plans every length; all its rounds count for one context length.

    Attributes:
        longest: the longest draft.
        costs: the measured costs of rounds.
        rounds: the number of rounds of the calibration.
        done: the number of rounds that have run.
    """

    def __init__(self, context: int, longest: int) -> None:
        self.longest, self.costs = longest, RoundCosts()
        self._context = context
        lengths = _lengths(longest)
        self.rounds, self.done = len(lengths), 0
        self._script = iter(lengths)
        # Seconds by part of the last rounds of each length
        self._parts: defaultdict[int, deque[RoundSeconds]] = defaultdict(
            partial(deque, maxlen=SAMPLES)
        )
        self._drafted = False

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next length; after the last one, plain steps."""
        return Plan(max(0, min(next(self._script, 0), limit)), "measure")

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Record the time of a round, unless it follows a round of another kind."""
        self.done += 1
        drafts = feedback.drafted > 0
        usual = feedback.steady or (drafts and self._drafted and not feedback.behind)
        if usual and not feedback.fresh:
            self.costs.note(self._context, feedback.drafted, feedback.seconds)
            self._parts[feedback.drafted].append(feedback.parts)
        self._drafted = drafts

    def end(self) -> None:
        """Do nothing: `note` has recorded every round."""

    @property
    def parts(self) -> PartsTable:
        """Median seconds of the rounds by part."""
        result = {n: _medians(each) for n, each in sorted(self._parts.items())}
        return {bucket_of(self._context): result}


def _lengths(longest: int) -> list[int]:
    """Return the draft length of each round."""
    drafts = few_lengths(longest)[1:]
    once = [0] * PLAIN_STEPS + list(drafts[:1])
    once += [length for length in drafts for _ in range(DRAFTS)]
    return PASSES * once


def most_tokens(longest: int) -> int:
    """Return the most tokens that the rounds of a calibration can emit."""
    return sum(length + 1 for length in _lengths(longest))


def _medians(result: Iterable[RoundSeconds]) -> RoundSeconds:
    parts = zip(*(astuple(one) for one in result), strict=True)
    return RoundSeconds(*(median(part) for part in parts))


def calibration_prompt(context: int) -> list[int]:
    """Return a prompt of `context` arbitrary tokens."""
    return [1 + index % 7 for index in range(context)]


def part_of(progress: Progress | None, number: int, parts: int) -> Progress:
    """Return a `Progress` for one of several equal parts of the work."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(number * total + done, parts * total)

    return report


def measure(start: Start, context: int, longest: int, report: Progress) -> Calibration:
    """Run the rounds of a calibration in a stream, and return the calibration."""
    policy = Calibration(context, longest)
    with start(calibration_prompt(context), policy) as stream:
        for _ in stream:
            report(min(policy.done, policy.rounds), policy.rounds)
            if policy.done >= policy.rounds:
                break
    return policy


def measure_part(start: Start, context: int) -> int:
    """Return the fastest part size: how many layers a forward submits at once.

    See `models.submit_layers`; 0: all layers. Rounds of all sizes alternate.
    """
    seconds: dict[int, list[float]] = {size: [] for size in PART_SIZES}
    with start(calibration_prompt(context), FixedDraftLength(PART_DRAFT)) as stream:
        stream.next_round()  # reads the prompt
        for size in PART_SIZES * PART_ROUNDS:
            stream.request.target.part = size
            started = perf_counter()
            stream.next_round()
            seconds[size].append(perf_counter() - started)
    usual = usual_part()
    medians = {size: median(each) for size, each in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    return best if medians[best] < (1 - PART_GAIN) * medians[usual] else usual


def follow(start: Start, contexts: Iterable[int], longest: int) -> None:
    """Run the rounds of a calibration on a rank that does not decide their lengths."""
    for context in sorted(contexts):
        # Only rank 0's policy is used. This one is of the same class, since the options
        # of all ranks are compared.
        policy = Calibration(context, longest)
        for _ in start(calibration_prompt(context), policy):
            pass  # until rank 0 ends it
