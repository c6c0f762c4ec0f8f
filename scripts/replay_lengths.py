"""Replays policies of draft lengths on real texts, where luck and noise are known.

Two streams of one text differ by where their rounds begin, and two runs by what else
the machine does; both are larger than what a policy of lengths gains or loses. So a
text is taken apart once: behind every token, how many tokens would the draft model have
right? Then any policy is replayed on it in no time, from several places, at the costs
that rounds take here (`calibrate`), and compared with every fixed length:

    right behind each token   6 5 4 3 2 1 0 3 2 1 0
    k = 4 takes               4         1   3          rounds of 5, 2 and 4 tokens

What a policy sees of the costs is noisy, as clocks are; what is charged is not. The
draft model has to read a prompt before its first draft, and what it has missed of the
text; the prompt is charged where a text has begun without drafts. At temperature 0
drafts end early (`engine/draft_length/early_stop.py`), two tokens behind what is worth
its time; "whole drafts" are lengths by measurement that do not.

The last line on standard output is one JSON object.

    python scripts/replay_lengths.py
    python scripts/replay_lengths.py --target hybrid --temperature 0 --noise 0
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from benchmark_options import (
    GROUPS,
    TARGETS,
    TEMPERATURES,
    Blas,
    Group,
    Seed,
    Target,
    Temperature,
    folder_of,
    progress,
    texts_of,
)

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from benchmark_arms import Job, Models

    from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
    from mlx_speculation.engine.draft_length.early_stop import Certainties

CONTEXT = 256
PLACES = (0, 3, 7, 11)  # tokens of each text that are left out before a replay
# Of a plain step on its way, what is left when a draft is verified behind it; on a CPU.
LEFT = 0.08
FIRST_TRY = 3  # tokens; most drafts end early
BEGUN = 16  # tokens that are decoded before a benchmark by turns looks at the clock
# Tokens at the end of a draft that ends early: the one that ends it, and the one that
# is computed meanwhile.
AT_END = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """What rounds take.

    Attributes:
        seconds: by drafted tokens; 0 is a plain step.
        noise: standard deviation of the logarithm of what a policy sees.
        reading: of a token that the draft model has not read.
    """

    seconds: list[float]
    noise: float
    reading: float = 0.0

    @property
    def longest(self) -> int:
        """The longest draft."""
        return len(self.seconds) - 1

    def seen(self, length: int, random: np.random.Generator, count: int = 1) -> float:
        """Return what a policy sees of a round: a median of so many."""
        factors = self.noise * random.standard_normal(count)
        return self.seconds[length] * math.exp(float(np.median(factors)))


@dataclass(frozen=True, slots=True)
class Place:
    """What would be drafted behind a token of a text.

    Attributes:
        right: how many tokens the draft model would have right.
        certainties: its largest probability for each token; empty where not asked for.
    """

    right: int
    certainties: tuple[float, ...] = ()


@app.command()
def replay(
    target: Target = None,
    group: Group = None,
    temperature: Temperature = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 6,
    tokens: Annotated[int, typer.Option(min=64, help="Of each text.")] = 144,
    noise: Annotated[float, typer.Option(min=0.0, help="Of the clock.")] = 0.1,
    seed: Seed = 0,
    blas: Blas = "auto",
) -> None:
    """Replay lengths by measurement and fixed ones."""
    use_blas(blas)
    from benchmark_arms import Models, jobs_of

    from mlx_speculation.engine.draft_length.costs import RoundCosts

    results = []
    for name in target or TARGETS:
        models = Models.load(folder_of(name), folder_of("draft"))
        progress(f"{name}: rounds are measured")
        table = models.speculative.calibrate([CONTEXT])[0]
        costs = RoundCosts({0: table})
        curve, reading = costs.curve(CONTEXT, max(table)), reading_of(models)
        machine = Machine(curve, noise, reading)
        for warmth, each in product(temperature or TEMPERATURES, group or GROUPS):
            progress(f"{name}, {each}, temperature {warmth:g}: texts are taken apart")
            jobs = jobs_of(models, texts_of(each, prompts), tokens, warmth, seed)
            texts = [right_behind(models, job, machine.longest) for job in jobs]
            found = compare(machine, texts, seed)
            results.append(
                {"target": name, "group": each, "temperature": warmth, **found}
            )
            show(results[-1])
    print(json.dumps({"noise": noise, "results": results}))


def reading_of(models: "Models") -> float:
    """Return the seconds that the draft model takes for a token of a prompt."""
    from mlx_speculation.engine.drafters.draft_model import DraftModel
    from mlx_speculation.engine.sequence import Sequence
    from mlx_speculation.models import Lane

    taken = []
    for _ in range(5):
        drafter, begun = DraftModel(lambda: Lane(models.draft)), time.perf_counter()
        drafter.begin(Sequence([1 + n % 7 for n in range(CONTEXT)]))
        taken.append(time.perf_counter() - begun)
    return median(taken) / CONTEXT


def right_behind(models: "Models", job: "Job", longest: int) -> list[Place]:
    """Return what the draft model would draft behind each token of a text.

    Args:
        models: the target and its draft model.
        job: the text.
        longest: no more are drafted.
    """
    from mlx_speculation.engine.draft_length.early_stop import Certainties, Stop
    from mlx_speculation.engine.drafters.base import Choices
    from mlx_speculation.engine.drafters.draft_model import DraftModel
    from mlx_speculation.engine.sequence import Sequence
    from mlx_speculation.models import Lane
    from mlx_speculation.samplers import Verifier

    # It ends no draft, and asks for certainties.
    stop = Stop(0.0, Certainties()) if job.sampling.greedy else None
    text = models.plain.generate(
        job.prompt, max_tokens=job.tokens, sampling=job.sampling, stop_tokens=()
    ).tokens
    verifier = Verifier(models.chooser(job))
    drafter = DraftModel(lambda: Lane(models.draft))
    drafter.begin(Sequence(list(job.prompt)))
    found = []
    for place in range(len(text)):
        sequence, following = Sequence(job.prompt + text[:place]), text[place:]
        for limit in (longest,) if stop else (FIRST_TRY, longest):
            choices = Choices(verifier, stop=stop)
            draft = choices.checked(drafter.propose(sequence, limit, choices), limit)
            drafted: Any = draft.tokens.tolist()
            right = in_common(drafted, following)
            if right < limit or limit == longest:
                break
            drafter.discard()
        drafter.settle(0)
        found.append(Place(right, tuple(map(float, draft.certainties))))
    return found


def in_common(drafted: list[int], following: list[int]) -> int:
    """Return how many tokens are the same before the first that is not."""
    pairs = list(zip(drafted, following, strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


def replayed(
    policy: "DraftLengthPolicy",
    machine: Machine,
    text: list[Place],
    random: np.random.Generator,
) -> float:
    """Return the seconds of a token under a policy, the first round left out."""
    from mlx_speculation.engine.draft_length.base import Outcome

    place, counted, seconds, behind = 0, 0, 0.0, False
    missed, prompt = 0, CONTEXT  # tokens that the draft has not read
    plan = policy.plan(CONTEXT, len(text) - 1)
    while place < len(text):
        here, drafted = text[place], plan.length
        shown: tuple[float, ...] = ()
        if plan.stop is not None:
            kept = plan.stop.kept(here.certainties[: plan.length])
            drafted = min(kept + AT_END, plan.length)
            shown = here.certainties[:drafted]
        accepted = min(drafted, here.right)
        left = len(text) - place - accepted - 2
        after = None if drafted else policy.plan(CONTEXT + place + 1, left)
        ahead = after is not None and after.length == 0 <= left
        share = 1.0 if drafted else (LEFT if behind else 1.0) + (1 - LEFT) * ahead
        caught_up = first = 0.0
        if drafted:
            first = (prompt + missed) * machine.reading if prompt else 0.0
            caught_up = 0.0 if prompt else missed * machine.reading
            missed = prompt = 0
        else:
            missed += 1
        if place:
            seconds += share * machine.seconds[drafted] + caught_up
            counted += accepted + 1
        seconds += first if place >= BEGUN else 0.0
        seen = share * machine.seen(drafted, random) + caught_up
        place += accepted + 1
        outcome = Outcome(
            drafted,
            accepted,
            seen,
            behind,
            ahead,
            reading=first,
            certainties=() if behind else shown,
        )
        policy.note(CONTEXT + place, plan, outcome)
        plan, behind = after or policy.plan(CONTEXT + place, left), ahead
    policy.end()
    return seconds / counted


def compare(machine: Machine, texts: list[list[Place]], seed: int) -> dict[str, Any]:
    """Return the best fixed length, and lengths by measurement over it."""
    from mlx_speculation.engine.draft_length.base import FixedDraftLength
    from mlx_speculation.engine.draft_length.early_stop import Certainties

    fixed = [0.0] * (machine.longest + 1)
    for text, place, length in product(texts, PLACES, range(len(fixed))):
        random = np.random.default_rng(seed)  # of what nobody looks at
        fixed[length] += replayed(
            FixedDraftLength(length), machine, text[place:], random
        )
    best = min(range(len(fixed)), key=fixed.__getitem__)
    auto = usual = measured(machine, texts, seed)
    if any(place.certainties for text in texts for place in text):
        auto = measured(machine, texts, seed, Certainties)
    return {
        "best": best,
        "best_over_plain": fixed[0] / fixed[best],
        "auto_over_best": fixed[best] / auto,
        "auto_over_plain": fixed[0] / auto,
        "whole_over_best": fixed[best] / usual,
        "seconds": machine.seconds,
        "right": median(place.right for text in texts for place in text),
    }


def measured(
    machine: Machine,
    texts: list[list[Place]],
    seed: int,
    make_certainties: "Callable[[], Certainties | None]" = lambda: None,
) -> float:
    """Return the seconds of lengths by measurement, summed up over texts and places."""
    from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
    from mlx_speculation.engine.draft_length.adaptive import AdaptiveLengths
    from mlx_speculation.engine.draft_length.costs import RoundCosts
    from mlx_speculation.engine.draft_length.exploration import Allowance
    from mlx_speculation.engine.draft_length.policies import calibration_costs

    needed = calibration_costs().needed
    lengths = [n for n in range(machine.longest + 1) if n <= 8 or n % 4 == 0]
    seconds = 0.0
    for place in PLACES:
        random = np.random.default_rng([seed, place])
        known = {n: machine.seen(n, random, needed(n)) for n in lengths}
        costs, rates = RoundCosts({0: known}, left=LEFT), AcceptanceRates()
        allowance, certainties = Allowance(), make_certainties()
        for text in texts:
            policy = AdaptiveLengths(
                costs,
                rates,
                machine.longest,
                allowance=allowance,
                certainties=certainties,
            )
            seconds += replayed(policy, machine, text[place:], random)
    return seconds


def show(result: dict[str, Any]) -> None:
    """Print one line."""
    where = f"{result['target']}, {result['group']}, {result['temperature']:g}"
    print(
        f"{where:20} best fixed k = {result['best']:2}: "
        f"{result['best_over_plain']:.2f} x plain; by measurement "
        f"{result['auto_over_plain']:.2f}, {result['auto_over_best']:.3f} of it; "
        f"whole drafts {result['whole_over_best']:.3f}"
    )


if __name__ == "__main__":
    run(app)
