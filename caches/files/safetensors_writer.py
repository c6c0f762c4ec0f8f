"""Atomic writing of a safetensors file.

The file is written to the same folder under another name, synced to the disk, and then
renamed. After an error the old file is unchanged, and no other file is left.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from mlx_speculation.caches.files.safetensors_reader import (
    DIGEST,
    DTYPES,
    MAX_HEADER,
    FlawError,
    Header,
    Tensor,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def write(
    path: str | os.PathLike[str],
    arrays: dict[str, mx.array],
    metadata: dict[str, str],
    key: bytes | None = None,
) -> None:
    """Write a file atomically, with the digest in metadata[DIGEST].

    A link at `path` is replaced, not followed. The permissions of an existing file are
    kept. With `key`, the digest is an HMAC, and only the owner can read a new file.
    Without it, the digest is a SHA-256.
    """
    header = Header(_tiled(arrays), metadata)
    target = Path(path)
    temporary = target.with_name(f".{target.name[:80]}.{os.urandom(8).hex()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(
            os.open(temporary, flags, 0o600 if key else 0o666), "wb"
        ) as file:
            _write(file, header, arrays, key)
            if target.is_file() and not target.is_symlink():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _tiled(arrays: dict[str, mx.array]) -> dict[str, Tensor]:
    tensors, position = {}, 0
    for name, array in arrays.items():
        stop = position + array.nbytes
        tensors[name] = Tensor(_NAMES[array.dtype], array.shape, position, stop)
        position = stop
    return tensors


def _write(
    file: BinaryIO, header: Header, arrays: dict[str, mx.array], key: bytes | None
) -> None:
    file.write(_header_bytes(header, "0" * 64))
    digest = header.digest(key)
    for array in arrays.values():
        data = _bytes(array)
        digest.update(data)
        file.write(data)
    file.seek(0)
    file.write(_header_bytes(header, digest.hexdigest()))


def _header_bytes(header: Header, digest: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {**header.metadata, DIGEST: digest}}
    for name, tensor in header.tensors.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.start, tensor.stop],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    if len(text) > MAX_HEADER:
        raise FlawError(f"its header has {len(text)} bytes; {MAX_HEADER} is the limit")
    return len(text).to_bytes(8, "little") + text


def _bytes(array: mx.array) -> bytes:
    if array.size == 0:
        return b""
    unsigned = _UNSIGNED[array.dtype.size]
    raw = np.array(mx.contiguous(array).reshape(-1).view(unsigned))
    return raw.astype(raw.dtype.newbyteorder("<"), copy=False).tobytes()


def _sync_folder(folder: Path) -> None:
    """Sync the rename to the disk; ignore errors of file systems that cannot do so."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return
