"""Who wrote each token: the draft, the target where the draft ended, or a step alone.

With k = 4 drafts of which 2 are accepted a round emits three tokens:

    accepted, place 0    accepted, place 1    correction

and with all 4 accepted five, the last a bonus. A round without drafts emits a step.
"""

from dataclasses import dataclass
from typing import Literal

Writer = Literal["step", "accepted", "correction", "bonus"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a token.

    Attributes:
        writer: "accepted" for a drafted token; "correction" or "bonus" for the
            target's own after it; "step" for the target's without a draft.
        place: of an accepted token in its draft, from 0; None for the others.
    """

    writer: Writer
    place: int | None = None


STEP = Origin("step")


def origin_of(index: int, accepted: int, drafted: int) -> Origin:
    """Return who wrote the token of a round's row.

    Args:
        index: of the row, from 0 to `accepted`.
        accepted: how many drafted tokens were.
        drafted: how many tokens were drafted.
    """
    if index < accepted:
        return Origin("accepted", index)
    if not drafted:
        return STEP
    return Origin("bonus" if accepted == drafted else "correction")
