"""Drafts for calibration, with a constant proposal in place of lookups.

The tokens of a lookup depend on the text, the cost of verifying them does not.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDraft
from mlx_speculation.engine.drafters.draft import Draft, members_of
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane


def measured_draft(draft: Draft | None) -> Draft:
    """Return a draft without its lookups; where nothing is left, one in their place."""
    others = [each for each in members_of(draft) if not each.free]
    if len(others) > 1:
        return CascadeDraft(*others)
    return others[0] if others else ConstantDraft()


class ConstantDraft(Draft):
    """Stands for lookups: its drafters propose the last token again and again."""

    kind = "filler"

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "ConstantDrafter":
        """Return the drafter of one stream."""
        return ConstantDrafter()


class ConstantDrafter(OpenDrafter):
    """Proposes the last token again, as often as it is asked to."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose `limit` tokens."""
        tokens = mx.array(sequence.tokens[-1:] * limit, mx.uint32)
        return Proposal(tokens, source=ConstantDraft.kind)
