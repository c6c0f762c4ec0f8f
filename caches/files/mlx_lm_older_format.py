"""The caches of prompt-cache files before mlx-lm 0.32, from 0.20 on.

`state` held arrays only, and `meta_state` the numbers, as texts. What it left out is
worked out where one answer is possible, and refused otherwise: a `ChunkedKVCache` past
its first chunk does not tell its offset, and before 0.31 a `CacheList` does not tell
its members. An `ArraysCache` has lost its lengths and left_padding.
"""

import re
from typing import Any

from mlx_speculation.caches.files.codecs import KINDS, MAX_DEPTH, MEMBERS
from mlx_speculation.caches.files.fields import Leaf, need
from mlx_speculation.caches.files.mlx_lm_key_paths import (
    Values,
    grouped,
    items,
    rows_of_keys,
)
from mlx_speculation.caches.files.safetensors_reader import shown
from mlx_speculation.caches.files.tree import Node, need_known

# Class names of mlx-lm 0.20 to 0.28, and what they are called since.
RENAMED = {"MambaCache": "ArraysCache"}
MAMBA_SLOTS = 2

# `meta_state` before 0.32, by its length; up to 0.26 it had the step as well.
_RING = ("keep", "max_size", "offset", "_idx")
_PACKED = ("offset", "group_size", "bits")
OLDER_NUMBERS: dict[str, dict[int, tuple[str, ...]]] = {
    "RotatingKVCache": {4: _RING, 5: (*_RING[:2], "step", *_RING[2:])},
    "QuantizedKVCache": {3: _PACKED, 4: ("step", *_PACKED)},
    "ChunkedKVCache": {2: ("chunk_size", "start_position")},
    "BatchRotatingKVCache": {4: ("max_size", "_offset", "_idx", "rotated")},
}

_NUMBER = re.compile(r"[0-9]{1,10}")


def older_leaf(name: Any, values: Values, info: Values, place: str, depth: int) -> Node:
    """Return the unchecked node of a cache from its arrays and its `meta_state`."""
    if name == MEMBERS:
        need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")
        need(
            () not in info,
            f"cache {place}, a CacheList of mlx-lm 0.30 or older, does not name its "
            "members",
        )
        groups, said = grouped(values), grouped(info)
        names, infos = items(said.get(0, {}), "members"), grouped(said.get(1, {}))
        need(groups.keys() <= set(range(len(names))), f"cache {place} has odd arrays")
        return tuple(
            older_leaf(
                member, groups.get(i, {}), infos.get(i, {}), f"{place}.{i}", depth + 1
            )
            for i, member in enumerate(names)
        )
    mamba = name == "MambaCache"
    name = RENAMED.get(name, name) if isinstance(name, str) else name
    need_known(name, place)
    need(name != "LayerCache", f"cache {place}: mlx-lm 0.31 had no LayerCache")
    leaf = Leaf(name, _older_numbers(name, info, place), {})
    older = KINDS[name].older
    for path, array in values.items():
        if name == "ArraysCache":
            path = (0, *path)
        fits = bool(path) and path[0] < len(older)
        need(fits, f"cache {place} has an array at {path}")
        leaf.arrays[".".join([older[path[0]], *map(str, path[1:])])] = array
    _complete_older(leaf, len(values), place)
    need(not mamba or len(values) == MAMBA_SLOTS, f"MambaCache {place}: not 2 arrays")
    return leaf


def _older_numbers(name: str, info: Values, place: str) -> dict[str, int]:
    if name not in OLDER_NUMBERS:
        need(info == {(): ""}, f"cache {place}, a {name}, has numbers it should not")
        return {}
    texts = items(info, f"numbers of cache {place}")
    fields = OLDER_NUMBERS[name].get(len(texts))
    need(fields is not None, f"cache {place}, a {name}, has {len(texts)} numbers")
    assert fields is not None
    numbers: dict[str, int] = {}
    for field, text in zip(fields, texts, strict=True):
        if field == "rotated":
            need(text in ("True", "False"), f"rotated is {shown(text)}")
            numbers[field] = text == "True"
        else:
            need(_NUMBER.fullmatch(text) is not None, f"{field} is {shown(text)}")
            numbers[field] = int(text)
    numbers.pop("step", None)
    return numbers


def _complete_older(leaf: Leaf, count: int, place: str) -> None:
    """Work out the numbers that were set from the arrays."""
    if leaf.name in ("KVCache", "ConcatenateKVCache"):
        leaf.numbers["offset"] = rows_of_keys(leaf)
    elif leaf.name == "BatchKVCache":
        leaf.numbers["_idx"] = rows_of_keys(leaf)
    elif leaf.name == "ArraysCache":
        leaf.numbers["slots"] = count
    elif leaf.name == "ChunkedKVCache":
        need(
            leaf.numbers["start_position"] == 0,
            f"cache {place}, a ChunkedKVCache of mlx-lm 0.31 or older, has dropped "
            f"{leaf.numbers['start_position']} positions and does not tell its offset",
        )
        leaf.numbers["offset"] = rows_of_keys(leaf)
