"""Finding the tensors of an MTP head in a model folder.

A head is in the shards of its target, or in a file beside them. Most conversions drop
the head although config.json still declares it, so the files' tensors are searched.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.config_json import nested, read_json
from mlx_speculation.models.mtp.families import family_of
from mlx_speculation.models.mtp.family import MtpFamily, without_wrappers
from mlx_speculation.models.safetensors_layout import (
    INDEX,
    header,
    spare_files,
    unnamed_files,
    weight_files,
)

# In the order of the search, which ends at the first place with tensors of a head.
SIDECARS = (
    "mtp.safetensors",
    "mtp/weights.safetensors",
    "model-mtp.safetensors",
    "model-mtp-head.safetensors",
    "optiq/mtp.safetensors",
    "*mtp*.safetensors",
    "*mtp*/*.safetensors",
)
# Modules of targets without a known family; their heads are stored as further layers.
_LAYERS_BEHIND = ("bailing_moe_linear",)
SPLIT = "_mtp"
DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor on disk."""

    file: Path
    name: str


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Files of a head's tensors."""

    tensors: Mapping[str, Stored]  # name in `MtpHead` -> where it is stored
    in_shards: bool  # whether the tensors are in the target's own shards
    source: str  # where the tensors are, for messages

    @property
    def layers(self) -> int:
        """Number of layers that have tensors."""
        return 1 + max(int(name.split(".")[1]) for name in self.tensors)

    def read(self) -> dict[str, mx.array]:
        """Return the tensors by their names in `MtpHead`, loaded lazily."""
        files: dict[Path, dict[str, str]] = {}
        for name, stored in self.tensors.items():
            files.setdefault(stored.file, {})[name] = stored.name
        arrays: dict[str, mx.array] = {}
        for file, names in files.items():
            tensors: Any = mx.load(str(file))
            arrays |= {name: tensors[theirs] for name, theirs in names.items()}
        return arrays


def find_head(
    folder: Path, config: dict[str, Any], family: MtpFamily, trunk: int
) -> HeadFiles:
    """Find the head of a target, which has `trunk` layers, in the target's folder.

    Raises:
        ModelFolderError: there is no head, or a file cannot be read.
    """
    for files, in_shards in _places(folder, config):
        tensors = _held(files, family, trunk, bare=not in_shards)
        if tensors:
            names = ", ".join(str(file.relative_to(folder)) for file in files)
            return HeadFiles(tensors, in_shards, "the shards" if in_shards else names)
    raise ModelFolderError(_none_message(folder, config, family, trunk))


def is_split_head(config: dict[str, Any]) -> bool:
    """Return whether a folder with this config.json holds only a head.

    mlx-vlm splits checkpoints into such folders.
    """
    return str(config.get("model_type", "")).endswith(SPLIT)


def find_split_head(folder: Path, family: MtpFamily, trunk: int) -> HeadFiles:
    """Find a head in a folder of its own; its target has `trunk` layers.

    Raises:
        ModelFolderError: there is no head of that family, or a file cannot be read.
    """
    kind = str(read_json(folder / "config.json").get("model_type"))
    if kind.removesuffix(SPLIT) not in family.modules:
        raise ModelFolderError(
            f"The head in {str(folder)!r} is of type {kind!r}, but the target takes "
            f"{' or '.join(name + SPLIT for name in family.modules)}. Choose the head "
            "that was split from this target."
        )
    tensors = _held(weight_files(folder), family, trunk, bare=True, split=True)
    if not tensors:
        raise ModelFolderError(
            f"{str(folder)!r} holds no known tensor of an MTP head of the "
            f"{family.name} family. Split it again, or take the original checkpoint."
        )
    return HeadFiles(tensors, False, str(folder))


def sidecar_names(folder: Path) -> set[str]:
    """Return the names of tensors that only files with "mtp" in their names hold."""
    names: set[str] = set()
    others: set[str] = set()
    for file in weight_files(folder):
        (names if "mtp" in file.name else others).update(header(file)[0])
    return names - others


def is_leftover(module: str, name: str, trunk: int) -> bool:
    """Return whether a tensor in the shards belongs to a head, not to the target."""
    family, core = family_of(module), without_wrappers(name)
    if family is not None:
        return family.place(name, trunk) is not None
    if module.endswith(_LAYERS_BEHIND) and core.startswith("layers."):
        number = core.split(".")[1]
        return number.isdigit() and int(number) >= trunk
    return core.startswith("mtp.")


def _places(folder: Path, config: dict[str, Any]) -> Iterator[tuple[list[Path], bool]]:
    """Yield the files of each place where a head can be, in the order of precedence.

    The flag says whether these files count as shards of the target.
    """
    named = nested(config, "mlx_lm_extra_tensors", "mtp_file")
    if named is not None:
        file = (folder / str(named)).resolve()
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            raise ModelFolderError(
                f"config.json names {str(named)!r} as the file of the MTP head, but "
                f"{str(folder)!r} has no such file. Put it there, or take out "
                "mlx_lm_extra_tensors."
            )
        yield [folder / str(named)], False
    if (folder / INDEX).is_file():
        yield weight_files(folder), True
    for pattern in SIDECARS:
        files = sorted(file for file in folder.glob(pattern) if file.is_file())
        by_folder: dict[Path, list[Path]] = {}
        for file in files:
            by_folder.setdefault(file.parent, []).append(file)
        yield from ((files, False) for files in by_folder.values())
    yield weight_files(folder), True
    yield spare_files(folder), True  # an index can be older than the head


def _held(
    files: Iterable[Path],
    family: MtpFamily,
    trunk: int,
    *,
    bare: bool = False,  # whether names can lack their first part, "mtp."
    split: bool = False,
) -> dict[str, Stored]:
    """Return the tensors of a head in some files, by their names in `MtpHead`."""
    result: dict[str, Stored] = {}
    for file in files:
        names = header(file)[0]
        places = {name: family.place(name, trunk, split=split) for name in names}
        if bare and not any(places.values()):
            places = {name: family.place(f"mtp.{name}", trunk) for name in names}
        for name, place in places.items():
            if place is None:
                continue
            unused = family.layers == "first" and place.layer > 0
            if place.name is None or unused or "rotary_emb.inv_freq" in name:
                continue
            if place.name in result:
                other = result[place.name]
                raise ModelFolderError(
                    f"{name!r} in {file.name!r} and {other.name!r} in "
                    f"{other.file.name!r} are the same tensor of the MTP head. Take "
                    "one of the files away."
                )
            result[place.name] = Stored(file, name)
    return result


def _none_message(
    folder: Path, config: dict[str, Any], family: MtpFamily, trunk: int
) -> str:
    declared = [
        f"{key} = {value}"
        for key in DECLARED
        if (value := nested(config, "text_config", key) or config.get(key))
    ]
    says = f", although config.json has {declared[0]}" if declared else ""
    example = family.file_name("layers.0.proj.weight", trunk)
    spare = spare_files(folder)
    for file in unnamed_files(folder):
        if file not in spare and _held([file], family, trunk):
            says += (
                f"; the head in {file.name!r} is not used, since that file repeats "
                "weights of the model and no index names it"
            )
    return (
        f"{str(folder)!r} holds no MTP head of the {family.name} family, with tensors "
        f"such as {example!r}{says}. Conversions by mlx-lm drop it: take the original "
        "checkpoint, or put the head beside the model as mtp.safetensors."
    )
