"""What a safetensors file holds, and where, without reading its tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.json_files import JsonFlawError, parse_json

SHARDS = "model*.safetensors"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor in a file."""

    dtype: str  # its name in the file, such as "BF16"
    shape: tuple[int, ...]  # its shape
    begin: int  # the first byte, counted from the beginning of the file
    end: int  # the byte after the last


def header(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the names and shapes in a safetensors file, and its metadata.

    Raises:
        ModelFolderError: it cannot be read, or is cut.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            shapes = {
                name: tuple(opened.get_slice(name).get_shape())
                for name in opened.keys()  # noqa: SIM118  it is no mapping
            }
            return shapes, dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(
            f"{str(file)!r} cannot be read: {error}. Download or convert it again."
        ) from error


def shards(folder: Path) -> Iterator[Path]:
    """Return the files that mlx-lm loads."""
    return iter(sorted(folder.glob(SHARDS)))


def places_in(file: Path) -> dict[str, TensorPlace]:
    """Return where the tensors of a file lie, by their names.

    Raises:
        ModelFolderError: it cannot be read, is cut, or is no safetensors file.
    """
    header(file)  # the library checks it
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries = parse_json(opened.read(length))
    except OSError as error:
        raise ModelFolderError(f"{str(file)!r} cannot be read: {error}.") from error
    except JsonFlawError as error:
        raise ModelFolderError(
            f"The header of {str(file)!r} {error}. Download or convert it again."
        ) from error
    entries.pop("__metadata__", None)
    start = 8 + length
    return {
        name: TensorPlace(
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
        )
        for name, entry in entries.items()
    }
