"""Fields of dataclasses that are options of the command line too.

The command line reads them; where they stand, nothing has to know it.
"""

from dataclasses import field
from typing import Any


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
