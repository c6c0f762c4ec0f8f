"""Random damage to files of caches.

Most damaged files are well-formed safetensors. Most of those in our own format have a
correct digest, as an attacker would write it: the caches' own checks must find the
damage.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_speculation.caches.files.kinds import KINDS
from mlx_speculation.caches.files.safetensors_reader import (
    DIGEST,
    DTYPES,
    Header,
    Tensor,
)

Random = np.random.Generator
_DESCRIPTION = "0.mlx_speculation.description"
ODD: list[Any] = [0, 1, 2, -1, 3, 7, 8, 16, 255, 256, 2**30, 2**31, 2**63, 2**70]
ODD += [True, False, None, 1.0, 1e300, "", "1", "a", "True", "-1", [], {}, [[]]]
CLASSES = [*KINDS, "CacheList", "MambaCache", "_BaseCache", "TokenBuffer", "os.system"]


@dataclass(slots=True)
class Draft:
    """Parts of a file: dtype, shape and data of each tensor, and the metadata."""

    tensors: dict[str, tuple[str, list[Any], bytes]]
    metadata: dict[str, Any]


def take_apart(raw: bytes) -> Draft:
    length = int.from_bytes(raw[:8], "little")
    entries, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    metadata = entries.pop("__metadata__")
    return Draft(
        {
            name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
            for name, e in entries.items()
        },
        metadata,
    )


def header_of(draft: Draft) -> tuple[dict[str, Any], bytes]:
    entries: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, part) in draft.tensors.items():
        stop = len(data) + len(part)
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), stop],
        }
        data += part
    return entries, data


def put_together(draft: Draft, rng: Random) -> tuple[dict[str, Any], bytes]:
    """Return header and data; nine in ten files of our format get the right digest."""
    entries, data = header_of(draft)
    if DIGEST in draft.metadata and rng.random() < 0.9:
        tensors = {
            name: Tensor(e["dtype"], e["shape"], *e["data_offsets"])
            for name, e in entries.items()
        }
        digest = Header(tensors, draft.metadata).digest()
        digest.update(data)
        draft.metadata[DIGEST] = digest.hexdigest()
    return {"__metadata__": draft.metadata, **entries}, data


def raw_file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def pick(rng: Random, items: Any) -> Any:
    choices = list(items)
    return choices[rng.integers(len(choices))]


# Functions that change a `Draft`. All keep its shapes and data consistent.


def _some(draft: Draft, rng: Random) -> str:
    return str(pick(rng, draft.tensors))


def reshape(draft: Draft, rng: Random) -> None:
    name = _some(draft, rng)
    dtype, shape, data = draft.tensors[name]
    shape = [*shape]
    if not shape or rng.random() < 0.1:
        shape = pick(rng, [[], [1], [0], [2, *shape], [*shape, 1], shape[1:]])
    else:
        axis = rng.integers(len(shape))
        shape[axis] = pick(rng, [0, 1, 2, shape[axis] + 1, max(shape[axis] - 1, 0), 9])
    size = int(np.prod(shape)) * DTYPES[dtype].size
    draft.tensors[name] = (dtype, shape, (data * (size // (len(data) or 1) + 1))[:size])
    if len(draft.tensors[name][2]) != size:
        draft.tensors[name] = (dtype, shape, bytes(size))


def reshape_all(draft: Draft, rng: Random) -> None:
    """Change one dimension of all tensors that share it, such as keys and values."""
    size = pick(
        rng, [s for _, shape, _ in draft.tensors.values() for s in shape] or [1]
    )
    new = pick(rng, [0, 1, size + 1, max(size - 1, 0), 2 * size])
    for name, (dtype, shape, data) in draft.tensors.items():
        shape = [new if s == size else s for s in shape]
        wanted = int(np.prod(shape)) * DTYPES[dtype].size
        draft.tensors[name] = (dtype, shape, data.ljust(wanted, b"\0")[:wanted])


def retype(draft: Draft, rng: Random) -> None:
    """Change a dtype, half of the time to one of the same width."""
    name = _some(draft, rng)
    dtype, shape, data = draft.tensors[name]
    same = [d for d in DTYPES if DTYPES[d].size == DTYPES[dtype].size]
    other = pick(rng, same if rng.random() < 0.5 else DTYPES)
    size = int(np.prod(shape)) * DTYPES[other].size
    draft.tensors[name] = (other, shape, data.ljust(size, b"\0")[:size])


def renumber(draft: Draft, rng: Random) -> None:
    """Change a number in one of the smallest tensors, such as an offset."""
    name = pick(rng, sorted(draft.tensors, key=lambda n: len(draft.tensors[n][2]))[:8])
    dtype, shape, data = draft.tensors[name]
    if len(data) >= 4:
        values = np.frombuffer(data[: len(data) // 4 * 4], dtype="<i4").copy()
        index = rng.integers(len(values))
        values[index] = pick(rng, [0, 1, -1, 2**31 - 1, -(2**31), values[index] ^ 1])
        data = values.tobytes() + data[len(data) // 4 * 4 :]
    draft.tensors[name] = (dtype, shape, data)


def rename(draft: Draft, rng: Random) -> None:
    one, two = _some(draft, rng), _some(draft, rng)
    if rng.random() < 0.5:
        draft.tensors[one], draft.tensors[two] = draft.tensors[two], draft.tensors[one]
        return
    parts = one.split(".")
    i = rng.integers(len(parts))
    parts[i] = pick(
        rng, ["0", "1", "7", "00", "-1", "keys", "offset", "cache", "", "é"]
    )
    draft.tensors[".".join(parts)] = draft.tensors.pop(one)


def remove(draft: Draft, rng: Random) -> None:
    if rng.random() < 0.6:
        del draft.tensors[_some(draft, rng)]
    else:
        del draft.metadata[pick(rng, draft.metadata)]


def flip(draft: Draft, rng: Random) -> None:
    name = _some(draft, rng)
    dtype, shape, data = draft.tensors[name]
    if data:
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        draft.tensors[name] = (dtype, shape, bytes(changed))


def restate(draft: Draft, rng: Random) -> None:
    """Change the description in a file of our format, or a text of the metadata."""
    if _DESCRIPTION not in draft.metadata or rng.random() < 0.5:
        _restate_native(draft.metadata, rng)
        return
    if rng.random() < 0.05:
        draft.metadata[pick(rng, draft.metadata)] = pick(rng, ["", "2", "caches", "[]"])
        return
    try:
        described = json.loads(draft.metadata[_DESCRIPTION])
    except (ValueError, RecursionError):
        described = None  # an earlier change broke it
    if not isinstance(described, (dict, list)):
        return
    _restate_json(described, rng)
    text = json.dumps(described)
    if rng.random() < 0.05:
        text = pick(rng, [text[:-1], "[" * 5000, text.replace("1", "NaN"), "null"])
    draft.metadata[_DESCRIPTION] = text


def _restate_native(metadata: dict[str, Any], rng: Random) -> None:
    key = pick(rng, metadata)
    kind = rng.integers(4)
    if kind == 0:
        metadata[key] = pick(rng, CLASSES)
    elif kind == 1:
        metadata[key] = str(pick(rng, ODD))
    elif kind == 2:
        metadata[pick(rng, ["0.0", "1.0", "2.0", f"{key}.0", "9", "é"])] = metadata[key]
    else:
        other = pick(rng, metadata)
        metadata[key], metadata[other] = metadata[other], metadata[key]


def _restate_json(value: Any, rng: Random) -> None:
    """Change one item of JSON, at a random depth."""
    while value:
        key = pick(rng, value if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], (dict, list)) or rng.random() < 0.1:
            break
        if not value[key]:
            break
        value = value[key]
    else:
        return
    old, kind = value[key], rng.integers(6)
    if type(old) is int and rng.random() < 0.5:
        value[key] = old + int(pick(rng, [-1, 1, 2, -old]))
    elif kind == 1 or isinstance(old, str):
        value[key] = pick(rng, CLASSES)
    elif kind == 2:
        del value[key]
    elif kind == 3 and isinstance(value, dict):
        value[pick(rng, ["offset", "keep", "_idx", "rotated", "members"])] = old
    elif kind == 4 and isinstance(value, list):
        value.append(old)
    else:
        value[key] = pick(rng, ODD)


CHANGES: list[Callable[[Draft, Random], None]] = [
    reshape,
    reshape_all,
    retype,
    renumber,
    rename,
    remove,
    flip,
    restate,
    restate,
    restate,
]


def mutated(raw: bytes, other: bytes, rng: Random) -> bytes:
    """Return a damaged copy of `raw`, perhaps with parts of another file, `other`."""
    kind = rng.random()
    if kind < 0.15:
        return _raw_damage(raw, other, rng)
    draft = take_apart(raw)
    if kind < 0.22:
        _splice(draft, take_apart(other), rng)
    else:
        for _ in range(pick(rng, [1, 1, 1, 2, 3])):
            if draft.tensors and draft.metadata:
                pick(rng, CHANGES)(draft, rng)
    header, data = put_together(draft, rng)
    text = json.dumps(header)
    if kind > 0.85:
        text = _header_damage(header, text, rng)
    return raw_file(text.encode("utf-8", "surrogatepass"), data)


def _splice(draft: Draft, other: Draft, rng: Random) -> None:
    if rng.random() < 0.3:
        draft.metadata = other.metadata
    elif rng.random() < 0.5:
        draft.tensors = other.tensors
    else:
        for name in other.tensors.keys() & draft.tensors.keys():
            if rng.random() < 0.5:
                draft.tensors[name] = other.tensors[name]


def _header_damage(header: dict[str, Any], text: str, rng: Random) -> str:
    names = [name for name in header if name != "__metadata__"]
    if not names or rng.random() < 0.3:
        at = int(rng.integers(len(text)))
        bit = str(
            pick(rng, ["", "[", '"', "0", "NaN", "{" * 2000, "\ud800", ",", '"a":1,'])
        )
        return text[:at] + bit + text[at + 1 :]
    entry = header[pick(rng, names)]
    key = pick(rng, entry)
    if key == "dtype" or rng.random() < 0.1:
        entry[key] = pick(rng, ["F8", "C64", "F64", *DTYPES, *ODD])
    elif entry[key]:
        index = rng.integers(len(entry[key]))
        entry[key][index] = pick(rng, [*ODD, entry[key][index] + 1])
    return json.dumps(header)


def _raw_damage(raw: bytes, other: bytes, rng: Random) -> bytes:
    kind, at = rng.integers(6), int(rng.integers(len(raw)))
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw + raw[at:]
    if kind == 2:
        return raw[:at] + other[at:]
    if kind == 3:
        length = pick(rng, [0, 1, 8, 2**24, 2**31, 2**60, 2**64 - 1, at])
        return int(length).to_bytes(8, "little") + raw[8:]
    changed = bytearray(raw)
    for _ in range(pick(rng, [1, 1, 4])):
        changed[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def files_of_031() -> list[Path]:
    folder = Path(__file__).parents[2] / "caches" / "files" / "data"
    return sorted(folder.glob("mlx_lm_0.31.*.safetensors"))
