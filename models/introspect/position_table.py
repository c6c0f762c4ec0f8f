"""The table of learned positions that a model can have, such as GPT-2's.

mlx does not check indices, so a forward past the table's last row reads other memory.
So lanes refuse to feed a text past the table's end. Padding can have positions past the
end too. A hook gives such positions the table's last row: other memory could hold a
NaN, which would reach the rows of the text by 0 x NaN.
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.instance_hooks import Hook, derived
from mlx_speculation.models.introspect.trace import POSITIONS, trace

_RANK = 0


@dataclass(frozen=True, slots=True)
class _Table:
    """An embedding of positions."""

    module: nn.Module  # nn.Embedding or its quantized twin
    first: int  # the row of position 0

    @property
    def positions(self) -> int:
        """Number of positions with a row."""
        return _rows(self.module) - self.first


# By the id of a model. An attribute would be copied and pickled with the model.
_kept: dict[int, tuple[Any, list[_Table]]] = {}


def position_table(model: nn.Module) -> int | None:
    """Return how many positions a model has learned rows for; None: it has no table."""
    return min((table.positions for table in _tables(model)), default=None)


def check_positions(fed: int, seen: int, positions: int | None) -> None:
    """Raise `InvalidRequestError` if `fed` tokens after `seen` do not fit the table."""
    if positions is not None and seen + fed > positions:
        raise InvalidRequestError(
            f"{fed} tokens after {seen} earlier ones do not fit into the model's table "
            f"of {positions} positions. Shorten the text."
        )


def position_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield the position tables, each with its hook."""
    for table in _tables(model, anew=True):
        yield table.module, Hook(_RANK, _bounded)


def _tables(model: nn.Module, *, anew: bool = False) -> list[_Table]:
    """Return a model's position tables, with `anew` after a new search for them."""
    kept = _kept.get(id(model))
    if kept is None or anew:
        forget = partial(_forget, _kept, id(model))
        kept = _kept[id(model)] = (weakref.ref(model, forget), _look(model))
    return kept[1]


def _forget(kept: dict[int, Any], key: int, _: Any) -> None:
    kept.pop(key, None)


def _look(model: nn.Module) -> list[_Table]:
    """Find embeddings at which a forward of two equal tokens reads successive rows."""
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    modules = [each for each in model.modules() if isinstance(each, kinds)]
    result = []
    for call in trace(model).of(modules) if len(modules) > 1 else ():
        indices = call.values[0] if call.method == "__call__" else None
        if isinstance(indices, mx.array) and indices.size == POSITIONS:
            positions: Any = indices.flatten().tolist()
            if positions == [positions[0] + place for place in range(POSITIONS)]:
                result.append(_Table(call.module, positions[0]))
    return result


def _rows(module: nn.Module) -> int:
    weight: mx.array = module["weight"]
    return weight.shape[0]


@functools.cache
def _bounded(kind: Any) -> type[nn.Module]:
    """Return a class that looks up its last row for all positions past the end."""

    def call(self: nn.Module, x: mx.array) -> mx.array:
        result: mx.array = kind.__call__(self, mx.minimum(x, _rows(self) - 1))
        return result

    return derived(kind, {"__call__": call})
