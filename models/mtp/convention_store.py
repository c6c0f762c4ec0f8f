"""Conventions of MTP heads in files: saved results of the probe, and MTPLX's packs.

The convention that a probe found is saved beside the head. If that folder cannot be
written to, it is saved in a cache folder:

    <folder of the head>/mtp_convention.json
    <cache folder>/conventions/<hashes>.json        see `mlx_speculation.json_files`

A saved convention is used only if the target and the head still have the hashes in the
file (`fingerprints` says what the hashes cover). A file that is broken, or that this
library has not written, is ignored with a warning and never overwritten: the new
convention goes to the cache folder.

A pack of MTPLX names the convention of its head in mtplx_runtime.json as
"mtp_contract", or in config.json as "mtplx_mtp_contract":

    base_hidden_variant   the target's state that the head reads: post_norm or pre_norm
    hidden_variant        the head's state that is recycled: post_norm or pre_norm
    concat_order          embedding_hidden or hidden_embedding
    mtp_position_mode     cache, local or absolute: these differ by a constant shift of
                          all positions, which does not change a rotary head's output
    mtp_quant_*, mtp_prequantized      not read: the tensors' shapes show it

Missing fields mean post_norm, post_norm and embedding_hidden. A convention with an
unknown field or value is ignored.
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
# Files of this version are ignored: their probe assumed one form for all norms.
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
    """The files that may hold the saved convention of the head in a folder."""

    def __init__(self, folder: Path, pair: Pair) -> None:
        self._pair = pair
        self._files = [folder / NAME]
        cache = cache_folder()
        if cache is not None:
            name = f"{pair.target[:32]}-{pair.head[:32]}.json"
            self._files.append(cache / "conventions" / name)

    def find(self) -> tuple[MtpConvention, Path] | None:
        """Return the convention that was saved for the pair, and its file."""
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
        """Save a convention atomically; return the file, None if none can be written.

        Args:
            convention: the convention.
            scores: scores of the candidates, for people who read the file.
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
    """Return the content of a saved file; None: it is missing or of an old version."""
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
    """Return the convention that a pack names, with a notice; None: it names none."""
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
