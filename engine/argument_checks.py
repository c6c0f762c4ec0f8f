"""Checks of arguments: numbers and choices."""

from typing import Any, get_args

from mlx_speculation.errors import InvalidRequestError


def checked_count(name: str, value: Any, least: int, hint: str = "") -> int:
    """Return a whole number of at least `least`, or raise InvalidRequestError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise InvalidRequestError(
        f"{name} is {value!r}, and a whole number of at least {least} is needed{hint}."
    )


def checked_choice(name: str, value: Any, choices: Any) -> None:
    """Refuse a value that the `Literal` type `choices` does not contain."""
    if value not in get_args(choices):
        known = " or ".join(map(repr, get_args(choices)))
        raise InvalidRequestError(f"{name} is {value!r}, and {known} is needed.")
