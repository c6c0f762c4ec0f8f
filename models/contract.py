"""What an MTP head was trained with, and no tensor shows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlx_speculation.errors import InvalidRequestError

Side = Literal["after_norm", "before_norm"]
Order = Literal["embedding_first", "hidden_first"]
# A tuple names those norms that are stored as w and applied as 1 + w.
Norms = Literal["stored", "plus_one"] | tuple[str, ...]
# The norms of a layer of a head, by their names in `MtpHead`, that packs were seen to
# differ in: some of them were converted, and others were left.
MIXED_NORMS = ("norm_e", "norm_h", "input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Contract:
    """What a head was trained with, and its tensors do not show.

    Attributes:
        hidden: which state of the target goes in: after or before its final norm.
        recycled: which state of the head goes into its next step.
        order: what comes first in the concatenation.
        norms: how norm weights are stored: "stored" is used as it is, to "plus_one"
            one is added; a tuple names those of `MIXED_NORMS` to which one is added.
            None: the files decide.

    Raises:
        InvalidRequestError: a field has none of these values.
    """

    hidden: Side = "after_norm"
    recycled: Side = "after_norm"
    order: Order = "embedding_first"
    norms: Norms | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidRequestError(_not_one(name, value, allowed))
        norms = self.norms
        if isinstance(norms, tuple):
            known = bool(norms) and set(norms) <= set(MIXED_NORMS)
        else:
            known = norms is None or norms in ("stored", "plus_one")
        if not known:
            names = ("stored", "plus_one", f"a tuple of {', '.join(MIXED_NORMS)}")
            raise InvalidRequestError(_not_one("norms", norms, names))


# What the other fields may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "hidden": get_args(Side),
    "recycled": get_args(Side),
    "order": get_args(Order),
}


def _not_one(name: str, value: Any, allowed: Iterable[str]) -> str:
    return (
        f"{name} of a contract is {value!r}, and one of {'; '.join(allowed)} is needed."
    )
