"""From the bytes of a request to a JSON object, whatever they are."""

import json
import re
from email.message import Message
from typing import Any, BinaryIO

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.api_errors import ApiError, invalid

DEEPEST = 64


def check_framing(headers: Message) -> None:
    """Refuse a request that somebody else may see other bounds of.

    A proxy that goes by another header than this server takes a part of one client's
    body for the next client's request.

    Raises:
        ApiError: a line is no header, or the headers do not agree on the body.
    """
    if headers.defects or headers.get_payload():
        raise invalid("A line among the headers is no header. Send NAME: VALUE.")
    given = headers.get_all("Content-Length", [])
    coding = headers.get("Transfer-Encoding")
    if coding is not None and given:
        raise invalid(
            f"Transfer-Encoding ({coding[:100]!r}) and Content-Length "
            f"({given[0][:100]!r}) are both given. Send Content-Length alone."
        )
    if len(set(given)) > 1 or not all(
        re.fullmatch(r"[0-9]{1,18}", one.strip()) for one in given
    ):
        raise invalid("Content-Length is not one whole number.")


def read_body(headers: Message, source: BinaryIO, most: int) -> bytes:
    """Return as many bytes as the client has announced.

    Raises:
        ApiError: there are more, or fewer came, or it is not said how many.
    """
    given = headers.get_all("Content-Length", [])
    if not given:
        raise ApiError(411, "Content-Length is missing, and has to be sent.")
    length = int(given[0])
    if length > most:
        raise ApiError(
            413,
            f"The body has {length} bytes, and {most} may be. Send less, or start the "
            "server with a larger --max-body-bytes.",
            code="body_too_large",
        )
    body = source.read(length)
    if len(body) < length:
        raise invalid(
            f"The body has {len(body)} bytes, and Content-Length says {length}."
        )
    return body


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
