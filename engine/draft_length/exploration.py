"""What a stream may lose in trials of a parked draft, before its share of time grows.

A new text may be drafted well where the last one was not, so each stream may try at
once; where streams try in vain, one after the other, the next ones may lose less. And
where drafts have saved time before, part of that may be lost again: a draft that was
parked by bad luck in one text is found sooner, while one that has never paid costs no
more than the share.
"""

from dataclasses import dataclass

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


@dataclass(slots=True)
class Allowance:
    """What a generator's next stream may lose in trials at once, in plain steps.

    Attributes:
        carried: what the streams before have not spent of their share, or overspent.
        in_vain: streams since the last one that drafted, which tried to.
        saved: plain steps that drafts have saved, of late.
    """

    carried: float = 0.0
    in_vain: int = 0
    saved: float = 0.0

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
