"""Bodies of requests: from bytes to pydantic models, and errors in the APIs' form.

A null counts as a missing field. Types are strict: a number in quotes is no number.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.api_errors import ApiError, invalid

DEEPEST = 64
Object = dict[str, Any]
# Text of an unimportant field: a value of another type counts as empty.
Loose = Annotated[str, BeforeValidator(lambda it: it if isinstance(it, str) else "")]


def parsed(raw: bytes) -> Object:
    """Return the object that a body holds; raise ApiError if the body is not valid."""
    try:
        body = parse_json(raw, finite=True, deepest=DEEPEST)
    except JsonFlawError as error:
        raise invalid(f"The body {error}.") from error
    if not isinstance(body, dict):
        raise invalid(f"The body is a {type(body).__name__}, not a JSON object.")
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            "A text in the body holds half of a surrogate pair, which is no character."
        ) from error
    return body


class RequestModel(BaseModel):
    """An object of a request; unknown names are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = {name: value for name, value in given.items() if value is not None}
        cls.check_names(values)
        return values

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Check or change fields before they are validated; here all are allowed."""


class StrictModel(RequestModel):
    """An object whose unknown names are refused, as they might change the text."""

    where: ClassVar[str] = ""  # prefix of names in errors, with a dot
    advice: ClassVar[str] = "Leave it out."
    not_offered: ClassVar[dict[str, str]] = {}  # advice for names that are refused
    no_effect: ClassVar[frozenset[str]] = frozenset()  # ignored names

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Refuse unknown names, and suggest a similar known name."""
        for name in values.keys() - cls.model_fields.keys() - cls.no_effect:
            shown = cls.where + name[:100]
            if name in cls.not_offered:
                advice = cls.not_offered[name]
                raise invalid(f"{shown} is not offered here. {advice}", shown)
            near = get_close_matches(name[:100], cls.model_fields, n=1, cutoff=0.75)
            meant = f"Did you mean {cls.where + near[0]!r}?" if near else cls.advice
            said = f"{shown!r} is not known here. {meant}"
            raise invalid(said, shown, code="unknown_parameter")


def as_invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return the first of pydantic's errors as an error of the request."""
    error, param, value = errors[0], "", body
    # The first step of `loc` is "body"; a later one may name a member of a union.
    for step in error["loc"][1:]:
        if isinstance(value, str):
            break
        with suppress(LookupError, TypeError):
            value = value[step]
            param += f"[{step}]" if isinstance(step, int) else f".{str(step)[:100]}"
    if error["type"] == "missing":
        param += f".{error['loc'][-1]}"
    param = param.removeprefix(".")
    if error["type"] == "missing":
        return invalid(f"{param} is missing. Add it.", param)
    shown = f"{param} is {short(value)}" if param else "The body"
    why = error["msg"].removeprefix("Value error, ")
    return invalid(f"{shown}: {why}.", param or None)


def short(value: Any) -> str:
    """Show a value of any size; `repr` of a number with many digits would raise."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    shown = repr(value[:200]) if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def at_most(
    value: int | None, most: int | None, param: str, option: str, *, shown: str = ""
) -> None:
    """Raise ApiError for a number above a limit; `most` None: there is no limit."""
    if value is not None and most is not None and value > most:
        raise invalid(
            f"{shown or param} is {short(value)}; at most {most} is allowed. Ask for "
            f"less, or start the server with a larger --{option}.",
            param,
        )
