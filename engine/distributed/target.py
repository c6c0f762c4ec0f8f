"""A generator's target that is sharded over ranks, and its streams on this rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.distributed.consistency import (
    check_spread,
    fields_of_model,
)
from mlx_speculation.engine.distributed.group import RankGroup
from mlx_speculation.engine.distributed.session import RankSession
from mlx_speculation.engine.drafters.draft import Draft, members_of
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import (
    Group,
    HiddenStates,
    Lane,
    can_join_output,
    has_split_output,
    joined_output,
    spread_as,
)

# Parts of the target that a drafter on rank 0 may need all ranks for.
STATES, OUTPUT = "hidden states", "the output layer"


class RankedTarget:
    """A target that is sharded over the ranks of a group."""

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        self._model, self.group = model, group
        self._fields: dict[str, Any] = {}
        self._taps: HiddenStates | None = None
        self._draft: Draft | None = None

    @classmethod
    def of(cls, model: nn.Module, group: Group | None) -> "RankedTarget | None":
        """Return a generator's target on its ranks; None: there is one rank.

        Raises:
            InvalidRequestError: `group` is no group, or the model is sharded and there
                is one rank.
            RankMismatchError: the ranks run different versions.
        """
        result = None if group is None else RankGroup.of(group)
        if result is None:
            check_spread(model, 1)
            return None
        return cls(model, result)

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.group.leads

    def own_draft(self, draft: Draft | None, prefix_cache: Any) -> Draft | None:
        """Check the target, and return the draft on rank 0, or None on other ranks.

        Raises:
            InvalidRequestError: the target is not sharded, the draft does not support
                a sharded target, or a prefix cache was passed, of which ranks may drop
                different parts.
            UnsupportedModelError: the target cannot be decoded on several ranks.
        """
        how = check_spread(self._model, self.group.size)
        assert how is not None
        self._fields = fields_of_model(self._model, how)
        if prefix_cache is not None:
            raise InvalidRequestError(
                f"prefix_cache was passed, and the target is on {self.group.size} "
                "ranks, which may drop other parts of it. Leave it out."
            )
        for member in members_of(draft) if self.leads else ():
            if any(spread_as(model) is not None for model in member.models):
                raise InvalidRequestError(
                    "The draft model is spread over ranks, and a draft is whole, on "
                    "rank 0. Load it without a group."
                )
            if not member.on_ranks:
                raise InvalidRequestError(
                    f"draft is of kind {member.kind!r}, and for a target on "
                    "ranks a model, a lookup, an MTP head or a Drafter is needed."
                )
            self._check_output(member)
        return draft if self.leads else None

    def next_stream(self, draft: Draft | None) -> RankSession:
        """Return the session of the next stream, which has not begun."""
        members = members_of(draft)
        needs = [STATES] if any(each.follows for each in members) else []
        if any(self._needs_output(each) for each in members):
            needs.append(OUTPUT)
        self._draft = draft
        return RankSession(self.group, self._fields, needs=needs)

    @contextmanager
    def running(
        self, session: RankSession, target: Lane, around: AbstractContextManager[None]
    ) -> Iterator[None]:
        """Begin a stream on all ranks, inside of the context `around`."""
        with around:
            needs = session.begin()
            if STATES in needs:
                if self._taps is None:
                    self._taps = HiddenStates(self._model, after_norm=True)
                target.taps, target.shows = self._taps, True
            if OUTPUT in needs:
                self._join_output(session)
            yield

    def _join_output(self, session: RankSession) -> None:
        """Give rank 0's heads a whole copy of the sharded output layer."""
        with session.inside():
            output = joined_output(self._model, self.group.group)
        if output is not None:  # on rank 0
            for member in members_of(self._draft):
                member.take_output(output)

    def _needs_output(self, draft: Draft) -> bool:
        return draft.reads_output and has_split_output(self._model)

    def _check_output(self, draft: Draft) -> None:
        """Refuse a head that needs the output layer if its shards cannot be joined.

        Other heads get a whole copy of it when their first stream begins.
        """
        if self._needs_output(draft) and not can_join_output(self._model):
            raise UnsupportedModelError(
                f"The MTP head reads the output layer of {type(self._model).__module__}"
                ", of which each rank has a part, and more is done to its logits than "
                "is known here. Use a draft model or a lookup."
            )


def all_or_none(target: RankedTarget | None) -> AbstractContextManager[None]:
    """Return `RankGroup.all_or_none` of a sharded target; for None do nothing."""
    return nullcontext() if target is None else target.group.all_or_none()
