"""mlx-lm's own prompt-cache files, of the 0.32 layout and of the one before.

    0.32   tensors: every item of `state`, numbers and None as arrays too
           metadata: 0.KEY the user's, 1.I class names, 2.K.0 and 2.K.1 which tensors
           are no arrays and what they are instead; 2.0 is empty
    0.31   tensors: the arrays of `state`; metadata: 0.I... `meta_state` as texts,
           1.KEY the user's, 2.I class names

Files hold no tokens. A `LayerCache` whose window is not full does not tell its size,
which `like` then gives.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files.codecs import KINDS, MAX_DEPTH, MEMBERS
from mlx_speculation.caches.files.fields import INTEGERS, Leaf, need
from mlx_speculation.caches.files.mlx_lm_key_paths import (
    Values,
    grouped,
    items,
    path_of,
    rows_of_keys,
)
from mlx_speculation.caches.files.mlx_lm_older_format import older_leaf
from mlx_speculation.caches.files.safetensors_reader import shown
from mlx_speculation.caches.files.tree import Node, need_known


def layout_of(metadata: dict[str, str]) -> str | None:
    """Return "0.32" or "0.31", the version whose layout this is; None for neither."""
    if metadata.get("2.0") == "" and "1.0" in metadata:
        return "0.32"
    if metadata.get("2.0") and any(
        key.split(".")[:2] == ["0", "0"] for key in metadata
    ):
        return "0.31"
    return None


def read_native(
    layout: str,
    metadata: dict[str, str],
    arrays: dict[str, mx.array],
    like: Sequence[Any],
) -> tuple[list[Node], dict[str, str]]:
    """Return unchecked nodes and the user's metadata of a file of this layout."""
    mine, user, classes = ("1", "0", "1") if layout == "0.32" else ("0", "1", "2")
    texts = {k: v for k, v in metadata.items() if not k.startswith(f"{user}.")}
    said = grouped({path_of(key): text for key, text in texts.items()})
    names = items(said.get(int(classes), {}), "class names")
    values: Values = {path_of(name): array for name, array in arrays.items()}
    if layout == "0.32":
        values = _with_scalars(values, said.get(2, {}))
    each = grouped(values)
    infos = grouped(said.get(int(mine), {}))
    for index in each:
        need(index < len(names), f"it has arrays of cache {index} of {len(names)}")
    nodes = []
    for i, name in enumerate(names):
        live = _member(like, i)
        node = (
            _leaf32(name, each.get(i, {}), f"{i}", live, 0)
            if layout == "0.32"
            else older_leaf(name, each.get(i, {}), infos.get(i, {}), f"{i}", 0)
        )
        nodes.append(node)
    start = len(user) + 1
    return nodes, {k[start:]: v for k, v in metadata.items() if k not in texts}


def _member(caches: Sequence[Any], index: int) -> Any:
    return caches[index] if index < len(caches) else None


def _with_scalars(values: Values, kinds: Values) -> Values:
    """Turn the arrays that stand for numbers, texts and None into these."""
    values = dict(values)
    for index, entry in grouped(kinds).items():
        if index == 0:
            continue
        pair = items(entry, "numbers")
        need(len(pair) == 2, f"its entry {index} of numbers has {len(pair)} texts")
        path, kind = path_of(pair[0]), pair[1]
        array = values.get(path)
        need(isinstance(array, mx.array), f"it has no tensor {shown(pair[0])}")
        values[path] = _scalar(array, kind, pair[0])
    return values


def _scalar(array: Any, kind: str, name: str) -> Any:
    if kind == "scalar":
        fits = array.ndim == 0 and array.dtype in (*INTEGERS, mx.bool_)
        need(fits, f"{name} is {array.shape} {array.dtype} and no whole number")
        return array.item()
    if kind == "string":
        fits = array.ndim == 1 and array.dtype in INTEGERS and 0 < array.size < 100
        need(fits, f"{name} is {array.shape} {array.dtype} and no text")
        codes = array.tolist()
        need(all(32 <= code < 127 for code in codes), f"{name} is no plain text")
        return "".join(map(chr, codes))
    need(kind == "none", f"{name} is of the kind {shown(kind)}")
    need(array.size == 0, f"{name} stands for None and has {array.size} values")
    return None


def _leaf32(name: Any, values: Values, place: str, live: Any, depth: int) -> Node:
    if name == MEMBERS:
        need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")
        groups = grouped(values)
        members = []
        for i in range(len(groups)):
            need(i in groups, f"the members of cache {place} have gaps")
            pair = grouped(groups[i])
            need(
                pair.keys() == {0, 1} and () in pair[1], f"cache {place}.{i} is no pair"
            )
            members.append(
                _leaf32(
                    pair[1][()],
                    pair[0],
                    f"{place}.{i}",
                    _member(getattr(live, "caches", ()), i),
                    depth + 1,
                )
            )
        return tuple(members)
    need_known(name, place)
    leaf = Leaf(name, {}, {})
    layout = KINDS[name].layout
    groups = grouped(values)
    need(
        groups.keys() == set(range(len(layout))),
        f"cache {place}, a {name}, has {len(groups)} fields and needs {len(layout)}",
    )
    for index, parts in groups.items():
        for path, value in parts.items():
            _put(leaf, ".".join([layout[index], *map(str, path)]), value)
    if name == "ArraysCache":
        leaf.numbers["slots"] = len(items(groups[0], "slots"))
    elif name == "ConcatenateKVCache":
        leaf.numbers["offset"] = rows_of_keys(leaf)
    elif name == "LayerCache":
        _complete_layer(leaf, place, live)
    return leaf


def _put(leaf: Leaf, field: str, value: Any) -> None:
    if isinstance(value, mx.array):
        leaf.arrays[field] = value
    elif value is not None:
        leaf.numbers[field] = value


def _complete_layer(leaf: Leaf, place: str, live: Any) -> None:
    """The offset is an array there, and the window's size is left out."""
    offset, window = leaf.arrays.pop("offset", None), leaf.arrays.get("window")
    need(
        offset is not None and offset.ndim == 0 and offset.dtype in INTEGERS,
        f"cache {place}, a LayerCache, has no offset",
    )
    assert offset is not None
    value: Any = offset.item()
    leaf.numbers["offset"] = int(value)
    held = window.shape[1] if window is not None and window.ndim == 3 else 0
    if held < leaf.numbers["offset"]:
        leaf.numbers["window_size"] = held
    else:
        size = getattr(live, "window_size", 0)
        need(
            size > 0,
            f"cache {place}, a LayerCache, does not tell its window_size: pass like=, "
            "the model's own empty caches",
        )
        leaf.numbers["window_size"] = int(size)
