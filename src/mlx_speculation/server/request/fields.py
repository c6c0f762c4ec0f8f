"""Taking fields out of a JSON object, each with its kind and its range."""

import logging
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from mlx_speculation.server.api_errors import ApiError, invalid

LOG = logging.getLogger("mlx_speculation.server")
T = TypeVar("T")


class Fields:
    """The fields of an object that were not taken yet; null counts as not given.

    Args:
        given: the object.
        where: its name in a message, with a dot at the end; empty: the body itself.
    """

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._left = {name: value for name, value in given.items() if value is not None}
        self._nulls = set(given) - set(self._left)
        self._where = where
        self._known: set[str] = set()  # the names that were asked for

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field of any kind."""
        self._known.add(name)
        self._nulls.discard(name)
        return self._left.pop(name, default)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a finite number in a range."""
        value = self.take(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not low <= value <= high or math.isinf(value):
            raise self.wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def whole(
        self,
        name: str,
        default: int | None,
        low: int,
        high: int | None = None,
        option: str = "",  # of the server, that allows more than `high`
    ) -> int | None:
        """Return a whole number in a range."""
        value = self.take(name)
        if value is None:
            return default
        count = isinstance(value, int) and not isinstance(value, bool)
        if not count or value < low or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            if option:
                most += f" (start the server with a larger --{option} for more)"
            raise self.wrong(name, value, f"a whole number of at least {low}{most}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text."""
        return self._of_kind(name, str, "a text", default)

    def object(self, name: str) -> dict[str, Any] | None:
        """Return an object."""
        return self._of_kind(name, dict, "an object")

    def list(self, name: str) -> list[Any] | None:
        """Return a list."""
        return self._of_kind(name, list, "a list")

    def _of_kind(
        self, name: str, kind: type[T], needed: str, default: T | None = None
    ) -> T | None:
        value: T | None = self.take(name, default)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, value, needed)
        return value

    def without_effect(self, *names: str) -> None:
        """Pass over fields that change nothing here."""
        for name in names:
            self.take(name)

    def ignore(self, *names: str) -> None:
        """Pass over hints of OpenAI's that are not followed, with a line in the log."""
        for name in names:
            if self.take(name) is not None:
                LOG.warning(
                    "%s%s is given, and is not followed here", self._where, name
                )

    def only(self, name: str, *allowed: Any) -> Any:
        """Return a field that has few values here; None: it is not given."""
        value = self.take(name)
        if value is None or any(
            value == one and type(value) is type(one) for one in allowed
        ):
            return value
        needed = " or ".join(repr(one) for one in allowed)
        raise self.wrong(name, value, needed)

    def refuse(self, name: str, advice: str) -> None:
        """Refuse a field that is not offered, and say what to do instead."""
        if self.take(name) is not None:
            raise invalid(
                f"{self._where}{name} is not offered here. {advice}",
                param=self._where + name,
            )
        self._known.discard(name)

    def end(self, advice: str = "Leave it out.") -> None:
        """Refuse what nobody has taken, and say what to do instead."""
        for name in (*self._left, *self._nulls):
            known_as = self._where + name[:100]
            near = get_close_matches(name[:100], self._known, n=1, cutoff=0.75)
            meant = f"Did you mean {self._where + near[0]!r}?" if near else advice
            raise invalid(
                f"{known_as!r} is not known here. {meant}",
                param=known_as,
                code="unknown_parameter",
            )

    def wrong(self, name: str, value: Any, needed: str) -> ApiError:
        """Return the error of a field with a wrong value."""
        return invalid(
            f"{self._where}{name} is {_short(value)}, and {needed} is needed.",
            param=self._where + name,
        )


def _short(value: Any) -> str:
    """Show a value of any size; `repr` of a number with many digits would raise."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    shown = value if isinstance(value, str) else repr(value)
    if isinstance(value, str):
        shown = repr(value[:200])
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
