"""Moves the MTP head of a model from its shards into mtp.safetensors, in a copy.

Plain mlx-lm can load the shards of the new folder. `draft="mtp"` and `draft="auto"`
find the head beside them. The last line on standard output is one JSON object.

    python scripts/split_head.py path/of/model path/of/new/folder
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_speculation.cli import run
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.convention import Norms
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.mtp.families import family_of
from mlx_speculation.models.mtp.files import find_head, is_leftover
from mlx_speculation.models.mtp.load import FoundHead
from mlx_speculation.models.safetensors_layout import (
    INDEX,
    TensorPlace,
    header,
    places_in,
    spare_files,
    unnamed_files,
    weight_files,
)

app = typer.Typer(add_completion=False)

SIDECAR = "mtp.safetensors"


@dataclass(frozen=True, slots=True)
class Split:
    """The files that were written."""

    folder: Path  # the new folder
    head: tuple[str, ...]  # names of the head's tensors
    trunk: int  # number of tensors in the shards
    norms: Norms | None  # encoding of the head's norms in the shards; None: not known


def split_head(folder: Path, out: Path) -> Split:
    """Write a model folder in which the head is in mtp.safetensors.

    Names, dtypes and bytes of all tensors stay. If the norms of the head are stored
    minus 1, the new config.json says so, since the new shards do not show it.

    Raises:
        ModelFolderError: there is no head in the shards, one is beside them, or `out`
            exists.
    """
    folder = folder.expanduser()
    config = read_config(folder)
    module, trunk = _kind(config)
    family = family_of(module)
    if family is None:
        raise ModelFolderError(
            f"{str(folder)!r} is a {module}; MTP heads of this family are not known."
        )
    files = find_head(folder, config, family, trunk)
    norms = FoundHead(folder, config, family, trunk, files).norms
    if not files.in_shards:
        raise ModelFolderError(
            f"The head of {str(folder)!r} is already in {files.source}, outside of "
            "the shards. There is nothing to do."
        )
    if out.exists():
        raise ModelFolderError(
            f"{str(out)!r} exists, and a new folder is needed. Name another."
        )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        done = _written(folder, partial, module, trunk)
        if norms == "plus_one":
            config["mtp_norm_encoding"] = "delta"
            text = json.dumps(config, indent=2) + "\n"
            (partial / "config.json").write_text(text, encoding="utf-8")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Split(out, *done, norms)


def _kind(config: dict[str, Any]) -> tuple[str, int]:
    from mlx_lm.utils import _get_classes

    try:
        model, arguments = _get_classes(config)
        empty: Any = model(arguments.from_dict(config))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(
            f"mlx-lm cannot make a model of config.json: {error}. Check it."
        ) from error
    return str(model.__module__), len(empty.layers)


def _written(
    folder: Path, out: Path, module: str, trunk: int
) -> tuple[tuple[str, ...], int]:
    """Write the folder; return the head's names and the shards' tensor count."""
    of_shards = [*weight_files(folder), *spare_files(folder)]
    left = {file.name for file in (*of_shards, *unnamed_files(folder))}
    shutil.copytree(folder, out, ignore=lambda _, names: left.intersection(names))
    head: dict[str, tuple[Path, TensorPlace]] = {}
    kept: dict[str, str] = {}
    size, said = 0, {"format": "mlx"}
    for file in of_shards:
        mine: dict[str, tuple[Path, TensorPlace]] = {}
        for name, place in places_in(file).items():
            result = head if is_leftover(module, name, trunk) else mine
            result[name] = file, place
        said = header(file)[1] or said
        if mine:
            _write(out / file.name, mine, said)
        kept |= dict.fromkeys(mine, file.name)
        size += sum(place.end - place.begin for _, place in mine.values())
    _write(out / SIDECAR, head, said)
    if (folder / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": kept}
        text = json.dumps(index, indent=2) + "\n"
        (out / INDEX).write_text(text, encoding="utf-8")
    return tuple(sorted(head)), len(kept)


def _write(
    file: Path,
    tensors: Mapping[str, tuple[Path, TensorPlace]],
    metadata: dict[str, str],
) -> None:
    """Write a file of tensors whose bytes lie in other files."""

    def item_size(name: str) -> float:
        _, place = tensors[name]
        return (place.end - place.begin) / max(1, prod(place.shape))

    # Tensors with the largest items come first, so that all tensors are aligned.
    names = sorted(tensors, key=item_size, reverse=True)
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        _, place = tensors[name]
        begin, end = end, end + place.end - place.begin
        entries[name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for source, place in (tensors[name] for name in names):
            with source.open("rb") as opened:
                opened.seek(place.begin)
                written.write(opened.read(place.end - place.begin))


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="A model with a head in its shards.")],
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
) -> None:
    """Split a head out of a model's shards."""
    done = split_head(folder, out)
    print(f"{len(done.head)} tensors of the head are in {done.folder / SIDECAR}")
    print(f"{done.trunk} tensors of the model are in its shards")
    print(f"norms of the head: {done.norms or 'not known; loading runs a probe'}")
    record = {"head": len(done.head), "model": done.trunk, "norms": done.norms}
    print(json.dumps(record))


if __name__ == "__main__":
    run(app)
