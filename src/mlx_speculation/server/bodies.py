"""From the bytes of a request to a JSON object, whatever they are."""

import json
import re
from typing import Any

from mlx_speculation.server.refusals import ApiError, invalid

DEEPEST = 64
# A string that is not closed goes to the end, so that no byte is looked at twice.
_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the object that a body holds.

    Raises:
        ApiError: it is no UTF-8, no JSON or no object, too deep, or holds text that no
            tokenizer takes or a number that is none.
    """
    _check_depth(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"The body is not UTF-8: byte 0x{raw[error.start]:02x} stands at "
            f"{error.start}."
        ) from error
    try:
        body = json.loads(text, parse_constant=_no_number)
    except ApiError:
        raise
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is no JSON: {error}.") from error
    if not isinstance(body, dict):
        raise invalid(f"The body is a {type(body).__name__}, not a JSON object.")
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            "A text in the body holds half of a surrogate pair, which is no character."
        ) from error
    return body


def _check_depth(raw: bytes) -> None:
    """Refuse nesting that would cost a parser its stack."""
    if raw.count(b"[") + raw.count(b"{") <= DEEPEST:
        return
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(raw):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        if depth > DEEPEST:
            raise invalid(f"The body is nested more than {DEEPEST} deep.")


def _no_number(word: str) -> None:
    raise invalid(f"The body holds {word}, which is no JSON number.")
