"""While drafts do not pay: runs of plain steps, and what trials of a draft may lose.

A new text may be drafted well where the last one was not, so each stream may try at
once; where streams try in vain, one after the other, the next ones may lose less. And
where drafts have saved time before, part of that may be lost again: a draft that was
given up by bad luck in one text is found sooner, while one that has never paid costs no
more than the share.
"""

from dataclasses import dataclass

from mlx_speculation.engine.draft_length.base import Outcome, Plan

# In plain steps, and what is left of it after a stream that has tried in vain. Over
# requests of 64 tokens with a draft that is always wrong, all is spent each time where
# nothing is taken away: 4 steps of 64.
FIRST_TRIAL = 4.0
IN_VAIN = 0.7
# What short streams may leave to each other of their share of time: enough for a draft
# that has to read a prompt of a thousand tokens or two before it can be tried.
MOST_CARRIED = 12.0
# Of what drafts have saved, in earlier streams and in this one, the share that trials
# may lose, what a stream leaves of it to the one after the next, and the most of it. In
# simulated requests of 144 tokens, of which every second begins with 12 that no draft
# foresees, drafts are worth 1.51 plain steps a step, 1.25 with a share of 0, 1.53 with
# 0.4 (the text and machine of tests/engine/draft_length/test_adaptive.py).
SAVED_SHARE = 0.2
SAVED_STAYS = 0.5
MOST_SAVED = 100.0

# Plain steps that one decision holds for; a trial begins so many tokens later at most.
PLAIN_STEPS = 8


@dataclass(slots=True)
class Allowance:
    """What a generator's next stream may lose in trials at once, in plain steps."""

    # What the streams before have not spent of their share, or overspent
    carried: float = 0.0
    in_vain: int = 0  # streams since the last one that drafted, which tried to
    saved: float = 0.0  # plain steps that drafts have saved, of late

    @property
    def steps(self) -> float:
        """So much; less after each stream that has tried in vain."""
        return max(self.carried, FIRST_TRIAL * IN_VAIN**self.in_vain)

    def of_saved(self, here: float) -> float:
        """Return what may be lost beside that, where a stream has saved so much."""
        return SAVED_SHARE * min(MOST_SAVED, max(0.0, self.saved + here))

    def end(
        self, left: float, *, drafted: bool, tried: bool, saved: float = 0.0
    ) -> None:
        """Learn from a stream that has ended, and what it left of its allowance."""
        self.saved = max(0.0, SAVED_STAYS * self.saved + saved)
        self.carried = max(-FIRST_TRIAL, min(MOST_CARRIED, left))
        if drafted:
            self.in_vain = 0
        elif tried:
            self.in_vain += 1


class PlainRun:
    """The plan of a run of plain steps, and what they took.

    One decision holds for several steps, which are learnt from together: that takes
    some 0.09 ms in a plain step, more than a hundredth of a step of 6 ms, and hardly
    anything that it looks at has changed since the step before. A step is only kept
    where its time alone tells something, see `keep`.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._left = 0
        self._steps: list[tuple[int, float]] = []

    def begin(self, plan: Plan) -> Plan:
        """Let a plan hold for the steps after this one too, and return it."""
        self._plan, self._left = plan, PLAIN_STEPS - 1
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
