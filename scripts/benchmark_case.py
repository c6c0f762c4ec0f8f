"""One case of the benchmark: a target, a group of prompts, a temperature, all arms.

A short first pass warms up and is not counted. In every pass each arm runs the same
job, one after the other, and the next pass begins with the next arm, so that a slow
moment of the machine meets all arms alike. Whole runs differ by more than most arms do,
where a machine is shared: by turns all arms decode the same job at the same time, a
slice of tokens each while the others stand still, in another order in each slice.
Every text of every pass is checked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmark_arms import Arm, Job, Models, Run, settle

from mlx_speculation.cli.measure import Spread
from mlx_speculation.engine import Statistics
from mlx_speculation.engine.equivalence.texts import Parting, find_parting
from mlx_speculation.models import wired

WARM_UP_TOKENS = 32
SLICE = 16  # tokens


@dataclass(slots=True)
class Series:
    """The runs of one arm.

    Attributes:
        arm: the arm.
        runs: of each counted pass; empty after a failure.
        by_prompt: the counts of each prompt, once: they are the same in every pass.
        partings: where its texts part from our plain decoding, by prompt.
        failure: why there is no speed, or None.
    """

    arm: Arm
    runs: list[Run] = field(default_factory=list)
    by_prompt: dict[int, Statistics] = field(default_factory=dict)
    partings: dict[int, Parting] = field(default_factory=dict)
    failure: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each counted pass."""
        return [run.speed for run in self.runs]

    @property
    def tokens(self) -> int:
        """Tokens that were generated against the clock."""
        return sum(run.timed for run in self.runs)

    @property
    def statistics(self) -> Statistics:
        """The counts of all prompts together."""
        total = Statistics()
        for counts in self.by_prompt.values():
            for name in ("rounds", "drafts", "drafted", "accepted", "emitted"):
                setattr(total, name, getattr(total, name) + getattr(counts, name))
            total.reached += [0] * (len(counts.reached) - len(total.reached))
            for index, reached in enumerate(counts.reached):
                total.reached[index] += reached
        return total

    @property
    def near_ties(self) -> list[Parting]:
        """The partings that rounding explains."""
        return [parting for parting in self.partings.values() if self._near(parting)]

    @property
    def wrong_from(self) -> int | None:
        """The first token that is wrong in any text, or None."""
        wrong = [p.index for p in self.partings.values() if not self._near(p)]
        return min(wrong, default=None)

    def _near(self, parting: Parting) -> bool:
        return parting.near_tie or parting.margin <= 2 * self.arm.tolerance

    def add(self, run: Run, prompt: int, *, counted: bool) -> None:
        """Take the run of one pass."""
        if run.failure is not None:
            self.failure, self.runs = run.failure, []
            return
        if counted:
            self.by_prompt.setdefault(prompt, run.statistics)
            self.runs.append(run)

    def over(self, plain: "Series") -> Spread | None:
        """Return the ratio of speeds to another series, pass by pass."""
        if not self.speeds:
            return None
        pairs = zip(self.speeds, plain.speeds, strict=True)
        return Spread.of([one / other for one, other in pairs])

    def first_over(self, plain: "Series") -> Spread | None:
        """Return the ratio of times to the first token, pass by pass."""
        if not self.runs:
            return None
        pairs = zip(self.runs, plain.runs, strict=True)
        return Spread.of(
            [one.first_seconds / other.first_seconds for one, other in pairs]
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A target, a group of prompts and a temperature, with the runs of all arms.

    Attributes:
        target: its name.
        group: that of the prompts.
        temperature: of the sampling.
        sources: where the prompts come from.
        series: one for each arm; the first two are plain decoding.
    """

    target: str
    group: str
    temperature: float
    sources: list[str]
    series: list[Series]

    def __str__(self) -> str:
        return f"{self.target}, {self.group}, temperature {self.temperature:g}"

    @property
    def plain(self) -> Series:
        """The faster of our and mlx-lm's plain decoding, by their medians."""
        return max(self.series[:2], key=lambda series: median(series.speeds))

    @property
    def best(self) -> Series:
        """Our arm with the fixed draft length that is the fastest over plain.

        Our plain decoding, where no fixed length is an arm.
        """
        fixed = self.of("ours", auto=False)
        return max(fixed or self.series[:1], key=self.gain)

    def of(
        self, engine: str, *, draft: str | None = None, auto: bool | None = None
    ) -> list[Series]:
        """Return the arms of an engine that draft; None: of any draft, of both."""
        return [
            series
            for series in self.series
            if series.arm.engine == engine
            and series.arm.draft_length
            and draft in (None, series.arm.draft)
            and auto in (None, series.arm.auto)
        ]

    def gain(self, series: Series) -> float:
        """Return how much faster than plain an arm is; 0 where it failed."""
        ratio = series.over(self.plain)
        return ratio.median if ratio is not None else 0.0


def run_case(
    case: Case,
    models: Models,
    jobs: Sequence[Job],
    repeats: int,
    progress: Callable[[str], None],
    *,
    places: int | None = None,
    turns: bool = False,
) -> None:
    """Run the warm-up and all passes; fill the case's series.

    Args:
        case: its arms.
        models: what they run.
        jobs: of the passes, in turn.
        repeats: passes.
        progress: is told of each.
        places: see `find_parting`.
        turns: let the arms take turns in slices of tokens.

    Raises:
        AssertionError: a text that must be equal to plain decoding is not.
    """
    for _ in passes_of(
        case, models, jobs, repeats, progress, places=places, turns=turns
    ):
        pass


def passes_of(
    case: Case,
    models: Models,
    jobs: Sequence[Job],
    repeats: int,
    progress: Callable[[str], None],
    *,
    places: int | None = None,
    turns: bool = False,
) -> Iterator[None]:
    """Yield after the warm-up and after each pass, so that cases can alternate.

    See `run_case`.

    Raises:
        AssertionError: a text that must be equal to plain decoding is not.
    """
    checker = Checker(case, models, progress, places)
    progress(f"{case}: warm-up")
    short = replace(jobs[0], tokens=min(jobs[0].tokens, WARM_UP_TOKENS))
    checker.check(short, 0, _run_pass(case.series, short, 0, counted=False))
    yield
    for number in range(repeats):
        progress(f"{case}: pass {number + 1} of {repeats}")
        prompt, first = number % len(jobs), number % len(case.series)
        order = [*case.series[first:], *case.series[:first]]
        if turns:
            runs = _take_turns(order, models, jobs[prompt], prompt)
        else:
            runs = _run_pass(order, jobs[prompt], prompt, counted=True)
        checker.check(jobs[prompt], prompt, runs)
        yield


def _run_pass(
    order: Sequence[Series], job: Job, prompt: int, *, counted: bool
) -> dict[str, Run]:
    runs = {}
    for series in order:
        if series.failure is None:
            run = runs[series.arm.name] = series.arm.run(job)
            series.add(run, prompt, counted=counted)
    return runs


def _take_turns(
    order: Sequence[Series], models: Models, job: Job, prompt: int
) -> dict[str, Run]:
    """Run a pass by turns; the arms that have failed before are left out."""
    arms = [series for series in order if series.failure is None]
    with wired(models.target):  # the arms' own end in any order
        settle()
        runs = [series.arm.decode(job) for series in arms]
        for number in range(-(-job.tokens // SLICE)):
            turn = number % len(runs)
            turns = [*runs[turn:], *runs[:turn]]
            for run in turns[::-1] if number % 2 else turns:
                if run.failure is None:
                    run.take(SLICE)
        for series, run in zip(arms, runs, strict=True):
            series.add(run.finish(), prompt, counted=True)
    return {s.arm.name: run for s, run in zip(arms, runs, strict=True)}


class Checker:
    """Compares the texts of a case with our plain decoding, each of them once."""

    def __init__(
        self,
        case: Case,
        models: Models,
        progress: Callable[[str], None],
        places: int | None = None,
    ) -> None:
        self._places = places
        self._case = case
        self._models = models
        self._progress = progress
        self._seen: set[tuple[str, int, tuple[int, ...]]] = set()

    def check(self, job: Job, prompt: int, runs: dict[str, Run]) -> None:
        """Check the runs of one pass, by the names of their arms."""
        expected = runs[self._case.series[0].arm.name].tokens
        for series in self._case.series:
            got = runs.get(series.arm.name)
            if got is None or not series.arm.is_comparable(job.temperature):
                continue
            key = (series.arm.name, prompt, tuple(got.tokens))
            if got.failure is None and got.tokens != expected and key not in self._seen:
                self._seen.add(key)
                self._note(job, prompt, series, expected, got.tokens)

    def _note(
        self,
        job: Job,
        prompt: int,
        series: Series,
        expected: list[int],
        got: list[int],
    ) -> None:
        """Note where a text parts; raise where it must not."""
        arm = series.arm
        parting = find_parting(
            self._models.target,
            self._models.chooser(job),
            job.prompt,
            expected,
            got,
            width=arm.draft_length + 1,
            places=self._places,
        )
        assert parting is not None
        line = f"{self._case}: {arm.name}, prompt {prompt}: {parting}"
        if not parting.near_tie and arm.must_be_equal(job.temperature):
            raise AssertionError(f"not the text of our plain decoding: {line}")
        series.partings[prompt] = parting
        self._progress(line)
