"""The trees of mlx-lm's prompt-cache files, where `0.1.2` is a place."""

import re
from typing import Any

from mlx_speculation.caches.files.fields import Leaf, need
from mlx_speculation.caches.files.safetensors_reader import shown

Path = tuple[int, ...]
Values = dict[Path, Any]

_PATH = re.compile(r"(0|[1-9][0-9]{0,5})(\.(0|[1-9][0-9]{0,5}))*")


def path_of(text: str) -> Path:
    """Return the steps of a place such as `0.1.2`."""
    need(
        _PATH.fullmatch(text) is not None and len(text) < 100,
        f"{shown(text)} is no place of a tensor or a text in mlx-lm's layout",
    )
    return tuple(int(part) for part in text.split("."))


def grouped(values: Values) -> dict[int, Values]:
    """Return the values by the first step of their path, and the rest of it."""
    found: dict[int, Values] = {}
    for path, value in values.items():
        need(bool(path), "a value stands where a list is due")
        found.setdefault(path[0], {})[path[1:]] = value
    return found


def items(values: Values, what: str) -> list[Any]:
    """Return the items of a list that has no gaps and no lists inside."""
    need(
        all((i,) in values for i in range(len(values))) and bool(values),
        f"its list of {what} has gaps",
    )
    return [values[(i,)] for i in range(len(values))]


def rows_of_keys(leaf: Leaf) -> int:
    """Return the rows of keys [batch, heads, rows, dim]; 0 without keys."""
    keys = leaf.arrays.get("keys")
    need(keys is None or keys.ndim == 4, "keys has not 4 axes")
    return 0 if keys is None else int(keys.shape[2])
