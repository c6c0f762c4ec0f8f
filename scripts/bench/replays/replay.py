"""Replays traces of greedy texts through a draft length policy, without a clock.

A trace has the result of each draft from each position (see `traces`), and a `Machine`
has the cost of each round, so a policy gets the feedback that it would have got. The
rounds are those of `engine.round.decoder`: a plain step submits the next one, which is
in flight when the next round begins; a draft of that round follows the step's token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_speculation.engine.draft_length.base import (
    DraftLengthPolicy,
    Feedback,
    Plan,
)

# The fixed lengths that a policy is compared with.
FIXED = (0, 1, 2, 3, 4, 6, 8, 12, 15)
MACHINES = ("cpu", "h100", "mac", "linear")


@dataclass(frozen=True)
class Text:
    """A greedy text, and the proposals of drafters at each of its tokens.

    Attributes:
        context: number of tokens of the prompt.
        right: for each drafter, the number of drafted tokens that agree with the text.
        proposed: for each drafter, the most tokens that it drafts there.
    """

    context: int
    right: tuple[Sequence[int], ...]
    proposed: tuple[Sequence[int], ...]

    def __len__(self) -> int:
        return len(self.right[0])

    def requests(self, tokens: int) -> Iterator["Text"]:
        """Cut the text into requests of `tokens` tokens; the rest is dropped."""
        for start in range(0, max(1, len(self) - tokens + 1), tokens):
            stop = start + tokens
            yield Text(
                self.context + start,
                tuple(each[start:stop] for each in self.right),
                tuple(each[start:stop] for each in self.proposed),
            )


@dataclass(frozen=True)
class Machine:
    """Costs of rounds, in plain steps.

    Attributes:
        rounds: for each drafter, the cost of a round by its number of drafted tokens.
        left: the rest of a plain step that is in flight when a round begins.
        cold: a plain step that was not in flight, when no next one is submitted.
        noise: factors of the observed times of successive rounds, in a cycle.
    """

    rounds: Sequence[Sequence[float]]
    left: float = 0.0
    cold: float = 1.0
    noise: Sequence[float] = (1.0,)


@dataclass
class Replayed:
    """Result of one request or several.

    Attributes:
        steps: cost of its rounds, in plain steps.
        tokens: number of emitted tokens.
        decisions: the plan and the feedback of each round; None: not kept.
    """

    steps: float = 0.0
    tokens: int = 0
    decisions: list[tuple[Plan, Feedback]] | None = None

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step."""
        return self.tokens / self.steps


def replay(
    policy: DraftLengthPolicy, machine: Machine, text: Text, result: Replayed
) -> None:
    """Generate a text, and add its rounds to `result`."""
    at, behind, rounds = 0, False, 0
    plan: Plan | None = None
    next_plan: Plan | None = None
    while at < len(text):
        budget, context = len(text) - at, text.context + at
        limit = budget - 1 - behind
        if plan is None:
            plan = policy.plan(context, limit)
        if plan.length == 0 and next_plan is None:
            next_plan = policy.plan(context + 1, budget - 2)
        drafter, drafted, right = _drafted(plan, text, at, behind, limit)
        accepted = 0
        if drafted > 0:
            accepted = min(max(0, right - behind), drafted)
            emitted, ahead = accepted + 1 + behind, False
            steps = machine.rounds[drafter][drafted] + machine.left * behind
        else:
            emitted = 1
            ahead = plan.length > 0 or (next_plan is not None and next_plan.length == 0)
            steps = machine.left if behind else machine.cold
            steps += (1.0 - machine.left) * ahead
        emitted = min(emitted, budget)
        observed = steps * machine.noise[rounds % len(machine.noise)]
        outcome = Feedback(drafted, min(accepted, emitted), observed, behind, ahead)
        policy.note(context, plan, outcome)
        if result.decisions is not None:
            result.decisions.append((plan, outcome))
        at, rounds, behind = at + emitted, rounds + 1, ahead
        result.steps += steps
        result.tokens += emitted
        plan, next_plan = next_plan, None


def _drafted(
    plan: Plan, text: Text, at: int, behind: bool, limit: int
) -> tuple[int, int, int]:
    """Return the index of the drafter, its drafted tokens and how many are right."""
    length = min(plan.length, limit)
    if length <= 0:
        return 0, 0, 0
    for drafter, (result, right) in enumerate(
        zip(text.proposed, text.right, strict=True)
    ):
        count = min(int(result[at]), length + behind)
        if count > 0:
            return drafter, max(0, count - behind), int(right[at])
    return 0, 0, 0


def texts_of(
    traces: dict[str, np.ndarray], pairs: Sequence[str]
) -> dict[str, list[Text]]:
    """Return the texts of pairs by group; several pairs of a target are a cascade."""
    places = [name.split("/") for name in traces if name.startswith(f"{pairs[0]}/")]
    groups = dict.fromkeys(place[1] for place in places if len(place) == 3)

    def rows(group: str, what: str, row: int, tokens: int) -> tuple[list[int], ...]:
        each = [traces[f"{pair}/{group}/{what}"] for pair in pairs]
        return tuple(array[row, :tokens].tolist() for array in each)

    result: dict[str, list[Text]] = {}
    for group in groups:
        contexts = traces[f"{pairs[0]}/{group}/context"]
        tokens = traces[f"{pairs[0]}/{group}/tokens"]
        result[group] = [
            Text(
                int(context),
                rows(group, "right", row, count),
                rows(group, "found", row, count),
            )
            for row, (context, count) in enumerate(zip(contexts, tokens, strict=True))
        ]
    return result


# Cost of drafting one token on a GPU, in plain steps, by the kind of drafter.
_DRAFTING = {"lookup": 0.0, "model": 0.4, "mtp": 0.1, "eagle": 0.1, "assistant": 0.1}
# Plain steps to verify a number of drafted tokens. With a llama of 8 B on an H100,
# nearly all of a round is the host's time; on an M4 Pro it is 4-bit products.
_H100 = {0: 1.0, 1: 1.7, 2: 1.72, 4: 1.81, 8: 1.89, 16: 1.96}
_MAC = {0: 1.0, 1: 1.03, 2: 1.22, 3: 1.47, 5: 2.07, 7: 2.69, 11: 3.0, 16: 3.4}
# A machine without BLAS: each row costs a plain step, and no draft pays.
_LINEAR = {0: 1.0, 16: 17.0}


def machines_of(
    traces: dict[str, np.ndarray], pairs: Sequence[str]
) -> dict[str, Machine]:
    """Return the machines for a replay of a pair, or of a cascade of several."""
    kinds = [pair.split("-")[1] for pair in pairs]

    def made(verify: dict[int, float], left: float, cold: float) -> Machine:
        each = [_spread(verify) + np.arange(17) * _DRAFTING[kind] for kind in kinds]
        return Machine([one.tolist() for one in each], left, cold)

    measured = [
        _spread(dict(zip(traces[f"{p}/lengths"], traces[f"{p}/costs"], strict=True)))
        for p in pairs
    ]
    return {
        "cpu": Machine([one.tolist() for one in measured]),
        "h100": made(_H100, 0.5, 1.0),
        "mac": made(_MAC, 0.9, 1.05),
        "linear": made(_LINEAR, 0.0, 1.0),
    }


def _spread(costs: dict[int, float]) -> np.ndarray:
    """Return the costs of 0 to 16 drafted tokens, interpolated linearly."""
    return np.interp(range(17), list(costs), list(costs.values()))


def run(
    make: Callable[[], DraftLengthPolicy],
    machine: Machine,
    texts: Sequence[Text],
    tokens: int,
    *,
    explain: bool = False,
) -> Replayed:
    """Generate texts as requests of `tokens` tokens, each with a new policy."""
    result = Replayed(decisions=[] if explain else None)
    for text in texts:
        for request in text.requests(tokens):
            replay(make(), machine, request, result)
    return result
