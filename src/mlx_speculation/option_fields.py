"""Fields of dataclasses that are also options of the command line."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def option(
    default: Any, help: str, *names: str, panel: str | None = None, **more: Any
) -> Any:
    """Declare an option: a dataclass field, or the default of a command's parameter.

    The default `dataclasses.MISSING` makes the field required. `names` are written
    with their dashes; without names, the option is named after the field. `panel` is
    the part of the help that shows the option; None: the panel of the dataclass. `more`
    are arguments of `typer.Option`, such as bounds.
    """
    given = {"names": names, "help": help, "panel": panel, **more}
    return field(default=default, metadata={"option": given})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLimits:
    """Size and precision of the target's caches, named as in mlx-lm."""

    panel: ClassVar[str] = "Key-value caches, as mlx-lm names their options"

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
        """Return the four values by name."""
        return {one.name: getattr(self, one.name) for one in fields(KvLimits)}
