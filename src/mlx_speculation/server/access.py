"""Access: paths, the allowed origins of web pages, and the API key of clients."""

import hmac
from email.message import Message

from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings

CHATS = ("/v1/chat/completions", "/chat/completions")
TEXTS = ("/v1/completions",)
MODELS = "/v1/models"
GET = ("/", MODELS, "/health", "/metrics")


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


def no_such_path(method: str, path: str) -> ApiError:
    """Return the error of a path that is not there, or takes another method."""
    takes = {**dict.fromkeys((*CHATS, *TEXTS), "POST"), **dict.fromkeys(GET, "GET")}
    other = takes.get(path.partition("?")[0])
    if other is not None and other != method:
        json = " with a JSON object" if other == "POST" else ""
        return ApiError(
            405,
            f"{path[:200]!r} takes no {method}. Send a {other}{json}.",
            code="no_method",
        )
    return ApiError(
        404,
        f"There is no {method} {path[:200]!r} here. GET / lists the paths.",
        code="no_path",
    )
