"""Numbers that a caller has passed, checked."""

from typing import Any

from mlx_speculation.errors import InvalidRequestError


def checked_count(name: str, value: Any, least: int, hint: str = "") -> int:
    """Return a whole number of at least `least`.

    Raises:
        InvalidRequestError: it is none; `hint` says what else there is, or why.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise InvalidRequestError(
        f"{name} is {value!r}, and a whole number of at least {least} is needed{hint}."
    )
