"""What a generation holds in memory, in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import PrefixCache, array_bytes, arrays_in, bytes_beside
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


class Weights:
    """The weights of a target and its draft, looked at when they are first asked for.

    Only then: to look through a large model takes milliseconds, and in a batch rows end
    all the time.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._model, self._modules = model, modules

    @cached_property
    def bytes(self) -> tuple[int, int, frozenset[int]]:
        """Those of the target, of the draft beside it, and the names of all arrays."""
        target = self._model.parameters()
        draft = [module.parameters() for module in self._modules]
        names = frozenset(arrays_in(target, *draft))
        return array_bytes(target), bytes_beside(draft, [target]), names


def held_memory(
    weights: Weights,
    target: Lane,
    draft_lanes: Sequence[Lane | None],
    held: Sequence[Any],
    prefix_cache: PrefixCache | None,
) -> Memory:
    """Count the bytes of what a stream's target and draft hold."""
    target_weights, draft_weights, names = weights.bytes
    lanes = [target, *draft_lanes]
    known = names | arrays_in(target.caches).keys()
    found = arrays_in(held).items()
    return Memory(
        target_weights=target_weights,
        draft_weights=draft_weights,
        target_caches=array_bytes(target.caches),
        draft_caches=sum(array.nbytes for name, array in found if name not in known),
        rounds=sum(lane.round_bytes for lane in lanes if lane is not None),
        prefix_cache=0 if prefix_cache is None else prefix_cache.nbytes,
    )
