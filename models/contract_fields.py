"""A contract as fields of a JSON file, and back, with every field checked."""

from collections.abc import Mapping
from typing import Any

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.contract import MIXED_NORMS, Contract

FIELDS = ("hidden", "recycled", "order", "norms")


def fields_of(contract: Contract) -> dict[str, Any]:
    """Return a contract as an object of JSON."""
    norms = contract.norms
    return {
        "hidden": contract.hidden,
        "recycled": contract.recycled,
        "order": contract.order,
        "norms": list(norms) if isinstance(norms, tuple) else norms,
    }


def contract_of(fields: Any, where: str, usual: Contract | None = None) -> Contract:
    """Return the contract that an object of JSON is.

    Args:
        fields: the object; what it lacks is the usual contract's.
        where: it stands, for messages.
        usual: the usual contract.

    Raises:
        ModelFolderError: it is no object, or has a field or value that is not known.
    """
    if not isinstance(fields, Mapping):
        raise ModelFolderError(
            f"The contract in {where} is a {type(fields).__name__}, and an object "
            f"with some of {', '.join(FIELDS)} is needed."
        )
    unknown = sorted(map(str, fields.keys() - set(FIELDS)))
    if unknown:
        raise ModelFolderError(
            f"The contract in {where} has a field {unknown[0]!r}, and "
            f"{', '.join(FIELDS)} are known. Take it out."
        )
    values = {**fields_of(usual or Contract()), **fields}
    norms = values["norms"]
    if isinstance(norms, list):
        values["norms"] = _mixed(norms)
    try:
        return Contract(**values)
    except InvalidRequestError as error:
        raise ModelFolderError(f"In {where}: {error}") from error


def _mixed(norms: list[Any]) -> Any:
    """Return names of norms in the usual order, or something that is refused."""
    if any(name not in MIXED_NORMS for name in norms):
        return tuple(map(str, norms))
    return tuple(name for name in MIXED_NORMS if name in norms)
