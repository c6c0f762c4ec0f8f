"""Series of an arm over all prompts of a group: speed, acceptance, compared texts.

At temperature 0 every text has to equal that of our plain decoding, or to differ first
at a near-tie. Above 0 this holds for our arms only, since mlx-lm draws other noise.
Texts of mlx-lm's speculation may be wrong; the table then says so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.arms import Arm, Job, Run, run_by_turns
from bench.models import Bench
from bench.prompts import Question
from bench.report import Report
from bench.turns import Spread
from mlx_speculation import Sampling
from mlx_speculation.engine import Statistics
from mlx_speculation.engine.equivalence.texts import Parting

WARM_UP_TOKENS = 32


@dataclass(slots=True)
class Series:
    """The runs of one arm."""

    arm: Arm
    runs: list[Run] = field(default_factory=list)  # by prompt; empty after a failure
    # Where its texts begin to differ from those of our plain decoding
    partings: list[Parting] = field(default_factory=list)
    failure: str | None = None

    @property
    def statistics(self) -> Statistics:
        """The counts of all prompts together."""
        return total(run.statistics for run in self.runs)

    @property
    def slices(self) -> list[tuple[int, float]]:
        """Timed tokens and seconds of each slice of all prompts."""
        return [piece for run in self.runs for piece in run.slices]

    @property
    def speed(self) -> float:
        """Tokens per second over all prompts."""
        return speed_of(self.slices)

    @property
    def whole(self) -> float:
        """The seconds of all prompts, prefill included."""
        return sum(run.first_seconds + run.seconds for run in self.runs)

    @property
    def text(self) -> str:
        """Comparison of its texts with those of our plain decoding."""
        wrong = [each.index for each in self.partings if not each.near_tie]
        if wrong:
            return f"wrong from token {min(wrong)}"
        count = len(self.partings)
        return f"equal, {count} near-ties" if count else "equal"

    def row(self, plain: "Series", mlx_lm: "Series") -> dict[str, Any]:
        """Return the row of the arm.

        `each` is the spread of single prompts' `x_plain`. `x_whole` includes the
        prefill. `first_x` is the median of the times to the first token, each over that
        of plain decoding.
        """
        if not self.runs:
            return {"arm": self.arm.name, "texts": self.failure or "no tokens"}
        counts = self.statistics
        speeds = [speed_of(run.slices) for run in self.runs]
        others = [speed_of(run.slices) for run in plain.runs]
        firsts = [run.first_seconds for run in self.runs]
        return {
            "arm": self.arm.name,
            "tokens_per_second": self.speed,
            "x_mlx_lm": self.speed / mlx_lm.speed,
            "x_plain": self.speed / plain.speed,
            "each": Spread.over(speeds, others),
            "x_whole": plain.whole / self.whole,
            "first_ms": 1e3 * sum(firsts) / len(firsts),
            "first_x": Spread.over(
                firsts, [r.first_seconds for r in plain.runs]
            ).median,
            "accepted": counts.acceptance_rate,
            "length": counts.mean_accepted_length,
            "texts": self.text,
            "counts": {
                "texts": len(self.runs),
                "tokens": sum(len(run.tokens) for run in self.runs),
                "rounds": counts.rounds,
                "drafts": counts.drafts,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "reads": counts.reads,
                "near_ties": len(self.partings),
            },
            "by_position": list(counts.accepted_per_position),
        }


def speed_of(slices: Sequence[tuple[int, float]]) -> float:
    """Return tokens per second of slices; 1 if there are none."""
    seconds = sum(spent for _, spent in slices)
    return sum(count for count, _ in slices) / seconds if seconds else 1.0


def total(counts: Iterable[Statistics]) -> Statistics:
    """Return the counts of several generations together."""
    result = Statistics()
    for each in counts:
        result.add(each)
    return result


def compare(
    bench: Bench,
    arms: list[Arm],
    jobs: Iterable[Job],
    say: Callable[[str], None] = lambda line: None,
) -> list[Series]:
    """Let arms decode jobs in turns; the first arm is our plain decoding.

    A short job warms up. An arm of mlx-lm that fails is left out.

    Raises:
        AssertionError: a text of ours or of mlx-lm's plain decoding is wrong, or one of
            our arms failed.
    """
    result = [Series(arm) for arm in arms]
    for number, job in enumerate(jobs):
        if number == 0:
            short = replace(job, tokens=min(job.tokens, WARM_UP_TOKENS))
            _run(bench, result, short)
        runs = _run(bench, result, job)
        say(f"{bench.name}: text {number + 1}, {len(job.prompt)} prompt tokens")
        expected = runs[result[0].arm.name]
        for each in result:
            if each.failure is None:
                run = runs[each.arm.name]
                each.runs.append(run)
                _check(bench, each, job, expected.tokens, run.tokens)
    return result


def _run(bench: Bench, series: list[Series], job: Job) -> dict[str, Run]:
    """Run a job; arms that fail are left out of later jobs."""
    arms = [each.arm for each in series if each.failure is None]
    runs = run_by_turns(bench, arms, job)
    for each in series:
        if each.failure is None and (failure := runs[each.arm.name].failure):
            assert not each.arm.ours, f"{each.arm.name} {failure}"
            each.failure, each.runs = failure, []
    return runs


def _check(
    bench: Bench, series: Series, job: Job, expected: list[int], got: list[int]
) -> None:
    if got == expected or (not job.sampling.greedy and not series.arm.ours):
        return
    width = 1 + max(series.arm.length or 0, len(series.runs[-1].statistics.reached))
    result = bench.parting(job.prompt, job.sampling, expected, got, width=width)
    assert result is not None
    must = series.arm.ours or not series.arm.draft
    assert result.near_tie or not must, (
        f"{bench.name}, {series.arm.name}: not the text of our plain decoding: {result}"
    )
    series.partings.append(result)


def rows_of(series: list[Series]) -> list[dict[str, Any]]:
    """Return the rows of all arms, of which the first two are plain decoding.

    "x_plain" is the speed over that of the faster of these two.
    """
    plain = max(series[:2], key=lambda each: each.speed)
    return [each.row(plain, series[1]) for each in series]


def jobs_of(
    bench: Bench,
    questions: Sequence[Question],
    *,
    tokens: int,
    temperature: float,
    seed: int = 0,
) -> Iterator[Job]:
    """Yield a job for each turn of each question; each question has its own seed.

    Only answers of chats end before the budget. The prompt of a later turn holds the
    answers of plain decoding.
    """
    ids = bench.tokenizer.eos_token_ids
    for index, question in enumerate(questions):
        answers: list[str] = []
        sampling = Sampling(temperature=temperature, seed=seed + index)
        stop = frozenset(int(each) for each in ids) if question.chat else frozenset()
        for _ in question.turns:
            prompt = question.prompt(bench.tokenizer, answers)
            job = Job(prompt, tokens, sampling, stop)
            yield job
            if len(question.turns) > 1:
                answer = bench.plain.generate(
                    prompt, max_tokens=tokens, sampling=sampling
                )
                answers.append(answer.text)


def add_groups(
    report: Report,
    bench: Bench,
    arms: list[Arm],
    groups: dict[str, list[Question]],
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> None:
    """Compare arms on each group of prompts, and on all groups together."""
    whole = [Series(arm) for arm in arms]
    for group, questions in groups.items():
        report.say(f"{bench.name}: {group}")
        jobs = jobs_of(
            bench, questions, tokens=tokens, temperature=temperature, seed=seed
        )
        result = compare(bench, arms, jobs, report.say)
        for row in rows_of(result):
            report.add(target=bench.name, group=group, **row)
        for all_groups, part in zip(whole, result, strict=True):
            all_groups.runs += part.runs
            all_groups.partings += part.partings
            all_groups.failure = all_groups.failure or part.failure
    if len(groups) > 1:
        for row in rows_of([each for each in whole if each.failure is None]):
            report.add(target=bench.name, group="all", **row)
