"""mlx-lm's prompt-cache files: writes the layout of 0.32, reads those of 0.32 and 0.31.

    0.32   tensors: every item of `state`; numbers and None are arrays too
           metadata: 0.KEY the user's value of KEY; 1.I the class name of cache I;
           2.0 the empty text; for the K-th tensor (from 1) that stands for a number,
           a text or None, 2.K.0 its name and 2.K.1 "scalar", "string" or "none"
    0.31   tensors: the arrays of `state`; metadata: 0.I... `meta_state` as texts,
           1.KEY the user's, 2.I class names

The layouts have no place for tokens; `extension` puts them into the user's metadata. If
the window of a `LayerCache` is not full, its size is not in `state`, and comes from the
extension or from `like`. In the 0.31 layout, offsets are computed from the keys. A
`ChunkedKVCache` past its first chunk is refused there, since its offset is missing, and
an `ArraysCache` comes without lengths and left_padding.
"""

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files import tree
from mlx_speculation.caches.files.codecs import KINDS, MAX_DEPTH, MEMBERS
from mlx_speculation.caches.files.fields import INTEGERS, Leaf, need
from mlx_speculation.caches.files.safetensors_reader import shown
from mlx_speculation.caches.files.tree import Node, need_known

Path = tuple[int, ...]  # (0, 1, 2) for the tensor or text at `0.1.2`
Values = dict[Path, Any]

_PATH = re.compile(r"(0|[1-9][0-9]{0,5})(\.(0|[1-9][0-9]{0,5}))*")
_NUMBER = re.compile(r"[0-9]{1,10}")

# The numbers in `meta_state` in the 0.31 layout, for the kinds that have some.
NUMBERS_031: dict[str, tuple[str, ...]] = {
    "RotatingKVCache": ("keep", "max_size", "offset", "_idx"),
    "QuantizedKVCache": ("offset", "group_size", "bits"),
    "ChunkedKVCache": ("chunk_size", "start_position"),
    "BatchRotatingKVCache": ("max_size", "_offset", "_idx", "rotated"),
}
_USER = {"0.32": "0.", "0.31": "1."}  # the prefix of the user's metadata
OLDER = "so mlx-lm before 0.31 wrote the file; files of 0.31 and 0.32 can be loaded"


def layout_of(metadata: dict[str, str]) -> str | None:
    """Return the version of the layout, "0.32" or "0.31"; None: neither."""
    if metadata.get("2.0") == "" and "1.0" in metadata:
        return "0.32"
    if metadata.get("2.0") and any(
        key.split(".")[:2] == ["0", "0"] for key in metadata
    ):
        return "0.31"
    return None


def user_metadata(layout: str, metadata: dict[str, str]) -> dict[str, str]:
    """Return the user metadata of a file."""
    prefix = _USER[layout]
    return {
        k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)
    }


def native_parts(
    nodes: Sequence[Node], user: dict[str, str]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return tensors and metadata in the 0.32 layout; the writer adds the digest."""
    arrays: dict[str, mx.array] = {}
    kinds: list[Any] = [""]
    caches = tree.build_all(nodes)
    states: Any = tree_flatten([cache.state for cache in caches])
    for place, value in states:
        if isinstance(value, mx.array):
            arrays[place] = value
            continue
        if value is None:
            kind, array = "none", mx.array([])
        elif isinstance(value, str):
            kind, array = "string", mx.array([*map(ord, value)])
        else:
            kind, array = "scalar", mx.array(value)
        kinds.append((place, kind))
        arrays[place] = array
    classes = [type(cache).__name__ for cache in caches]
    metadata: Any = tree_flatten([user, classes, kinds])
    return arrays, dict(metadata)


def read_native(
    layout: str,
    metadata: dict[str, str],
    arrays: dict[str, mx.array],
    like: Sequence[Any],
    window_sizes: dict[str, int],
) -> list[Node]:
    """Return the unchecked nodes of a file in this layout."""
    mine, classes = ("1", "1") if layout == "0.32" else ("0", "2")
    texts = {k: v for k, v in metadata.items() if not k.startswith(_USER[layout])}
    said = _grouped({_path_of(key): text for key, text in texts.items()})
    names = _items(said.get(int(classes), {}), "class names")
    values: Values = {_path_of(name): array for name, array in arrays.items()}
    if layout == "0.32":
        values = _with_scalars(values, said.get(2, {}))
    each = _grouped(values)
    infos = _grouped(said.get(int(mine), {}))
    for index in each:
        need(index < len(names), f"cache {index} follows the {len(names)} named caches")
    if layout == "0.31":
        return [
            _leaf31(name, each.get(i, {}), infos.get(i, {}), f"{i}", 0)
            for i, name in enumerate(names)
        ]
    sizes = window_sizes_of(like) | window_sizes
    return [
        _leaf32(name, each.get(i, {}), f"{i}", sizes, 0) for i, name in enumerate(names)
    ]


def window_sizes_of(caches: Sequence[Any], prefix: str = "") -> dict[str, int]:
    """Return the window sizes of live `LayerCache`s by their place."""
    sizes: dict[str, int] = {}
    for i, cache in enumerate(caches):
        place = f"{prefix}{i}"
        if isinstance(cache, LayerCache):
            sizes[place] = cache.window_size
        sizes |= window_sizes_of(getattr(cache, "caches", ()), f"{place}.")
    return sizes


def _with_scalars(values: Values, kinds: Values) -> Values:
    """Replace arrays that stand for numbers, texts and None by these values."""
    values = dict(values)
    for index, entry in _grouped(kinds).items():
        if index == 0:
            continue
        pair = _items(entry, "numbers")
        need(len(pair) == 2, f"2.{index} has {len(pair)} texts, not name and kind")
        path, kind = _path_of(pair[0]), pair[1]
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


def _leaf32(
    name: Any, values: Values, place: str, sizes: dict[str, int], depth: int
) -> Node:
    if name == MEMBERS:
        need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")
        groups = _grouped(values)
        members = []
        for i in range(len(groups)):
            need(i in groups, f"the members of cache {place} have gaps")
            pair = _grouped(groups[i])
            need(
                pair.keys() == {0, 1} and () in pair[1],
                f"cache {place}.{i} is not a pair of a state and a class name",
            )
            members.append(
                _leaf32(pair[1][()], pair[0], f"{place}.{i}", sizes, depth + 1)
            )
        return tuple(members)
    need_known(name, place)
    leaf = Leaf(name, {}, {})
    layout = KINDS[name].layout
    groups = _grouped(values)
    need(
        groups.keys() == set(range(len(layout))),
        f"cache {place}, a {name}, has {len(groups)} fields and needs {len(layout)}",
    )
    for index, parts in groups.items():
        for path, value in parts.items():
            _put(leaf, ".".join([layout[index], *map(str, path)]), value)
    if name == "ArraysCache":
        leaf.numbers["slots"] = len(_items(groups[0], "slots"))
    elif name == "ConcatenateKVCache":
        leaf.numbers["offset"] = _rows_of_keys(leaf)
    elif name == "LayerCache":
        _complete_layer(leaf, place, sizes.get(place, 0))
    return leaf


def _put(leaf: Leaf, field: str, value: Any) -> None:
    if isinstance(value, mx.array):
        leaf.arrays[field] = value
    elif value is not None:
        leaf.numbers[field] = value


def _complete_layer(leaf: Leaf, place: str, size: int) -> None:
    """Move the offset from arrays to numbers, and add the missing window size."""
    offset, window = leaf.arrays.pop("offset", None), leaf.arrays.get("window")
    need(
        offset is not None and offset.ndim == 0 and offset.dtype in INTEGERS,
        f"cache {place}, a LayerCache, has no offset",
    )
    assert offset is not None
    value: Any = offset.item()
    leaf.numbers["offset"] = int(value)
    width = window.shape[1] if window is not None and window.ndim == 3 else 0
    if width < leaf.numbers["offset"]:
        leaf.numbers["window_size"] = width
    else:
        need(
            size > 0,
            f"cache {place}, a LayerCache, does not tell its window_size: pass like=, "
            "the model's own empty caches",
        )
        leaf.numbers["window_size"] = size


def _leaf31(name: Any, values: Values, info: Values, place: str, depth: int) -> Node:
    """Return the unchecked node of a cache from its arrays and its `meta_state`."""
    if name == MEMBERS:
        return _list31(values, info, place, depth)
    need(name != "MambaCache", f"cache {place} is a MambaCache, {OLDER}")
    need_known(name, place)
    need(name != "LayerCache", f"cache {place}: mlx-lm 0.31 had no LayerCache")
    leaf = Leaf(name, _numbers31(name, info, place), {})
    layout = KINDS[name].arrays
    for path, array in values.items():
        if name == "ArraysCache":
            path = (0, *path)
        fits = bool(path) and path[0] < len(layout)
        need(fits, f"cache {place} has an array at {path}")
        leaf.arrays[".".join([layout[path[0]], *map(str, path[1:])])] = array
    _complete31(leaf, len(values), place)
    return leaf


def _list31(values: Values, info: Values, place: str, depth: int) -> Node:
    need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")
    need(
        () not in info,
        f"cache {place}, a CacheList, does not name its members, {OLDER}",
    )
    groups, said = _grouped(values), _grouped(info)
    names, infos = _items(said.get(0, {}), "members"), _grouped(said.get(1, {}))
    need(groups.keys() <= set(range(len(names))), f"cache {place} has odd arrays")
    return tuple(
        _leaf31(member, groups.get(i, {}), infos.get(i, {}), f"{place}.{i}", depth + 1)
        for i, member in enumerate(names)
    )


def _numbers31(name: str, info: Values, place: str) -> dict[str, int]:
    if name not in NUMBERS_031:
        need(info == {(): ""}, f"cache {place}, a {name}, has numbers it should not")
        return {}
    texts, fields = _items(info, f"numbers of cache {place}"), NUMBERS_031[name]
    need(
        len(texts) == len(fields),
        f"cache {place}, a {name}, has {len(texts)} numbers and not {len(fields)}, "
        f"{OLDER}",
    )
    numbers: dict[str, int] = {}
    for field, text in zip(fields, texts, strict=True):
        if field == "rotated":
            need(text in ("True", "False"), f"rotated is {shown(text)}")
            numbers[field] = text == "True"
        else:
            need(_NUMBER.fullmatch(text) is not None, f"{field} is {shown(text)}")
            numbers[field] = int(text)
    return numbers


def _complete31(leaf: Leaf, count: int, place: str) -> None:
    """Compute from the arrays the numbers that are not in the 0.31 layout."""
    if leaf.name in ("KVCache", "ConcatenateKVCache"):
        leaf.numbers["offset"] = _rows_of_keys(leaf)
    elif leaf.name == "BatchKVCache":
        leaf.numbers["_idx"] = _rows_of_keys(leaf)
    elif leaf.name == "ArraysCache":
        leaf.numbers["slots"] = count
    elif leaf.name == "ChunkedKVCache":
        need(
            leaf.numbers["start_position"] == 0,
            f"cache {place}, a ChunkedKVCache of mlx-lm 0.31 or older, has dropped "
            f"{leaf.numbers['start_position']} positions and does not tell its offset",
        )
        leaf.numbers["offset"] = _rows_of_keys(leaf)


def _path_of(text: str) -> Path:
    """Return the path of a name such as `0.1.2`."""
    need(
        _PATH.fullmatch(text) is not None and len(text) < 100,
        f"{shown(text)} is no place of a tensor or a text in mlx-lm's layout",
    )
    return tuple(int(part) for part in text.split("."))


def _grouped(values: Values) -> dict[int, Values]:
    """Return the values by the first step of their path, and then by the rest."""
    result: dict[int, Values] = {}
    for path, value in values.items():
        need(bool(path), "a value stands where a list is due")
        result.setdefault(path[0], {})[path[1:]] = value
    return result


def _items(values: Values, what: str) -> list[Any]:
    """Return the items of a list; refuse gaps and nested lists."""
    need(
        all((i,) in values for i in range(len(values))) and bool(values),
        f"its list of {what} has gaps",
    )
    return [values[(i,)] for i in range(len(values))]


def _rows_of_keys(leaf: Leaf) -> int:
    """Return the number of rows of keys [batch, heads, rows, dim]; 0 without keys."""
    keys = leaf.arrays.get("keys")
    need(keys is None or keys.ndim == 4, "keys has not 4 axes")
    return 0 if keys is None else int(keys.shape[2])
