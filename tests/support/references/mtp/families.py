"""All families of heads by name, from families.json beside this file.

A family that is `like` another has what differs; a tensor that it lacks is null. A name
with # is that of as many tensors as the first number of the shape says.
"""

import json
from pathlib import Path
from typing import Any

from support.references.mtp.base import Family, Names
from support.references.mtp.blocks import (
    LongcatLayer,
    MimoProLayer,
    MlxLayer,
    NemotronLayer,
    TorchLayer,
)

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (LongcatLayer, MimoProLayer, MlxLayer, NemotronLayer, TorchLayer)
}
_ROWS: dict[str, Any] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def _row(name: str) -> dict[str, Any]:
    """Return all of a family that is said."""
    row = dict(_ROWS[name])
    whole: dict[str, Any] = (
        _merged(_row(row.pop("like")), row) if "like" in row else row
    )
    return whole


def _family(name: str) -> Family:
    row = _row(name)
    block = dict(row["block"])
    row["block"] = _KINDS[block.pop("kind")](**block)
    row["names"] = [Names(**names) for names in row["names"]]
    row["tensors"] = {name: shape for name, shape in row["tensors"].items() if shape}
    return Family(**row)


FAMILIES: dict[str, Family] = {name: _family(name) for name in _ROWS}
