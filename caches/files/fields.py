"""The fields of one cache, read from a live cache or from a file.

This module checks single fields. `field_checks` checks the fields of a cache against
each other, for each kind of cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files.safetensors_reader import FlawError

MAX_COUNT = 2**30  # mlx-lm's positions are int32; this leaves room for more tokens
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
INTEGERS = (mx.int32, mx.int64)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The fields of one cache."""

    name: str  # the name of the cache's class
    numbers: dict[str, int]  # fields that are integers or booleans
    # Fields that are arrays, without those that are None. Items of a sequence have
    # names such as `cache.0`.
    arrays: dict[str, mx.array]


def need(truth: bool, flaw: str) -> None:
    """Raise `flaw` unless `truth` holds."""
    if not truth:
        raise FlawError(flaw)


def check_numbers(leaf: Leaf, names: Iterable[str]) -> None:
    """Require exactly these numbers, none negative; all int but `rotated`, a bool."""
    wanted = set(names)
    need(
        leaf.numbers.keys() == wanted,
        f"it has the numbers {sorted(leaf.numbers)} and needs {sorted(wanted)}",
    )
    for name, value in leaf.numbers.items():
        kind = bool if name == "rotated" else int
        need(type(value) is kind, f"{name} is no {kind.__name__}")
        need(
            0 <= value <= MAX_COUNT,
            f"{name} is {value}, and it is from 0 to {MAX_COUNT}",
        )


def rows_of(leaf: Leaf, keys: str = "keys", values: str = "values") -> int:
    """Return the number of rows of keys and values [batch, heads, rows, dim]."""
    have = (keys in leaf.arrays, values in leaf.arrays)
    need(have[0] == have[1], f"of {keys} and {values} it has one and not the other")
    if not have[0]:
        return 0
    one, other = leaf.arrays[keys], leaf.arrays[values]
    for name, array in ((keys, one), (values, other)):
        need(array.ndim == 4, f"{name} has the shape {array.shape} and not 4 axes")
        need(
            min(array.shape[:2]) > 0,
            f"{name} has the shape {array.shape}: no batch or no heads",
        )
    need(one.shape[3] > 0, f"{keys} has the shape {one.shape}: no head dimension")
    need(
        one.shape[:3] == other.shape[:3],
        f"{keys} has the shape {one.shape} and {values} {other.shape}",
    )
    return int(one.shape[2])


def need_floats(leaf: Leaf, *names: str) -> None:
    """Require a float dtype of each of these arrays that exists."""
    for name in names:
        if name in leaf.arrays:
            dtype = leaf.arrays[name].dtype
            need(dtype in FLOATS, f"{name} is {dtype} and not a float of 16 or 32 bits")


def cut(leaf: Leaf, rows: int, names: Iterable[str] = ("keys", "values")) -> Leaf:
    """Return a leaf with these arrays cut to `rows` rows, or removed if that is 0."""
    arrays = dict(leaf.arrays)
    for name in names:
        if name in arrays and rows == 0:
            del arrays[name]
        elif name in arrays and arrays[name].shape[2] > rows:
            arrays[name] = arrays[name][..., :rows, :]
    return replace(leaf, arrays=arrays)


def need_integers(leaf: Leaf, *names: str) -> list[list[int]]:
    """Require arrays with one integer for each row of a batch; return their values."""
    result = []
    for name in names:
        need(name in leaf.arrays, f"it has no {name}")
        array = leaf.arrays[name]
        need(
            array.ndim == 1 and array.size > 0 and array.dtype in INTEGERS,
            f"{name} is {array.shape} {array.dtype} and not one int32 for each row",
        )
        values: Any = array.tolist()
        need(
            max(map(abs, values)) <= MAX_COUNT,
            f"{name} goes from {min(values)} to {max(values)}",
        )
        result.append(values)
    need(len({len(values) for values in result}) == 1, f"{', '.join(names)} differ")
    return result
