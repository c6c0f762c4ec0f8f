"""One target of the comparison: its drafters, arms, cases and pictures."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark_arms import Arm, Job, Models, jobs_of, mlx_lm_arms, ours, plain_arms
from benchmark_case import Case, Series, run_case
from benchmark_options import TARGETS, folder_of, progress, texts_of
from benchmark_plain import PlainRatio, measure_plain
from drafter_list import Bench, Source, compiled_source, sources_of

from mlx_speculation.cli.measure import Spread
from mlx_speculation.cli.plots import Curve, Panel
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from compare import Settings

# Tokens in the caches at which rounds are timed; the prompts have about 240.
CONTEXT = 256
# A survey of a few passes errs: two drafters come to the final, at so many lengths.
FINALISTS = (2, 1)
# With the same draft model, and its steps compiled.
SAME_PAIR = ("model", "compiled")

# Milliseconds of a round by draft length, 0 is a plain step, for each drafter.
Costs = dict[str, dict[int, float]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A target with all arms.

    Attributes:
        name: of the target.
        models: it, and the draft model.
        arms: all; the first two are plain decoding.
        costs: seconds of a round by drafter and draft length, calibrated.
        note: what transformers' arms are, or why there are none.
        settings: what to measure.
    """

    name: str
    models: Models
    arms: list[Arm]
    costs: Costs
    note: str
    settings: "Settings"

    @classmethod
    def load(cls, name: str, settings: "Settings") -> "Compared":
        """Load a target with its drafters, and calibrate each of them."""
        folder, small = folder_of(name), folder_of(settings.draft_model)
        models = Models.load(folder, small)
        plain = models.plain
        bench = Bench(folder, models.target, plain.tokenizer, plain)
        heads = [Path(head) for head in settings.heads]
        known = name if name in TARGETS else None
        sources = sources_of(bench, small, heads, known)
        if "compiled" in settings.drafts:
            try:
                sources.append(compiled_source(bench, small))
            except (InvalidRequestError, UnsupportedModelError) as error:
                progress(f"{name}: no compiled draft: {error}")
        sources = [source for source in sources if source.name in settings.drafts]
        costs: Costs = {}
        arms = plain_arms(models)
        for source in sources:
            progress(f"{name}: {source.name} is calibrated")
            costs[source.name] = source.generator.calibrate([CONTEXT])[0]
            longest = max(costs[source.name])
            arms += _arms_of(source, settings.draft_lengths, longest)
        arms += mlx_lm_arms(models, settings.mlx_lm_lengths)
        note = "transformers: no arms were asked for"
        if settings.torch:
            from torch_arms import torch_arms

            text = texts_of(settings.groups[0], 1)[0].text
            others, note = torch_arms(
                models, folder, small, settings.torch_lengths, text
            )
            arms += others
        return cls(folder.name, models, arms, costs, note, settings)

    def plain_ratios(self) -> list[PlainRatio]:
        """Measure our plain decoding against mlx-lm's, by turns."""
        runs, seed = self.settings.plain_runs, self.settings.seed
        prompt = self.models.encode(texts_of(self.settings.groups[0], 1)[0].text)
        found = []
        for temperature in self.settings.temperatures if runs else ():
            progress(f"{self.name}, temperature {temperature:g}: plain decoding")
            job = Job(prompt, self.settings.tokens, temperature, seed)
            found.append(measure_plain(self.name, self.models, job, runs))
        return found

    def survey(self, group: str, temperature: float) -> Case:
        """Run all arms on a few prompts."""
        tokens, passes = self.settings.tokens, self.settings.passes
        return self._case(group, temperature, self.arms, tokens, passes)

    def final(self, survey: Case) -> Case:
        """Run the arms that matter on more prompts, by turns."""
        tokens, passes = self.settings.final_tokens, self.settings.final_passes
        arms = [series.arm for series in finalists(survey)]
        return self._case(
            survey.group, survey.temperature, arms, tokens, passes, turns=True
        )

    def _case(
        self,
        group: str,
        temperature: float,
        arms: list[Arm],
        tokens: int,
        passes: int,
        *,
        turns: bool = False,
    ) -> Case:
        texts, seed = texts_of(group, passes), self.settings.seed
        jobs = jobs_of(self.models, texts, tokens, temperature, seed)
        sources = [text.source for text in texts]
        series = [Series(arm) for arm in arms]
        case = Case(self.name, group, temperature, sources, series)
        run_case(case, self.models, jobs, passes, progress, turns=turns)
        return case

    def panel(self, survey: Case) -> Panel:
        """Return what a picture shows of a survey."""
        others = {}
        for engine, name in (
            ("mlx-lm", "mlx-lm's speculation, best length"),
            ("transformers", "transformers, assisted, best length"),
        ):
            best = best_of(survey, engine)
            if best is not None:
                others[name] = Spread.of(best.speeds)
        return Panel(
            title=str(survey),
            plain=Spread.of(survey.plain.speeds),
            curves=[self._curve(survey, drafter) for drafter in self.costs],
            others=others,
        )

    def _curve(self, survey: Case, drafter: str) -> Curve:
        fixed = survey.of("ours", draft=drafter, auto=False)
        (auto,) = survey.of("ours", draft=drafter, auto=True)
        # The longest drafts tell the acceptance at every position.
        counts = fixed[-1].statistics
        drafting = counts.drafts / counts.rounds
        accepted = counts.accepted_per_position
        return Curve(
            name=drafter,
            measured={one.arm.draft_length: Spread.of(one.speeds) for one in fixed},
            predicted=predicted_speeds(self.costs[drafter], accepted, drafting),
            adaptive=Spread.of(auto.speeds),
            accepted=accepted,
        )


def _arms_of(source: Source, lengths: list[int], longest: int) -> list[Arm]:
    """Return the arms of a drafter: fixed lengths, and by measurement."""
    generator = source.generator
    arms = [
        Arm("ours", length, partial(ours, generator, length), source.name)
        for length in lengths
    ]
    auto = Arm("ours", longest, partial(ours, generator, None), source.name, auto=True)
    return [*arms, auto]


def predicted_speeds(
    seconds: Mapping[int, float], accepted: Sequence[float], drafting: float = 1.0
) -> dict[int, float]:
    """Return the tokens per second that costs and acceptance let expect.

        speed(k) = (1 + f (a_1 + ... + a_k)) / (f seconds(k) + (1 - f) seconds(0))

    Args:
        seconds: of a round by draft length; 0 is a plain step.
        accepted: the share of drafts in which position i was accepted.
        drafting: f, the share of rounds that have a draft; a lookup does not always
            find one.

    Returns:
        Tokens per second for each length up to that of `accepted` whose cost is known.
    """
    found = {}
    for length, cost in sorted(seconds.items()):
        if length <= len(accepted):
            tokens = 1 + drafting * sum(accepted[:length])
            found[length] = tokens / (drafting * cost + (1 - drafting) * seconds[0])
    return found


def best_of(
    case: Case, engine: str, drafts: Collection[str] | None = None
) -> Series | None:
    """Return an engine's fastest arm that drafts and whose text is not wrong.

    Args:
        case: of the arms.
        engine: whose.
        drafts: with one of these drafters; None: with any.
    """
    candidates = [
        series
        for series in case.of(engine)
        if series.runs
        and series.wrong_from is None
        and (drafts is None or series.arm.draft in drafts)
    ]
    return max(candidates, key=case.gain, default=None)


def finalists(survey: Case) -> list[Series]:
    """Return the arms of a final, both plain ones first.

    The best two of our drafters at their best fixed lengths and by measurement; the
    draft model at its best; mlx-lm's speculation at its best.
    """
    chosen = survey.series[:2]
    ours = sorted(survey.of("ours"), key=survey.gain, reverse=True)
    drafters = dict.fromkeys(series.arm.draft for series in ours)
    pair = next((draft for draft in drafters if draft in SAME_PAIR), None)
    best = [draft for draft in drafters if draft == pair or draft not in SAME_PAIR]
    for draft, lengths in zip(best, FINALISTS, strict=False):
        own = [series for series in ours if series.arm.draft == draft]
        chosen += [series for series in own if not series.arm.auto][:lengths]
        chosen += [series for series in own if series.arm.auto]
    for other in (best_of(survey, "ours", SAME_PAIR), best_of(survey, "mlx-lm")):
        if other is not None and other not in chosen:
            chosen.append(other)
    return [Series(series.arm) for series in chosen]
