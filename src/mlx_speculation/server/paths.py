"""The paths of the server, and the errors of a request for none of them."""

from mlx_speculation.server.api_errors import ApiError

CHATS = ("/v1/chat/completions", "/chat/completions")
TEXTS = ("/v1/completions",)
MODELS = "/v1/models"
GET = ("/", MODELS, "/health", "/metrics")


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
