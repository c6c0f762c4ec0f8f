"""Simulated machines and texts on which a policy of draft lengths is judged.

Times and acceptance come from known laws, so that the best fixed length is known too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Outcome

Rates = Sequence[float]


@dataclass(frozen=True)
class World:
    """A machine and a draft.

    Attributes:
        seconds: of a round by drafted tokens; 0 is a steady plain step.
        cold: a plain step that was not submitted ahead, in steady ones.
        left: of a plain step that was, what is left when the next round begins.
        catch_up: seconds for each plain step that the draft has to read.
        noise: standard deviation of the logarithm of times.
        outliers: the share of rounds that take three times as long.
    """

    seconds: Sequence[float]
    cold: float = 1.2
    left: float = 1.0
    catch_up: float = 0.0
    noise: float = 0.05
    outliers: float = 0.01

    @property
    def longest(self) -> int:
        return len(self.seconds) - 1

    def best_speed(self, rates: Rates) -> tuple[int, float]:
        """Return the best fixed length and its tokens per second, without noise."""
        speeds, expected, reached = [], 1.0, 1.0
        for length, seconds in enumerate(self.seconds):
            speeds.append(expected / seconds)
            if length < self.longest:
                reached *= rates[length]
                expected += reached
        best = int(np.argmax(speeds))
        return best, speeds[best]


@dataclass
class Run:
    """What a policy did.

    Attributes:
        seconds: that its rounds took, without noise.
        tokens: that they committed.
        expected: that they would commit on average, which leaves the luck out.
        rounds: how many of each length.
    """

    seconds: float
    tokens: int
    expected: float
    rounds: dict[int, int]


def simulate(
    lengths: DraftLengthPolicy,
    world: World,
    rates_at: Callable[[int], Rates],
    tokens: int,
    seed: int,
) -> Run:
    """Generate `tokens` tokens; the seconds charged are those without noise."""
    random = np.random.default_rng(seed)
    run = Run(0.0, 0, 0.0, {})
    behind, lag = False, 0
    plan = lengths.plan(0, tokens)
    while run.tokens < tokens:
        context = run.tokens
        rates = rates_at(run.tokens)
        accepted = 0
        while accepted < plan.length and random.random() < rates[accepted]:
            accepted += 1
        left = tokens - run.tokens - accepted - 2
        following = lengths.plan(context + 1, left) if plan.length == 0 else None
        ahead = following is not None and following.length == 0
        seconds = world.seconds[plan.length]
        if plan.length == 0:
            first = world.left if behind else world.cold
            seconds *= first + (1.0 - world.left if ahead else 0.0)
            lag += 1
        else:
            seconds += world.catch_up * (lag if lag > 1 else 0)
            lag = 0
        run.seconds += seconds
        run.tokens += accepted + 1
        run.expected += 1 + float(np.cumprod(rates[: plan.length]).sum())
        run.rounds[plan.length] = run.rounds.get(plan.length, 0) + 1
        observed = seconds * np.exp(world.noise * random.standard_normal())
        observed *= 3.0 if random.random() < world.outliers else 1.0
        outcome = Outcome(plan.length, accepted, float(observed), behind, ahead)
        lengths.note(context, plan, outcome)
        plan = following or lengths.plan(run.tokens, left)
        behind = ahead
    lengths.end()
    return run
