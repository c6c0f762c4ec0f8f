"""Prompt-cache files of mlx-lm: writing the 0.32 layout, reading 0.32 and 0.31.

    0.32   tensors: every item of `state`; numbers, texts and None become arrays
           metadata: 0.KEY the user's value of KEY; 1.I the class name of cache I;
           2.0 the empty text; for the K-th tensor (from 1) that stands for a number,
           a text or None, 2.K.0 its name and 2.K.1 "scalar", "string" or "none"
    0.31   tensors: the arrays of `state`; metadata: 0.I... `meta_state` as texts,
           1.KEY the user's value of KEY, 2.I class names

If the window of a `LayerCache` is not full, `state` does not show the window's size.
The size then comes from `window_sizes` in the metadata, which `caches.files.extension`
writes, or from live caches.
In the 0.31 layout, missing offsets are computed from the keys, a `ChunkedKVCache` that
has dropped rows is refused, and an `ArraysCache` is loaded without lengths and
left_padding.
"""

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.files.field_checks import INTEGERS
from mlx_speculation.caches.files.kinds import KINDS, KNOWN_KINDS, built
from mlx_speculation.caches.files.safetensors_reader import need, shown
from mlx_speculation.caches.types.leaves import leaves

MAX_DEPTH = 8
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
    caches: Sequence[Any], user: dict[str, str]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return tensors and metadata in the 0.32 layout; the writer adds the digest."""
    arrays: dict[str, mx.array] = {}
    kinds: list[Any] = [""]
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
    window_sizes: dict[str, int],
) -> list[Any]:
    """Return the unchecked caches of a file in this layout."""
    texts = {k: v for k, v in metadata.items() if not k.startswith(_USER[layout])}
    names = _tree(_part(texts, "1" if layout == "0.32" else "2"))
    need(isinstance(names, list) and bool(names), "it names no classes of caches")
    values: dict[str, Any] = dict(arrays)
    if layout == "0.32":
        values |= _scalars(arrays, _tree(_part(texts, "2")))
    states = _tree(values)
    need(
        isinstance(states, list) and len(states) == len(names),
        f"it has the states of {len(states)} caches and {len(names)} class names",
    )
    if layout == "0.32":
        return [
            _cache32(name, states[i], f"{i}", window_sizes)
            for i, name in enumerate(names)
        ]
    infos = _tree(_part(texts, "0"))
    need(
        isinstance(infos, list) and len(infos) == len(names),
        f"it has {len(names)} caches, but no list of {len(names)} meta_states",
    )
    return [_cache31(name, states[i], infos[i], f"{i}") for i, name in enumerate(names)]


def window_sizes_of(caches: Sequence[Any]) -> dict[str, int]:
    """Return the window sizes of live `LayerCache`s by their place."""
    return {
        place: leaf.window_size
        for place, leaf in leaves(caches)
        if isinstance(leaf, LayerCache)
    }


def _part(texts: dict[str, str], first: str) -> dict[str, Any]:
    """Return the texts whose names begin with `first`, by the rest of the name."""
    parts = {key.partition(".")[::2]: text for key, text in texts.items()}
    return {rest: text for (step, rest), text in parts.items() if step == first}


def _tree(named: dict[str, Any]) -> Any:
    """Return the values, named like `0.1.2`, as nested lists; refuse gaps."""
    for name in named:
        need(
            _PATH.fullmatch(name) is not None and len(name) < 100,
            f"{shown(name)} is not the name of a tensor or a text in mlx-lm's layout",
        )
    return _nested({tuple(map(int, k.split("."))): v for k, v in named.items()})


def _nested(values: dict[tuple[int, ...], Any]) -> Any:
    if () in values:
        need(len(values) == 1, "the name of one value is the beginning of another name")
        return values[()]
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for (first, *rest), value in values.items():
        groups.setdefault(first, {})[tuple(rest)] = value
    need(
        groups.keys() == set(range(len(groups))),
        "the numbers in the names of its values have gaps",
    )
    return [_nested(groups[i]) for i in range(len(groups))]


def _scalars(arrays: dict[str, mx.array], kinds: Any) -> dict[str, Any]:
    """Return the numbers, texts and None that arrays stand for, by array name."""
    need(isinstance(kinds, list), "its metadata 2 is not a list")
    values = {}
    for index, pair in enumerate(kinds[1:], 1):
        fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        need(
            fits and pair[0] in arrays,
            f"its metadata 2.{index} is not a pair of a tensor's name and its kind",
        )
        values[pair[0]] = _scalar(arrays[pair[0]], pair[1], pair[0])
    return values


def _scalar(array: mx.array, kind: str, name: str) -> Any:
    if kind == "scalar":
        fits = array.ndim == 0 and array.dtype in (*INTEGERS, mx.bool_)
        need(fits, f"{name}, {array.shape} {array.dtype}, is not a whole number")
        return array.item()
    if kind == "string":
        fits = array.ndim == 1 and array.dtype in INTEGERS and 0 < array.size < 100
        need(fits, f"{name}, {array.shape} {array.dtype}, is not a text")
        codes: Any = array.tolist()
        need(
            all(32 <= code < 127 for code in codes),
            f"{name} has characters other than printable ASCII",
        )
        return "".join(map(chr, codes))
    need(
        kind == "none",
        f"{name} is of kind {shown(kind)}; known are scalar, string, none",
    )
    need(array.size == 0, f"{name} stands for None, but has {array.size} values")
    return None


def _need_known(name: Any, place: str) -> None:
    need(
        isinstance(name, str) and name in KINDS,
        f"cache {place} is of the class {shown(name)}; known are "
        f"{', '.join(KNOWN_KINDS)}",
    )


def _need_depth(place: str) -> None:
    depth = place.count(".")
    need(depth < MAX_DEPTH, f"cache {place} is nested more than {MAX_DEPTH} deep")


def _cache32(name: Any, state: Any, place: str, sizes: dict[str, int]) -> Any:
    if name == CacheList.__name__:
        _need_depth(place)
        need(
            isinstance(state, list)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in state),
            f"the members of cache {place} are not pairs of a state and a class name",
        )
        each = enumerate(state)
        return CacheList(
            *(_cache32(kind, one, f"{place}.{i}", sizes) for i, (one, kind) in each)
        )
    _need_known(name, place)
    layout = KINDS[name].layout
    count = len(state) if isinstance(state, list) else 1
    need(
        count == len(layout),
        f"cache {place}, a {name}, has {count} fields and needs {len(layout)}",
    )
    fields = dict(zip(layout, state, strict=True))
    if name == "ConcatenateKVCache":
        fields["offset"] = _rows_of_keys(fields)
    elif name == "LayerCache":
        _complete_layer(fields, place, sizes.get(place, 0))
    return built(name, fields)


def _complete_layer(fields: dict[str, Any], place: str, size: int) -> None:
    """Convert the offset to a number, and add the missing window size."""
    offset, window = fields["offset"], fields["window"]
    scalar = isinstance(offset, mx.array) and offset.ndim == 0
    need(
        scalar and offset.dtype in INTEGERS,
        f"cache {place}, a LayerCache, has no whole number as its offset",
    )
    fields["offset"] = offset.item()
    sized = isinstance(window, mx.array) and window.ndim == 3
    width = window.shape[1] if sized else 0
    if width < fields["offset"]:
        fields["window_size"] = width
    else:
        need(
            size > 0,
            f"cache {place}, a LayerCache, has no window_size in the file: pass the "
            "model's own empty caches as like=",
        )
        fields["window_size"] = size


def _cache31(name: Any, state: Any, info: Any, place: str) -> Any:
    need(isinstance(state, list), f"cache {place} has no list of arrays")
    if name == CacheList.__name__:
        _need_depth(place)
        fits = isinstance(info, list) and [type(x) for x in info] == [list, list]
        need(fits, f"cache {place}, a CacheList, does not name its members, {OLDER}")
        names, infos = info
        fits = len(names) == len(infos) == len(state)
        need(
            fits,
            f"cache {place} has {len(state)} members, {len(names)} class names and "
            f"{len(infos)} meta_states",
        )
        each = enumerate(zip(names, state, infos, strict=True))
        return CacheList(*(_cache31(*one, f"{place}.{i}") for i, one in each))
    need(name != "MambaCache", f"cache {place} is a MambaCache, {OLDER}")
    _need_known(name, place)
    need(name != "LayerCache", f"cache {place}: mlx-lm 0.31 had no LayerCache")
    fields: dict[str, Any] = dict(_numbers31(name, info, place))
    names = KINDS[name].arrays
    if name == "ArraysCache":
        return built(name, {"cache": state, "left_padding": None, "lengths": None})
    need(
        len(state) == len(names),
        f"cache {place}, a {name}, has {len(state)} arrays and needs {len(names)}",
    )
    fields |= dict(zip(names, state, strict=True))
    if name == "ChunkedKVCache":
        start = fields["start_position"]
        need(
            start == 0,
            f"cache {place}, a ChunkedKVCache of mlx-lm 0.31 or older, has dropped "
            f"{start} positions, and its offset is not in the file",
        )
    for number in KINDS[name].numbers:
        if number not in fields:
            fields[number] = _rows_of_keys(fields)
    return built(name, fields)


def _numbers31(name: str, info: Any, place: str) -> dict[str, int]:
    if name not in NUMBERS_031:
        need(info == "", f"cache {place} has a meta_state, but a {name} has none")
        return {}
    texts, fields = info if isinstance(info, list) else [info], NUMBERS_031[name]
    need(
        len(texts) == len(fields),
        f"cache {place}, a {name}, has {len(texts)} numbers and not {len(fields)}, "
        f"{OLDER}",
    )
    numbers: dict[str, int] = {}
    for field, text in zip(fields, texts, strict=True):
        if field == "rotated":
            need(
                text in ("True", "False"),
                f"rotated is {shown(text)}, not True or False",
            )
            numbers[field] = text == "True"
        else:
            number = isinstance(text, str) and _NUMBER.fullmatch(text)
            need(bool(number), f"{field} is {shown(text)}, not a whole number")
            numbers[field] = int(text)
    return numbers


def _rows_of_keys(fields: dict[str, Any]) -> int:
    """Return the number of rows of keys [batch, heads, rows, dim]; 0 without keys."""
    keys = fields["keys"]
    if keys is None:
        return 0
    need(isinstance(keys, mx.array) and keys.ndim == 4, "keys does not have 4 axes")
    return int(keys.shape[2])
