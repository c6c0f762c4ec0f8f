"""What a generation holds in memory, in bytes."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import PrefixCache, array_bytes, bytes_beside
from mlx_speculation.engine.cheaper import own_module
from mlx_speculation.engine.drafts import lanes_of, members
from mlx_speculation.models import Lane


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the arrays that were held when a generation ended, as allocated.

    Attributes:
        target_weights: of the target.
        draft_weights: of the draft, without what it shares with the target; the rows
            of a reduced vocabulary are in it. A lookup has none.
        target_caches: of the target, rows that are free yet included.
        draft_caches: of the draft, with those states of the target that it has not
            read yet. What a drafter of your own holds is in it as far as it has an
            attribute `held`, arrays and caches in a list.
        rounds: the most that was seen in an open round of target and draft model
            beside their caches, to undo it or to keep a part: old buffers, recurrent
            states, recorded inputs. It is looked at in the first of the widest rounds
            and in every 64th.
        prefix_cache: in the generator's prefix cache, of earlier requests, and restore
            points of running ones.
    """

    target_weights: int
    draft_weights: int
    target_caches: int
    draft_caches: int
    rounds: int
    prefix_cache: int

    @property
    def total(self) -> int:
        """All of them; the parts do not overlap."""
        caches = self.target_caches + self.draft_caches + self.prefix_cache
        return self.target_weights + self.draft_weights + caches + self.rounds


def held_memory(
    model: nn.Module,
    draft: Any,
    target: Lane,
    drafter: Any,
    prefix_cache: PrefixCache | None,
    more: Any = (),
) -> Memory:
    """Count what a stream's target and draft hold.

    Args:
        model: the target.
        draft: the draft of the generator.
        target: the target's lane.
        drafter: the drafter of the stream.
        prefix_cache: of the generator.
        more: modules that the draft uses beside its own.
    """
    weights = model.parameters()
    modules = [module for member in members(draft) if (module := own_module(member))]
    own = [module.parameters() for module in [*modules, *more]]
    drafting = [getattr(member, "held", ()) for member in members(drafter)]
    lanes = [target, *(lane for lane in lanes_of(drafter) if lane is not None)]
    return Memory(
        target_weights=array_bytes(weights),
        draft_weights=bytes_beside(own, [weights]),
        target_caches=array_bytes(target.caches),
        draft_caches=bytes_beside(drafting, [target.caches, weights, *own]),
        rounds=sum(lane.round_bytes for lane in lanes),
        prefix_cache=0 if prefix_cache is None else prefix_cache.nbytes,
    )
