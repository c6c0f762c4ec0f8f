"""All families of heads by name, from families.json beside this file.

A family that is `like` another one sets tensors that it lacks to null. A name with #
stands for several tensors, as many as the first number of the shape.
"""

from typing import Any

from support.models.rows import Row, read_rows
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


def _family(row: Row) -> Family:
    block = dict(row["block"])
    row["block"] = _KINDS[block.pop("kind")](**block)
    row["names"] = [Names(**names) for names in row["names"]]
    row["tensors"] = {name: shape for name, shape in row["tensors"].items() if shape}
    return Family(**row)


FAMILIES = {name: _family(row) for name, row in read_rows(__file__).items()}
