"""From the bytes of a request to a JSON object, whatever they are."""

import json
from typing import Any

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.api_errors import invalid

DEEPEST = 64


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the object that a body holds.

    Raises:
        ApiError: it is no UTF-8, no JSON or no object, too deep, or holds text that no
            tokenizer takes or a number that is none.
    """
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
