"""Cheap hashes of a target and of its head, to tell whether they are still the same.

Large files are only sampled. The hashes cover:

    target   config.json; for each file that mlx-lm loads, its name, size and header
             (names, dtypes, shapes and places of all tensors), and 64 blocks of 4 KiB,
             evenly spread, the first and the last included
    head     for each of its tensors, the name in `MtpHead`, dtype, shape, and all
             bytes; of a tensor above 1 MiB, 64 blocks as above

So another training, precision, conversion or quantization changes a hash. A change of
single weights in a large tensor may not.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.mtp.files import HeadFiles, Stored
from mlx_speculation.models.safetensors_layout import places_in, weight_files

BLOCK = 4096
BLOCKS = 64
WHOLE = 1 << 20


def target_hash(folder: Path) -> str:
    """Return the hash of a target's folder, 64 hexadecimal digits.

    Raises:
        ModelFolderError: a file cannot be read.
    """
    result = hashlib.sha256()
    try:
        _add(result, (folder / "config.json").read_bytes())
        for file in weight_files(folder):
            size = file.stat().st_size
            _add(result, file.name.encode(), str(size).encode())
            with file.open("rb") as opened:
                _add(result, opened.read(_data_start(opened)))
                _add(result, *_sampled(opened, 0, size, whole=0))
    except OSError as error:
        raise _unreadable(folder, error) from error
    return result.hexdigest()


def head_hash(files: HeadFiles) -> str:
    """Return the hash of a head, 64 hexadecimal digits.

    Raises:
        ModelFolderError: a file cannot be read.
    """
    result = hashlib.sha256()
    by_file: dict[Path, list[tuple[str, Stored]]] = {}
    for name, stored in sorted(files.tensors.items()):
        by_file.setdefault(stored.file, []).append((name, stored))
    for file, tensors in by_file.items():
        places = places_in(file)
        try:
            with file.open("rb") as opened:
                for name, stored in tensors:
                    place = places[stored.name]
                    kind = f"{place.dtype} {place.shape}"
                    _add(result, name.encode(), kind.encode())
                    _add(result, *_sampled(opened, place.begin, place.end))
        except OSError as error:
            raise _unreadable(file, error) from error
    return result.hexdigest()


def _add(result: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        result.update(len(part).to_bytes(8, "little"))
        result.update(part)


def _data_start(opened: BinaryIO) -> int:
    """Return the offset of the tensors in a safetensors file."""
    opened.seek(0)
    start = 8 + int.from_bytes(opened.read(8), "little")
    opened.seek(0)
    return min(start, os.fstat(opened.fileno()).st_size)


def _sampled(
    opened: BinaryIO, begin: int, end: int, *, whole: int = WHOLE
) -> Iterable[bytes]:
    """Yield bytes [begin, end) of a file, or evenly spread blocks of a long range."""
    size = end - begin
    if size <= max(whole, BLOCK):
        opened.seek(begin)
        yield opened.read(size)
        return
    for i in range(BLOCKS):
        opened.seek(begin + i * (size - BLOCK) // (BLOCKS - 1))
        yield opened.read(BLOCK)


def _unreadable(file: Path, error: OSError) -> ModelFolderError:
    return ModelFolderError(
        f"{str(file)!r} cannot be read: {error}. Download or convert it again."
    )
