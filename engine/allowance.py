"""What a stream may lose in trials of a parked draft, before its share of time grows.

A new text may be drafted well where the last one was not, so each stream may try at
once; where streams try in vain, one after the other, the next ones may lose less.
"""

from dataclasses import dataclass

# In plain steps, and what is left of it after a stream that has tried in vain. Over
# requests of 64 tokens with a draft that is always wrong, all is spent each time where
# nothing is taken away: 4 steps of 64.
FIRST_TRIAL = 4.0
IN_VAIN = 0.7


@dataclass(slots=True)
class Allowance:
    """What a generator's next stream may lose in trials at once, in plain steps.

    Attributes:
        carried: what the streams before have not spent of their share, or overspent.
        in_vain: streams since the last one that drafted, which tried to.
    """

    carried: float = 0.0
    in_vain: int = 0

    @property
    def steps(self) -> float:
        """So much; less after each stream that has tried in vain."""
        return max(self.carried, FIRST_TRIAL * IN_VAIN**self.in_vain)

    def end(self, left: float, *, drafted: bool, tried: bool) -> None:
        """Learn from a stream that has ended, and what it left of its allowance."""
        self.carried = max(-FIRST_TRIAL, min(FIRST_TRIAL, left))
        if drafted:
            self.in_vain = 0
        elif tried:
            self.in_vain += 1
