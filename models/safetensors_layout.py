"""Layout of safetensors files, read without their tensors.

The functions raise `ModelFolderError` for a file or an index that is malformed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.models.config_json import read_json

SHARDS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
CONSOLIDATED = "consolidated.safetensors"  # a second copy of all weights


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor in a file."""

    dtype: str  # its name in the file, such as "BF16"
    shape: tuple[int, ...]
    begin: int  # the first byte, counted from the beginning of the file
    end: int  # the byte after the last


def header(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes in a safetensors file by tensor name, and its metadata."""
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


def weight_files(folder: Path, pattern: str = SHARDS) -> list[Path]:
    """Return the files that hold a model's weights.

    If the folder has an index, these are the files that the index names. Otherwise they
    are the files that match the pattern. Among these, files of an MTP head and
    `CONSOLIDATED` can repeat tensors of the model: they are left out if any other file
    matches.

    Raises:
        ModelFolderError: the index names a file that is missing or outside the folder;
            or, without an index, two files hold the same tensor.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob(pattern))
        files = [file for file in files if not _is_copy(file)] or files
        check_apart(files)
        return files
    named = _weight_map(index)
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelFolderError(
                f"{str(index)!r} names {name!r}, which is outside its folder. Download "
                "the index again."
            )
    gone = [name for name in names if not (folder / name).is_file()]
    if gone:
        tensors = [tensor for tensor, file in named.items() if file == gone[0]]
        raise ModelFolderError(
            f"{INDEX} says that {gone[0]!r} holds {tensors[0]!r} and "
            f"{len(tensors) - 1} other tensors, and {str(folder)!r} has no such file. "
            "Download it; or, if other files hold all weights, take the index away."
        )
    return [folder / name for name in names]


def unnamed_files(folder: Path) -> list[Path]:
    """Return files that mlx-lm would load and that are not among `weight_files`."""
    return sorted(set(folder.glob(SHARDS)) - set(weight_files(folder)))


def spare_files(folder: Path) -> list[Path]:
    """Return the unnamed files that share no tensor with the model.

    Such a file can hold a head that was added after the index was written. A file that
    repeats weights of the model belongs to another checkpoint.
    """
    unnamed = unnamed_files(folder)
    if not unnamed:
        return []
    kept: set[str] = set()
    for file in weight_files(folder):
        kept.update(header(file)[0])
    return [file for file in unnamed if kept.isdisjoint(header(file)[0])]


def check_index(
    folder: Path, is_spare: Callable[[str], bool] = lambda name: False
) -> None:
    """Refuse an index if a file lacks a tensor that the index places in it.

    A file with none of the tensors that the index places in it is not checked: it was
    converted after the index was written. `is_spare` returns whether the model can do
    without a tensor of this name.

    Raises:
        ModelFolderError: a file lacks a tensor, or two files hold the same one.
    """
    if not (folder / INDEX).is_file():
        return
    named, files = _weight_map(folder / INDEX), weight_files(folder)
    for file in files:
        names_in_file = header(file)[0].keys()
        wanted = {name for name, place in named.items() if folder / place == file}
        lacking = sorted(
            name
            for name in wanted - names_in_file
            if not is_spare(name) and not name.endswith("rotary_emb.inv_freq")
        )
        if lacking and not wanted.isdisjoint(names_in_file):
            raise ModelFolderError(
                f"{INDEX} says that {file.name!r} in {str(folder)!r} holds "
                f"{lacking[0]!r}, and it does not. Download both again."
            )
    check_apart([file for file in files if not _is_copy(file)])


def _weight_map(index: Path) -> dict[str, str]:
    named: Any = read_json(index).get("weight_map")
    right = isinstance(named, dict) and len(named) > 0
    if not right or not all(isinstance(file, str) for file in named.values()):
        raise ModelFolderError(
            f"{str(index)!r} has no weight_map of tensors and files; an index has to "
            "give the file of each tensor. Remove the index, or download it again."
        )
    places: dict[str, str] = named
    return places


def _is_copy(file: Path) -> bool:
    """Return whether a file can repeat tensors of the model beside it."""
    return "mtp" in file.name or file.name == CONSOLIDATED


@contextmanager
def named_files_only(folder: Path) -> Iterator[Path]:
    """Yield a folder in which mlx-lm finds the weights of a model and no others.

    mlx-lm loads every file that matches `SHARDS`. If these are not exactly the
    `weight_files`, the yielded folder is a temporary one with links.
    """
    files, of_mlx_lm = weight_files(folder), set(folder.glob(SHARDS))
    if set(files) == of_mlx_lm:
        yield folder
        return
    with TemporaryDirectory() as name:
        for each in {*folder.iterdir()} - of_mlx_lm:
            (Path(name) / each.name).symlink_to(each.absolute())
        for number, file in enumerate(files):
            link = file.name if file in of_mlx_lm else f"model-{number}-{file.name}"
            (Path(name) / link).symlink_to(file.absolute())
        yield Path(name)


def check_apart(files: Sequence[Path]) -> None:
    """Raise `ModelFolderError` if two files hold a tensor of the same name."""
    if len(files) < 2:
        return
    holder: dict[str, Path] = {}
    for file in files:
        for tensor in header(file)[0]:
            if tensor in holder:
                raise ModelFolderError(
                    f"{holder[tensor].name!r} and {file.name!r} in "
                    f"{str(file.parent)!r} both hold {tensor!r}, but only one file may "
                    "hold it. Remove the file that is not the model's."
                )
            holder[tensor] = file


def places_in(file: Path) -> dict[str, TensorPlace]:
    """Return the places of a file's tensors, by their names."""
    header(file)  # checks the file
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
