"""Hashes of a target and of its head, to tell whether they are still the same.

Of a file or tensor of more than 1 MiB, only 64 evenly spread blocks of 4 KiB are
hashed, the first and the last included. A change of a few weights can go unnoticed.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.mtp.files import HeadFiles
from mlx_speculation.models.safetensors_layout import places_in, weight_files

BLOCK, BLOCKS, WHOLE = 4096, 64, 1 << 20
# A description of some bytes, their file, and their bounds in the file, [begin, end)
_Span = tuple[str, Path, int, int]


def target_hash(folder: Path) -> str:
    """Return the hash of a target's config.json and weight files, in hexadecimal.

    Raises:
        ModelFolderError: a file cannot be read.
    """
    files = [folder / "config.json", *weight_files(folder)]
    return _hash((each.name, each, 0, each.stat().st_size) for each in files)


def head_hash(files: HeadFiles) -> str:
    """Return the hash of a head's tensors, in hexadecimal.

    Raises:
        ModelFolderError: a file cannot be read.
    """
    tensors = sorted(files.tensors.items())
    places = {file: places_in(file) for file in {each.file for _, each in tensors}}
    spans: list[_Span] = []
    for name, stored in tensors:
        place = places[stored.file][stored.name]
        kind = f"{name} {place.dtype} {place.shape}"
        spans.append((kind, stored.file, place.begin, place.end))
    return _hash(spans)


def _hash(spans: Iterable[_Span]) -> str:
    result = hashlib.sha256()
    try:
        for kind, file, begin, end in spans:
            size = end - begin
            starts, length = [begin], size
            if size > WHOLE:
                last, length = BLOCKS - 1, BLOCK
                starts = [begin + i * (size - BLOCK) // last for i in range(BLOCKS)]
            result.update(f"{kind} {size}\n".encode())
            with file.open("rb") as opened:
                for start in starts:
                    opened.seek(start)
                    result.update(opened.read(length))
    except OSError as error:
        raise ModelFolderError(
            f"A model file cannot be read: {error}. Download or convert it again."
        ) from error
    return result.hexdigest()
