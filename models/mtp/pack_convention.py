"""Conventions that packs (model folders) of MTPLX name for their heads.

A convention is in mtplx_runtime.json as "mtp_contract", or in config.json as
"mtplx_mtp_contract":

    base_hidden_variant   the target's state that the head reads: post_norm or pre_norm
    hidden_variant        the head's state that is recycled: post_norm or pre_norm
    concat_order          embedding_hidden or hidden_embedding
    mtp_position_mode     cache, local or absolute: these differ by a constant shift of
                          all positions, which does not change a rotary head's output
    mtp_quant_*, mtp_prequantized      not read: the tensors' shapes show the format

A missing field has the value that is named first above. A convention with an unknown
field or value is ignored.
"""

from pathlib import Path
from typing import Any

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.config_json import read_json
from mlx_speculation.warn import notice

RUNTIME = "mtplx_runtime.json"
_SIDES = {"post_norm": "after_norm", "pre_norm": "before_norm"}
# MTPLX's name of a field -> our name, and MTPLX's values -> our values
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
    """Return the convention that a pack names, or None, and notify the user of it."""
    where, fields = "config.json", config.get("mtplx_mtp_contract")
    try:
        if (folder / RUNTIME).is_file():
            runtime = read_json(folder / RUNTIME).get("mtp_contract")
            if runtime is not None:
                where, fields = RUNTIME, runtime
        if fields is None:
            return None
        convention = _convention(fields)
    except ValueError as error:
        notice(
            f"The convention of the MTP head in {where} of {str(folder)!r} is ignored: "
            f"{error}. A probe finds one instead, unless convention= names it."
        )
        return None
    notice(
        f"The convention of the MTP head is taken from {where} of {str(folder)!r}: "
        f"hidden {convention.hidden}, recycled {convention.recycled}, "
        f"{convention.order}. Pass convention= to choose another."
    )
    return convention


def _convention(fields: Any) -> MtpConvention:
    if not isinstance(fields, dict):
        raise ValueError(f"it is a {type(fields).__name__}, not an object")
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
