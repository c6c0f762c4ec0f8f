"""Draft lengths of a cascade: each drafter's own, by its own costs and acceptance.

A lookup's draft takes no time and is seldom wrong for long; that of the model behind it
takes as many steps as it has tokens. One length for both would be wrong for both. So
each drafter has a policy of its own, and is asked for as many tokens as that says:

    planned          lookup 16, model 4: a round of at most 16
    lookup finds 9   the round's costs and acceptance are the lookup's
    it finds none    4 tokens of the model's, whose round it is then
"""

from collections.abc import Sequence
from dataclasses import replace

from mlx_speculation.engine.draft_length.adaptive import AdaptiveDraftLength
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.drafters.cascade import Turns


class CascadeDraftLength:
    """The policies of a cascade's drafters, in their order, and the cascade's turns."""

    by_batch = True

    def __init__(
        self, policies: Sequence[AdaptiveDraftLength], turns: Turns | None = None
    ) -> None:
        self.policies = list(policies)
        self.turns = turns or Turns()

    @property
    def longest(self) -> int:
        """No plan is longer."""
        return max(policy.longest for policy in self.policies)

    def plan(self, context: int, limit: int) -> Plan:
        """Return the longest of all plans, which has them all."""
        each = tuple(policy.plan(context, limit) for policy in self.policies)
        chosen = max(each, key=lambda plan: plan.length)
        lengths = tuple(plan.length for plan in each)
        for plan in each:  # steps that a policy wants to see are no draft's of another
            if plan.reason == "measure":
                chosen, lengths = plan, (0,) * len(each)
        self.turns.lengths = lengths
        return replace(chosen, each=each)

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Let the drafter's policy learn whose draft it was, or all from a step."""
        answered = self.turns.answered if feedback.drafted else None
        each = zip(self.policies, plan.each, strict=True)
        for index, (policy, own) in enumerate(each):
            if answered is None or index == answered:
                policy.note(context, own, feedback)
            elif index > answered or own.length == 0:  # was not asked, and lags
                policy.passed_over(feedback.accepted + 1)

    def end(self) -> None:
        """Let every policy learn from the stream."""
        for policy in self.policies:
            policy.end()
