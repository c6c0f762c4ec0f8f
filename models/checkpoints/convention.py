"""The training convention of an MTP head, read from JSON and checked."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from mlx_speculation.errors import InvalidRequestError, ModelFolderError

Side = Literal["after_norm", "before_norm"]
Order = Literal["embedding_first", "hidden_first"]
# A tuple names those norms that are stored as w and applied as 1 + w.
Norms = Literal["stored", "plus_one"] | tuple[str, ...]
# The norms of a layer of a head, by their names in `MtpHead`. Some converters guess the
# form of each norm from its mean, and so convert some norms and not the rest.
NORM_NAMES = (
    "norm_e",
    "norm_h",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
    "final",
)
# The norms that these converters leave as w, to be applied as 1 + w.
MIXED_NORMS = NORM_NAMES[:4]


@dataclass(frozen=True, slots=True)
class MtpConvention:
    """Training convention of a head, which its tensors do not show.

    Attributes:
        hidden: the target's state that the head reads: after or before the final norm.
        recycled: the head's state that goes into its next step: after or before its
            norm.
        order: the order in which embedding and hidden state are concatenated.
        norms: the form of the norm weights. "stored": they are applied as they are.
            "plus_one": 1 has to be added. A tuple of names in `NORM_NAMES`: 1 has to be
            added to these. None: the files decide.

    Raises:
        InvalidRequestError: a field has a value that is not allowed.
    """

    hidden: Side = "after_norm"
    recycled: Side = "after_norm"
    order: Order = "embedding_first"
    norms: Norms | None = None

    def __post_init__(self) -> None:
        sides = get_args(Side)
        choices = {"hidden": sides, "recycled": sides, "order": get_args(Order)}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidRequestError(_not_one(name, value, allowed))
        norms = self.norms
        if isinstance(norms, tuple):
            known = bool(norms) and all(name in NORM_NAMES for name in norms)
        else:
            known = norms is None or norms in ("stored", "plus_one")
        if not known:
            names = ("stored", "plus_one", f"a tuple of {', '.join(NORM_NAMES)}")
            raise InvalidRequestError(_not_one("norms", norms, names))


def _not_one(name: str, value: Any, allowed: Iterable[str]) -> str:
    return (
        f"{name} of a convention is {value!r}, but has to be one of these: "
        f"{'; '.join(allowed)}."
    )


FIELDS = ("hidden", "recycled", "order", "norms")


def convention_of(
    fields: Any, where: str, usual: MtpConvention | None = None
) -> MtpConvention:
    """Return the convention in a JSON object.

    Missing fields are as in `usual`. If `usual` is None, they are as in
    `MtpConvention()`. Errors name the place `where`.

    Raises:
        ModelFolderError: `fields` is no object, or has an unknown field or value.
    """
    if not isinstance(fields, Mapping):
        raise ModelFolderError(
            f"The convention in {where} is a {type(fields).__name__}, and an object "
            f"with some of {', '.join(FIELDS)} is needed."
        )
    unknown = sorted(map(str, fields.keys() - set(FIELDS)))
    if unknown:
        raise ModelFolderError(
            f"The convention in {where} has the unknown field {unknown[0]!r}; known "
            f"are {', '.join(FIELDS)}. Take it out."
        )
    values = {**asdict(usual or MtpConvention()), **fields}
    if isinstance(values["norms"], list):
        values["norms"] = tuple(values["norms"])
    try:
        return MtpConvention(**values)
    except InvalidRequestError as error:
        raise ModelFolderError(f"In {where}: {error}") from error
