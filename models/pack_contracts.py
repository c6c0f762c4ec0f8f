"""The contract that a pack of MTPLX says of its head.

It stands in mtplx_runtime.json as "mtp_contract", or in config.json as
"mtplx_mtp_contract":

    base_hidden_variant   which state of the target goes in: post_norm or pre_norm
    hidden_variant        which state of the head is recycled, likewise
    concat_order          embedding_hidden or hidden_embedding
    mtp_position_mode     cache, local or absolute: a constant shift of all positions,
                          which a rotary head does not feel
    mtp_quant_*, mtp_prequantized      shapes say that

What is left out is post_norm, post_norm, embedding_hidden. A field or value that is not
known may mean anything, so that such a contract is passed over.
"""

from pathlib import Path
from typing import Any

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.contract import Contract
from mlx_speculation.models.model_config import nested, read_json
from mlx_speculation.models.notices import notice

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


def pack_contract(folder: Path, config: dict[str, Any]) -> Contract | None:
    """Return the contract that a pack says, and say that it is taken; None: no such.

    Args:
        folder: the target's.
        config: what its config.json holds.
    """
    where, fields = f"config.json of {str(folder)!r}", config.get("mtplx_mtp_contract")
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
        contract = _contract(fields)
    except ValueError as error:
        notice(
            f"The contract of the MTP head in {where} is passed over: {error}. A probe "
            "finds one; contract= names one."
        )
        return None
    notice(
        f"The contract of the MTP head is taken from {where}: hidden "
        f"{contract.hidden}, recycled {contract.recycled}, {contract.order}. "
        "contract= names another."
    )
    return contract


def _contract(fields: Any) -> Contract:
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
    return Contract(**values)
