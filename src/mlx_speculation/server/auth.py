"""Access: the API key of clients, and the allowed origins of web pages."""

import hmac
from email.message import Message

from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings


def check_permission(headers: Message, settings: Settings) -> None:
    """Refuse a client without permission.

    Raises:
        ApiError: a page of another origin asks, or the key is not shown.
    """
    origin = headers.get("Origin")
    allowed = settings.allowed_origins
    if origin is not None and "*" not in allowed and origin not in allowed:
        raise ApiError(
            403,
            f"Pages of {origin[:200]!r} may not use this server. Its option "
            "--allowed-origins names those that may.",
            code="origin_not_allowed",
        )
    if settings.api_key is None:
        return
    kind, _, shown = headers.get("Authorization", "").partition(" ")
    # http.server reads headers as Latin-1.
    given = shown.strip().encode("latin-1", "replace")
    same = hmac.compare_digest(given, settings.api_key.encode())
    if kind.lower() != "bearer" or not same:
        raise ApiError(
            401,
            "The API key is missing or wrong. Send Authorization: Bearer KEY.",
            code="invalid_api_key",
        )
