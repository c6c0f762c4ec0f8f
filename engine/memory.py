"""Memory of a generation, and the estimate for a prompt, in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import (
    PrefixCache,
    array_bytes,
    arrays_in,
    bytes_beside,
    leaves,
)
from mlx_speculation.environment import free_memory
from mlx_speculation.errors import InvalidRequestError
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
    arrays: Sequence[Any],
    prefix_cache: PrefixCache | None,
) -> Memory:
    """Count the bytes of what a stream's target and draft hold."""
    target_weights, draft_weights, names = weights.bytes
    lanes = [target, *draft_lanes]
    known = names | arrays_in(target.caches).keys()
    result = arrays_in(arrays).items()
    return Memory(
        target_weights=target_weights,
        draft_weights=draft_weights,
        target_caches=array_bytes(target.caches),
        draft_caches=sum(array.nbytes for name, array in result if name not in known),
        rounds=sum(lane.round_bytes for lane in lanes if lane is not None),
        prefix_cache=0 if prefix_cache is None else prefix_cache.nbytes,
    )


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes that the caches of a model will have, from a forward that is not run.

    Attributes:
        row: of one token, where all of them are kept.
        states: of all windows and recurrent states.
        layer: of one token in the largest layer.
    """

    row: int = 0
    states: int = 0
    layer: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> "CacheSize":
        """Return the size of a model's caches; 0 where it cannot be known."""
        caches, rows, states = Lane(model).caches, [0], 0
        try:
            model(mx.zeros((1, 1), mx.int32), cache=caches)
        except Exception:  # what a round makes of it is that round's
            return cls()
        for _, leaf in leaves(caches):
            size, keys = array_bytes(leaf), getattr(leaf, "keys", None)
            while isinstance(keys, list | tuple):
                keys = keys[0]
            window = getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", 0)
            if keys is None:
                states += size
            elif window:
                states += size // keys.shape[-2] * window
            else:
                rows.append(size // keys.shape[-2])
        return cls(sum(rows), states, max(rows))


def check_prompt(
    sizes: Sequence[CacheSize], tokens: int, cache: PrefixCache | None
) -> None:
    """Refuse a prompt whose caches would not fit, before the first of it is read.

    Args:
        sizes: of the target, draft models and heads.
        tokens: of the prompt.
        cache: keeps a copy of the rows, and the states at its restore points.

    Raises:
        InvalidRequestError: names what it needs and what there is.
    """
    rows = sum(size.row for size in sizes) * tokens
    states = sum(size.states for size in sizes)
    kept, points = 0, 0
    if cache is not None:
        room = max(0, cache.max_bytes - cache.nbytes)
        points = min(room, states * (tokens // cache.every + 2))
        kept = min(room - points, rows)
    needed, free = rows + states + points + kept, free_memory()
    if free is not None and needed > free:
        parts = (needed, rows, states, kept, points, free)
        total, *of, there = (f"{each / 1e9:.2f} GB" for each in parts)
        raise InvalidRequestError(
            f"The prompt has {tokens} tokens, whose caches need {total} (rows {of[0]}, "
            f"windows and states {of[1]}; in the prefix cache rows {of[2]}, restore "
            f"points {of[3]}), and {there} are free. Shorten it, or make the prefix "
            "cache smaller."
        )
