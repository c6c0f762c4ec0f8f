"""What stands for a lookup in a calibration."""

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Choose, Draft
from mlx_speculation.engine.prompt import Sequence


class ConstantDrafter:
    """Proposes the last token again, as often as it is asked to.

    What a lookup proposes depends on the text, what it costs does not. It has no state,
    so that many streams may share one.
    """

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Propose `limit` tokens."""
        return Draft(mx.array(sequence.tokens[-1:] * limit, mx.uint32), source="filler")

    def settle(self, accepted: int) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""
