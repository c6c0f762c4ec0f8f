"""Conventions of MTP heads in files: those that a probe has found, and MTPLX's.

What a probe has found is kept beside the head, or in a cache folder where nothing can
be written there:

    <folder of the head>/mtp_convention.json
    <cache folder>/conventions/<hashes>.json        see `mlx_speculation.json_files`

It counts only while the hashes of target and head are those in it (`fingerprints` says
what they cover). A file that this library has not written, or one that is broken, is
never trusted and never written over: there is a warning, and the cache folder takes
what is found.

A pack of MTPLX names the convention of its head in mtplx_runtime.json as
"mtp_contract", or in config.json as "mtplx_mtp_contract":

    base_hidden_variant   which state of the target goes in: post_norm or pre_norm
    hidden_variant        which state of the head is recycled, likewise
    concat_order          embedding_hidden or hidden_embedding
    mtp_position_mode     cache, local or absolute: a constant shift of all positions,
                          which a rotary head does not feel
    mtp_quant_*, mtp_prequantized      shapes say that

Missing fields mean post_norm, post_norm and embedding_hidden. A field or value that is
not known may mean anything, so that such a convention is ignored.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.environment import cache_folder
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.json_files import JsonFlawError, load_json, write_json
from mlx_speculation.models.checkpoints.convention import (
    MtpConvention,
    convention_of,
    fields_of,
)
from mlx_speculation.models.config_json import nested, read_json
from mlx_speculation.warn import notice

NAME = "mtp_convention.json"
FORMAT = "mlx-speculation convention"
VERSION = 2
# Found by a probe that took all norms to be stored alike; a probe finds it again.
_BEFORE_MIXTURES = 1
_KEYS = {"format", "version", "target", "head", "convention", "scores"}
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Pair:
    """The hashes of a target and of its head."""

    target: str
    head: str


class _NotOursError(ValueError):
    """A file that was not written here, or is broken."""


class SavedConventions:
    """The files in which the convention of the head in a folder may be kept."""

    def __init__(self, folder: Path, pair: Pair) -> None:
        self._pair = pair
        self._files = [folder / NAME]
        cache = cache_folder()
        if cache is not None:
            name = f"{pair.target[:32]}-{pair.head[:32]}.json"
            self._files.append(cache / "conventions" / name)

    def find(self) -> tuple[MtpConvention, Path] | None:
        """Return the convention that was saved for the pair, and in which file."""
        for file in self._files:
            try:
                convention = self._read(file)
            except _NotOursError as error:
                notice(
                    f"{str(file)!r} is passed over: {error}. Take it away, or name the "
                    "convention."
                )
                continue
            if convention is not None:
                return convention, file
        return None

    def save(self, convention: MtpConvention, scores: Mapping[str, Any]) -> Path | None:
        """Keep a convention as a whole or not at all; return where, if anywhere.

        Args:
            convention: the convention.
            scores: what it and others scored, for whoever reads the file.
        """
        value = {
            "format": FORMAT,
            "version": VERSION,
            "target": self._pair.target,
            "head": self._pair.head,
            "convention": fields_of(convention),
            "scores": dict(scores),
        }
        for file in self._files:
            with suppress(_NotOursError, OSError):
                _object(file)  # a file that is not ours is never written over
                write_json(file, value)
                return file
        return None

    def _read(self, file: Path) -> MtpConvention | None:
        value = _object(file)
        if value is None:
            return None
        if (value["target"], value["head"]) != (self._pair.target, self._pair.head):
            return None
        try:
            convention = convention_of(value["convention"], str(file))
        except ModelFolderError as error:
            raise _NotOursError(str(error)) from error
        if convention.norms is None:
            raise _NotOursError("its convention does not say how norms are stored")
        return convention


def _object(file: Path) -> dict[str, Any] | None:
    """Return what a file of ours holds; None: there is none."""
    try:
        value = load_json(file, most=_LARGEST)
    except JsonFlawError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise _NotOursError(f"it cannot be read, as it {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _NotOursError("it is not a convention that was saved here")
    if value.get("version") == _BEFORE_MIXTURES:
        return None
    if value.get("version") != VERSION or value.keys() != _KEYS:
        raise _NotOursError(
            f"its version is {value.get('version')!r} with {len(value)} fields, and "
            f"{VERSION} with {len(_KEYS)} is known"
        )
    return value


RUNTIME = "mtplx_runtime.json"
_SIDES = {"post_norm": "after_norm", "pre_norm": "before_norm"}
_FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "base_hidden_variant": ("hidden", _SIDES),
    "hidden_variant": ("recycled", _SIDES),
    "concat_order": (
        "order",
        {"embedding_hidden": "embedding_first", "hidden_embedding": "hidden_first"},
    ),
}
_POSITIONS = ("cache", "local", "absolute")
_NOT_READ = (
    "mtp_quant_bits",
    "mtp_quant_group_size",
    "mtp_quant_mode",
    "mtp_quant_policy",
    "mtp_prequantized",
)


def pack_convention(folder: Path, config: dict[str, Any]) -> MtpConvention | None:
    """Return the convention that a pack says, and say that it is taken, or None."""
    where, fields = (
        f"config.json of {str(folder)!r}",
        config.get("mtplx_mtp_contract"),
    )
    if (folder / RUNTIME).is_file():
        try:
            runtime = nested(read_json(folder / RUNTIME), "mtp_contract")
        except ModelFolderError as error:
            notice(f"{error} It is passed over.")
            runtime = None
        if runtime is not None:
            where, fields = str(folder / RUNTIME), runtime
    if fields is None:
        return None
    try:
        convention = _convention(fields)
    except ValueError as error:
        notice(
            f"The convention of the MTP head in {where} is passed over: {error}. A "
            "probe finds one; convention= names one."
        )
        return None
    notice(
        f"The convention of the MTP head is taken from {where}: hidden "
        f"{convention.hidden}, recycled {convention.recycled}, {convention.order}. "
        "convention= names another."
    )
    return convention


def _convention(fields: Any) -> MtpConvention:
    if not isinstance(fields, dict):
        raise ValueError(f"it is a {type(fields).__name__}")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _FIELDS:
            ours, known = _FIELDS[name]
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} is {value!r}, not {' or '.join(known)}")
            values[ours] = known[value]
        elif name == "mtp_position_mode":
            if value not in _POSITIONS:
                raise ValueError(f"{name} is {value!r}, not one of {_POSITIONS}")
        elif name not in _NOT_READ:
            raise ValueError(f"{name!r} is not known")
    return MtpConvention(**values)
