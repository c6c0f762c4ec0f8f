"""A generator's target that is sharded over ranks, and its streams on this rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.distributed.group import RankGroup
from mlx_speculation.engine.distributed.session import RankSession
from mlx_speculation.engine.drafters.draft import Draft, members_of
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import (
    Group,
    HiddenStates,
    Lane,
    Parallel,
    can_join_output,
    has_split_output,
    joined_output,
    keeps_rows_alone,
    mark_of,
    spread_as,
)

# Parts of the target that a drafter on rank 0 may read, and all ranks help to make.
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
            _check_spread(model, 1)
            return None
        return cls(model, result)

    def own_draft(self, draft: Draft | None, prefix_cache: Any) -> Draft | None:
        """Check the target, and return the draft on rank 0, or None on other ranks.

        Raises:
            InvalidRequestError: the target is not sharded, or ranks cannot share the
                draft or the prefix cache.
            UnsupportedModelError: the target cannot be decoded on several ranks.
        """
        how = _check_spread(self._model, self.group.size)
        assert how is not None
        self._fields = {"the model": mark_of(self._model), "parallel": how}
        if prefix_cache is not None:
            raise InvalidRequestError(
                f"prefix_cache cannot be used on the {self.group.size} ranks of this "
                "target: the ranks could drop different tokens from their caches. "
                "Leave prefix_cache out."
            )
        for member in members_of(draft) if self.group.leads else ():
            if any(spread_as(model) is not None for model in member.models):
                raise InvalidRequestError(
                    "The draft model is spread over ranks, but a draft must be whole, "
                    "on rank 0. Load it without a group."
                )
            if not member.on_ranks:
                raise InvalidRequestError(
                    f"draft is of kind {member.kind!r}, but a target on ranks needs "
                    "a model, a lookup, an MTP head or a Drafter."
                )
            # `running` joins a split output layer, and gives it to the head.
            if self._needs_output(member) and not can_join_output(self._model):
                raise UnsupportedModelError(
                    "The MTP head needs the whole output layer of "
                    f"{type(self._model).__module__}, but each rank has a part of it, "
                    "and this model changes the logits after that layer, which is not "
                    "supported. Use a draft model or a lookup."
                )
        return draft if self.group.leads else None

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
                with self.group.inside():
                    output = joined_output(self._model, self.group.group)
                if output is not None:  # on rank 0 only
                    for member in members_of(self._draft):
                        member.take_output(output)
            yield

    def _needs_output(self, draft: Draft) -> bool:
        return draft.reads_output and has_split_output(self._model)


def _check_spread(model: nn.Module, ranks: int) -> Parallel | None:
    """Return how a target is sharded, after a check; None: there is one rank."""
    how = spread_as(model)
    if ranks > 1 and how is None:
        raise InvalidRequestError(
            f"group has {ranks} ranks, but the model on this rank is not split. Load "
            "it with mlx_speculation.load(path, group=group), or call "
            "model.shard(group) first."
        )
    if ranks == 1 and how is not None:
        raise InvalidRequestError(
            f"The model is spread over ranks ({how}), and no group of several ranks "
            "was passed. Pass group=mx.distributed.init()."
        )
    if how == "pipeline" and not keeps_rows_alone(model):
        raise UnsupportedModelError(
            f"{type(model).__module__} has layers whose caches are not rows of keys "
            "and values, such as recurrent layers. When a part of a draft is accepted, "
            "they may have to run again, and in a pipeline all ranks with them. Use "
            "parallel='tensor', or run the whole model on one rank."
        )
    return how
