"""Memory in bytes: held by a generation, and needed by a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Bytes allocated when a generation ends, and the peak of its rounds.

    Attributes:
        draft_weights: weights that only the draft has, and the output rows that were
            copied for a reduced vocabulary.
        target_caches: caches of the target, including allocated rows still empty.
        draft_caches: caches of the draft, and hidden states of the target that the
            draft has not read yet. A custom drafter lists its arrays and caches in an
            attribute `held`.
        rounds: the peak bytes that open rounds needed beside the caches, for a rollback
            or a partial commit: old buffers, recurrent states, recorded inputs.
            Measured in each round wider than all before it, and in every 64th round.
        prefix_cache: rows and restore points that the prefix cache holds.
    """

    target_weights: int
    draft_weights: int
    target_caches: int
    draft_caches: int
    rounds: int
    prefix_cache: int

    @property
    def total(self) -> int:
        """The sum of all parts, which do not overlap."""
        caches = self.target_caches + self.draft_caches + self.prefix_cache
        return self.target_weights + self.draft_weights + caches + self.rounds


# Bytes of the target's weights, bytes of weights that only the draft has, and the
# `id()` of each of these arrays
WeightBytes = tuple[int, int, frozenset[int]]


def weight_bytes(model: nn.Module, modules: Sequence[nn.Module]) -> WeightBytes:
    """Return the `WeightBytes` of a target and of the modules of its draft."""
    target = model.parameters()
    draft = [module.parameters() for module in modules]
    names = frozenset(arrays_in(target, *draft))
    return array_bytes(target), bytes_beside(draft, [target]), names


def held_memory(
    weights: WeightBytes,
    target: Lane,
    draft_lanes: Sequence[Lane | None],
    arrays: Sequence[Any],
    prefix_cache: PrefixCache | None,
) -> Memory:
    """Return the memory of a stream; `arrays` are all that the drafter holds."""
    target_weights, draft_weights, names = weights
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
    """Size of a model's caches, in bytes, from a forward that is built but not run.

    `row` is the size of one token, summed over all layers that keep every token;
    `layer` is its size in the largest of these layers. `states` is the size of all
    sliding windows, when full, and of all recurrent states.
    """

    row: int = 0
    states: int = 0
    layer: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> "CacheSize":
        """Return the size of a model's caches; 0 if the model's forward fails."""
        caches, rows, states = Lane(model).caches, [0], 0
        try:
            model(mx.zeros((1, 1), mx.int32), cache=caches)
        except Exception:  # the first round will raise the error
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
    """Raise InvalidRequestError if a prompt's caches do not fit into the free memory.

    `sizes` are those of the target, draft models and heads. The prefix cache copies the
    rows, and at its restore points the states.
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
            f"points {of[3]}), but only {there} are free. Shorten the prompt, or make "
            "the prefix cache smaller."
        )
