"""The worst cases of adaptive lengths: their drafters, their runs and their ratios."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from benchmark_arms import Arm, Models, jobs_of, ours, plain_arms
from benchmark_case import Case, Series, passes_of, run_case
from benchmark_options import GROUPS, TARGETS, folder_of, progress, texts_of
from compare_demands import Demand
from drafter_list import Bench, sources_of

from mlx_speculation import SpeculativeGenerator, load

if TYPE_CHECKING:
    from benchmark_adaptive import Settings

WRONG = "wrong"
PLAIN = 0.97
REQUESTS = 0.95
CONTEXT = 256  # tokens in the caches at which rounds are timed
TRIALS = ("trial", "review", "measure")


def always_wrong(model: nn.Module) -> nn.Module:
    """Make a draft model propose what it holds for the least probable, at its price."""
    kind: Any = type(model)

    class Wrong(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return -super().__call__(*arguments, **options)

    Wrong.__module__ = kind.__module__
    model.__class__ = Wrong
    return model


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A target with its drafters, and one that is always wrong.

    Attributes:
        name: of the target.
        models: it, and the draft model.
        generators: by the name of the drafter.
        costs: seconds of a round by drafter and draft length, calibrated.
        settings: what to measure.
    """

    name: str
    models: Models
    generators: dict[str, SpeculativeGenerator]
    costs: dict[str, dict[int, float]]
    settings: "Settings"

    @classmethod
    def load(cls, name: str, settings: "Settings") -> "Adaptive":
        """Load a target with its drafters, and calibrate each of them."""
        folder, small = folder_of(name), folder_of(settings.draft_model)
        models = Models.load(folder, small)
        tokenizer = models.plain.tokenizer
        bench = Bench(folder, models.target, tokenizer, models.plain)
        known = name if name in TARGETS else None
        generators = {
            source.name: source.generator
            for source in sources_of(bench, small, [], known)
            if source.name != "cascade"
        }
        wrong = always_wrong(load(small)[0])
        generators[WRONG] = SpeculativeGenerator(models.target, tokenizer, draft=wrong)
        costs = {}
        for drafter, generator in generators.items():
            progress(f"{name}: {drafter} is calibrated")
            costs[drafter] = generator.calibrate([CONTEXT])[0]
        del costs[WRONG]
        return cls(folder.name, models, generators, costs, settings)

    def _auto(self, drafter: str) -> Arm:
        generator = self.generators[drafter]
        longest = max(self.costs.get(drafter, self.costs["model"]))
        decode = partial(ours, generator, None, explain=self.settings.explain)
        return Arm("ours", longest, decode, drafter, auto=True)

    def over_plain(self, temperature: float) -> Case:
        """Run every drafter by measurement, and both plain decodings."""
        texts = [texts_of(group, 1)[0] for group in GROUPS]
        arms = [*plain_arms(self.models), *map(self._auto, self.generators)]
        jobs = jobs_of(
            self.models, texts, self.settings.tokens, temperature, self.settings.seed
        )
        series = [Series(arm) for arm in arms]
        sources = [text.source for text in texts]
        case = Case(self.name, "all groups", temperature, sources, series)
        run_case(case, self.models, jobs, self.settings.passes, progress, turns=True)
        return case

    def demands_over_plain(self, case: Case) -> list[Demand]:
        """Return each drafter's speed over plain decoding."""
        found = []
        for series in case.of("ours", auto=True):
            ratio = series.over(case.plain)
            assert ratio is not None
            where, note = str(case), tried(series)
            what = f"{series.arm.draft}, adaptive over plain"
            bounds = (ratio.median, ratio.low, ratio.high)
            found.append(Demand(what, where, *bounds, least=PLAIN, note=note))
        return found

    def requests(self, drafter: str, temperature: float) -> list[Case]:
        """Run requests that change their group each time; return a case a group."""
        settings, generator = self.settings, self.generators[drafter]
        arms = [*plain_arms(self.models), self._auto(drafter)]
        for length in settings.draft_lengths:
            arms.append(Arm("ours", length, partial(ours, generator, length), drafter))
        count = -(-settings.requests // len(GROUPS))
        cases, turns = [], []
        for group in GROUPS:
            texts = texts_of(group, count)
            jobs = jobs_of(
                self.models, texts, settings.request_tokens, temperature, settings.seed
            )
            sources, series = [t.source for t in texts], [Series(arm) for arm in arms]
            cases.append(Case(self.name, group, temperature, sources, series))
            turn = passes_of(cases[-1], self.models, jobs, count, progress, turns=True)
            turns.append(turn)
        for turn in turns:
            next(turn)  # the warm-up
        for turn in islice(cycle(turns), settings.requests):
            next(turn)
        return cases

    def demand_of_requests(self, cases: Sequence[Case]) -> Demand:
        """Return the time of the best length of each group over the adaptive one's."""
        best_seconds = seconds = 0.0
        ratios, best_lengths, tokens = [], [], 0
        for case in cases:
            (auto,) = case.of("ours", auto=True)
            lengths = [case.series[0], *case.of("ours", auto=False)]
            best = min(lengths, key=seconds_of)
            best_seconds += seconds_of(best)
            seconds += seconds_of(auto)
            pairs = zip(auto.speeds, best.speeds, strict=True)
            ratios += [one / other for one, other in pairs]
            best_lengths.append(f"{case.group} {best.arm.draft_length}")
            tokens += sum(len(run.tokens) for run in auto.runs)
        low, _, high = quantiles(ratios, n=4)
        note = f"{len(ratios)} requests, {tokens} tokens; {', '.join(best_lengths)}"
        where = f"{self.name}, temperature {case.temperature:g}"
        what = f"{auto.arm.draft}, requests over the best lengths"
        value = best_seconds / seconds
        return Demand(what, where, value, low, high, least=REQUESTS, note=note)


def seconds_of(series: Series) -> float:
    """Return the time that all tokens of a series take, at the speed of each run."""
    return sum(len(run.tokens) / run.speed for run in series.runs)


def tried(series: Series) -> str:
    """Say how much of the time went into rounds off the best length."""
    spent = dict.fromkeys(TRIALS, 0.0)
    total = 0.0
    for run in series.runs:
        total += sum(run.reasons.values())
        for reason in TRIALS:
            spent[reason] += run.reasons.get(reason, 0.0)
    words = [
        f"{reason} {share / total:.1%}" for reason, share in spent.items() if share
    ]
    rounds = f"{series.statistics.drafts} of {series.statistics.rounds} rounds drafted"
    return "; ".join([f"{series.tokens} tokens, {rounds}", *words])
