"""The arrays that caches, journals and drafters hold, and their bytes.

The bytes are those of whole arrays, unused rows included. An array that occurs twice
counts once. A lazy array counts as if it were evaluated. The weights of models do not
count.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_OWN = ("mlx_speculation.", "mlx_lm.")
_PLAIN = (str, int, float, bool, bytes, NoneType, type, nn.Module)


def arrays_in(*things: Any) -> dict[int, mx.array]:
    """Return all arrays in lists, tuples, dicts, caches and journals, by identity."""
    result: dict[int, mx.array] = {}
    _collect(things, result, set())
    return result


def array_bytes(*things: Any) -> int:
    """Return the bytes of all arrays in `things`."""
    return sum(array.nbytes for array in arrays_in(*things).values())


def bytes_beside(things: Sequence[Any], known: Sequence[Any]) -> int:
    """Return the bytes of the arrays in `things` that `known` does not hold."""
    others = arrays_in(*known)
    result = arrays_in(*things)
    return sum(array.nbytes for name, array in result.items() if name not in others)


def _collect(thing: Any, result: dict[int, mx.array], seen: set[int]) -> None:
    if isinstance(thing, mx.array):
        result[id(thing)] = thing
        return
    if isinstance(thing, _PLAIN) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, list | tuple):
        for item in thing:
            _collect(item, result, seen)
    elif isinstance(thing, dict):
        for item in thing.values():
            _collect(item, result, seen)
    elif type(thing).__module__.startswith(_OWN):
        _collect(getattr(thing, "__dict__", None), result, seen)
        for kind in type(thing).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                _collect(getattr(thing, name, None), result, seen)
