"""Fields of dataclasses that are options of the command line too.

The command line reads them; where they stand, nothing has to know it.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def option(
    default: Any, help: str, *names: str, panel: str | None = None, **more: Any
) -> Any:
    """Return a field that is an option; also as the default of a parameter.

    Args:
        default: of the field; `dataclasses.MISSING`: it has to be given.
        help: one line for the user.
        names: with their dashes; none: that of the field.
        panel: where the help shows it; None: in the panel of the dataclass.
        more: bounds and the like, as `typer.Option` takes them.
    """
    given = {"names": names, "help": help, "panel": panel, **more}
    return field(default=default, metadata={"option": given})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLimits:
    """Size and precision of the target's caches, named as in mlx-lm."""

    panel: ClassVar[str] = "Key-value caches, as mlx-lm names it"

    max_kv_size: int | None = option(
        None, "Maximum number of positions in the target's caches.", min=1
    )
    kv_bits: int | None = option(
        None, "Quantize the target's KV caches to this many bits.", min=1
    )
    kv_group_size: int = option(64, "Group size of the quantized KV caches.", min=1)
    quantized_kv_start: int = option(
        5000, "Quantize the KV caches from this position on.", min=0
    )

    def limits(self) -> dict[str, Any]:
        """Return these four by name."""
        return {one.name: getattr(self, one.name) for one in fields(KvLimits)}
