"""A cascade: the drafter that tries several drafters in order, and its draft."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.base import NOTHING, Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.draft import Draft, DraftOptions, TargetInfo
from mlx_speculation.engine.drafters.fault_guard import FaultGuard, NoteFault
from mlx_speculation.engine.drafters.user_drafter import adapted
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane


class CascadeDraft(Draft):
    """Several drafts, one of which drafts in each round.

        draft = CascadeDraft(LookupDraft(), small_model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    With the adaptive draft length, `engine.draft_length.rule` picks the drafter. With a
    fixed length, the first drafter that proposes anything drafts; drafters behind a
    lookup rarely do, since it nearly always proposes something.
    """

    kind = "cascade"

    def __init__(self, *drafters: Any) -> None:  # each a value of `draft=`
        if len(drafters) < 2:
            raise InvalidRequestError(
                f"The cascade has {len(drafters)} drafters, but it needs at least 2. "
                "Pass a single drafter without a cascade."
            )
        self.drafters = drafters

    @property
    def reusable(self) -> bool:
        """Return whether all members are reusable."""
        return all(member.reusable for member in self.members())

    @property
    def trees(self) -> bool:
        """Return whether a member drafts trees; the other members draft chains."""
        return any(member.trees for member in self.members())

    @property
    def models(self) -> list[nn.Module]:
        """The draft models of all members."""
        return [model for member in self.members() for model in member.models]

    def resolved(self, resolve: Callable[[Any], Draft]) -> "CascadeDraft":
        """Return a cascade of the resolved members."""
        return CascadeDraft(*map(resolve, self.drafters))

    def members(self) -> list[Draft]:
        """Return the drafts of a resolved cascade."""
        return [result for draft in self.drafters for result in draft.members()]

    def check(self, target: TargetInfo) -> None:
        """Refuse a target that a member refuses, and a cascade of several heads."""
        heads = sum(member.follows for member in self.members())
        if heads > 1:
            raise InvalidRequestError(
                f"The cascade has {heads} heads, and only one can follow a target. "
                "Leave the others out."
            )
        for member in self.members():
            member.check(target)

    def configured(self, options: DraftOptions) -> "CascadeDraft":
        """Return the cascade with these options for each member."""
        return CascadeDraft(*(each.configured(options) for each in self.members()))

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "CascadeDrafter":
        """Return the drafter of one stream."""
        each = (member.open(lane, sequence, draft_cache) for member in self.members())
        return CascadeDrafter(*map(adapted, each))


def open_guarded(
    draft: Draft,
    lane: Lane,
    sequence: Sequence,
    draft_cache: list[Any] | None,
    note: NoteFault,
) -> list[OpenDrafter]:
    """Return the drafters of one stream; a member's fault disables only this member."""
    result: list[OpenDrafter] = []
    for member in draft.members():
        drafter = adapted(member.open(lane, sequence, draft_cache))
        result.append(FaultGuard(drafter, note, lane if member.follows else None))
    return result


class CascadeDrafter(OpenDrafter):
    """The drafter of one stream that tries its drafters in order."""

    def __init__(self, *drafters: OpenDrafter) -> None:
        self._drafters = drafters
        self._proposing = OpenDrafter()  # made the last proposal; here a placeholder

    @property
    def disabled(self) -> bool:
        """Return whether all drafters have failed."""
        return all(each.disabled for each in self._drafters)

    @property
    def shared(self) -> OpenDrafter:
        """The first drafter, or the cascade itself if that drafter has no model."""
        first = self._drafters[0]
        return self if first.free else first

    @property
    def lanes(self) -> list[Lane | None]:
        """The lanes of all draft models."""
        return [lane for each in self._drafters for lane in each.lanes]

    @property
    def prefix_head(self) -> Any:
        """The head of the first drafter that has one; None: there is no head."""
        heads = (each.prefix_head for each in self._drafters if not each.disabled)
        return next((head for head in heads if head is not None), None)

    @property
    def held(self) -> list[Any]:
        """The arrays and caches of all drafters, for a count of bytes."""
        return [each.held for each in self._drafters]

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Let lookups keep the tokens of the finished stream."""
        for each in self._drafters:
            each.remember(tokens, answer)

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Let the drafters read ahead, each once the one before has finished."""
        return all(each.read_ahead(sequence, fits) for each in self._drafters)

    def begin(self, sequence: Sequence) -> None:
        """Let every drafter begin."""
        self._proposing = OpenDrafter()
        for drafter in self._drafters:
            drafter.begin(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the first draft that is not empty."""
        draft = NOTHING  # the result if each drafter returns NOTHING
        for drafter in self._drafters:
            self._proposing = drafter
            result = drafter.propose(sequence, limit, choose)
            draft = draft if result is NOTHING else result
            if result.length:
                break
            drafter.discard()
        return draft

    def settle(self, accepted: int) -> None:
        """Settle the drafter that made the proposal."""
        self._proposing.settle(accepted)

    def discard(self) -> None:
        """Discard the last proposal; `propose` has already discarded empty ones."""
        self._proposing.discard()
