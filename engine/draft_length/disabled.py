"""Runs of plain steps while drafting is parked: decided and learnt from together.

To decide and to learn takes some 0.09 ms in a plain step, four times what it takes in a
loop, since between two steps the model's weights put the code out of the processor's
caches. That is more than a hundredth of a step of 6 ms, and hardly anything that it
looks at has changed since the step before.
"""

from mlx_speculation.engine.draft_length.base import Outcome, Plan

# Plain steps that one decision holds for; a trial begins so many tokens later at most.
STEPS = 8


class Parked:
    """The plan of a run of plain steps, and what they took.

    A step is only kept where its time alone tells something, see `keep`.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._left = 0
        self._steps: list[tuple[int, float]] = []

    def begin(self, plan: Plan) -> Plan:
        """Let a plan hold for the steps after this one too, and return it."""
        self._plan, self._left = plan, STEPS - 1
        return plan

    def next(self) -> Plan | None:
        """Return the plan of the next step; None: it has to be decided."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._plan

    def stop(self) -> None:
        """Let the next step be decided."""
        self._left = 0

    def keep(self, context: int, plan: Plan, outcome: Outcome) -> bool:
        """Keep what a step took for later; return whether that is all it tells."""
        alone = plan.reason == "plain" and outcome.steady and not outcome.fresh
        if alone:
            self._steps.append((context, outcome.seconds))
        return alone

    def taken(self) -> list[tuple[int, float]]:
        """Return the context and the seconds of each step that was kept, once."""
        steps, self._steps = self._steps, []
        return steps
