"""Reading safetensors files, even if they are cut, corrupted or hostile.

A file is an 8-byte length, a JSON header and the data:

    {"__metadata__": {"a": "text"}, "keys": {"dtype": "F16", "shape": [1, 2],
     "data_offsets": [0, 4]}}                                       4 bytes of data

The tensors have to tile the data from its first byte to the end of the file, so no
array is larger than the file. This is checked before an array is made. An array is read
as unsigned integers of the same width, which keeps all bits.

Every flaw raises `FlawError`.
"""

import hashlib
import hmac
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from mlx_speculation import json_files

DIGEST = "0.mlx_speculation.digest"  # the key of the digest in the metadata
MAX_HEADER = 2**24
MAX_DIM = 2**31 - 1
MAX_DIMS = 8
MAX_EMPTY = 2**31 - 1  # limit of the product of an empty tensor's nonzero dimensions

DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}


class FlawError(Exception):
    """A flaw of a file or a cache. The caller adds the name of the file or cache."""


def need(truth: bool, flaw: str) -> None:
    """Raise a `FlawError` with the text `flaw`, unless `truth` holds."""
    if not truth:
        raise FlawError(flaw)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header; its data are the bytes [start, stop) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; `tensors` are in the order of their data."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def digest(self, key: bytes | None = None) -> Any:
        """Return a SHA-256 object (with key: HMAC) of the header without its digest."""
        metadata = {k: v for k, v in self.metadata.items() if k != DIGEST}
        tensors = {
            name: [t.dtype, t.shape, t.start, t.stop]
            for name, t in self.tensors.items()
        }
        text = json.dumps([tensors, metadata], sort_keys=True)
        if key is not None:
            return hmac.new(key, text.encode(), "sha256")
        return hashlib.sha256(text.encode())


def shown(value: object) -> str:
    """Return a short text for a value from a file."""
    if not isinstance(value, (str, int, float, type(None))):
        return f"a {type(value).__name__}"  # repr of a deep list can fail
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_json(raw: bytes, what: str) -> Any:
    """Parse UTF-8 JSON; refuse duplicate keys, NaN, infinity and deep nesting."""
    try:
        return json_files.parse_json(raw, unique_keys=True, finite=True)
    except json_files.JsonFlawError as error:
        raise FlawError(f"{what} {error}") from error


@contextmanager
def opened(
    path: str | os.PathLike[str], *, follow: bool = True
) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yield it and its size. Without `follow`, refuse a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= 0 if follow else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise FlawError(f"it cannot be opened ({error})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FlawError("it is a folder or a device and not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file, status.st_size
    finally:
        os.close(descriptor)


def read_header(file: BinaryIO, size: int) -> Header:
    """Read and check the header. The next read then begins with the data."""
    if size < 8:
        raise FlawError(f"it has {size} bytes, and a safetensors file has 8 or more")
    length = int.from_bytes(_read(file, 8), "little")
    if length > size - 8:
        raise FlawError(
            f"its header should have {length} bytes, but only {size - 8} follow"
        )
    if length > MAX_HEADER:
        raise FlawError(f"its header has {length} bytes, and {MAX_HEADER} is the limit")
    entries = parse_json(_read(file, length), "the header")
    if not isinstance(entries, dict):
        raise FlawError(f"its header is {shown(entries)} and not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FlawError("its __metadata__ is not a JSON object of strings")
    tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    _check_tiles(ordered, size - 8 - length)
    return Header(dict(ordered), metadata)


def _tensor(name: str, entry: Any) -> Tensor:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != keys:
        raise FlawError(
            f"the entry of {shown(name)} does not have exactly the keys "
            f"{', '.join(sorted(keys))}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise FlawError(f"{shown(name)} has dtype {shown(dtype)}; known are {known}")
    if not _counts(shape) or len(shape) > MAX_DIMS or max(shape, default=0) > MAX_DIM:
        raise FlawError(
            f"the shape of {shown(name)} is not a list of at most {MAX_DIMS} whole "
            f"numbers from 0 to {MAX_DIM}"
        )
    if not _counts(offsets) or len(offsets) != 2:
        raise FlawError(f"the offsets of {shown(name)} are not two whole numbers")
    start, stop = offsets
    wanted = math.prod(shape) * DTYPES[dtype].size
    if stop - start != wanted:
        raise FlawError(
            f"{shown(name)} needs {wanted} bytes, but its data_offsets are "
            f"[{start}, {stop})"
        )
    if wanted == 0 and math.prod(d for d in shape if d) > MAX_EMPTY:
        raise FlawError(
            f"{shown(name)} is empty, and the product of its dimensions other than 0 "
            f"is above {MAX_EMPTY}"
        )
    return Tensor(dtype, tuple(shape), start, stop)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_tiles(ordered: list[tuple[str, Tensor]], size: int) -> None:
    position = 0
    for name, tensor in ordered:
        if tensor.start != position:
            raise FlawError(
                f"{shown(name)} begins at byte {tensor.start} of the data instead of "
                f"{position}"
            )
        position = tensor.stop
    if position != size:
        raise FlawError(
            f"its tensors take {position} bytes of data, but the file has {size}"
        )


def read_arrays(file: BinaryIO, header: Header, digest: Any = None) -> dict[str, Any]:
    """Read and evaluate every tensor; add the data to `digest`.

    Call `read_header` first, which leaves the file at the data.
    """
    arrays = {}
    for name, tensor in header.tensors.items():
        data = _read(file, tensor.stop - tensor.start)
        if digest is not None:
            digest.update(data)
        dtype = DTYPES[tensor.dtype]
        if not data:
            arrays[name] = mx.zeros(tensor.shape, dtype)
            continue
        raw = np.frombuffer(data, dtype=f"<u{dtype.size}")
        if tensor.dtype == "BOOL" and raw.max() > 1:
            raise FlawError(f"{shown(name)} is BOOL, but holds the byte {raw.max()}")
        arrays[name] = mx.array(raw).view(dtype).reshape(tensor.shape)
    mx.eval(list(arrays.values()))
    return arrays


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise FlawError(f"it ended after {len(data)} of {count} bytes: it was cut")
    return data
