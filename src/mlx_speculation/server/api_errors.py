"""Errors: a status and a JSON object, in OpenAI's form or in that of the Messages API.

{"error": {"message": "...", "type": "invalid_request_error",
           "param": "temperature", "code": null}}
{"type": "error", "error": {"type": "invalid_request_error", "message": "..."}}
"""

import json
from typing import Any

from mlx_speculation.errors import (
    ConstraintError,
    InvalidRequestError,
    MissingLibraryError,
)

INVALID, OVERLOADED = "invalid_request_error", "overloaded_error"
MESSAGES = "/v1/messages"  # the paths of the Messages API begin so
_TYPES = {
    408: "timeout_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: OVERLOADED,
    504: "timeout_error",
}
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer that says what is wrong."""

    def __init__(
        self,
        status: int,  # of HTTP
        message: str,  # for people
        *,
        # A word for programs; by default what the status stands for
        type: str | None = None,
        param: str | None = None,  # the field of the request that is meant
        code: str | None = None,  # a closer word for programs
        # Whether the same request may go well later; None: unsaid
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        usual = INVALID if status < 500 else "server_error"
        self.type = type or (usual if status == 413 else _TYPES.get(status, usual))
        self.param, self.code, self.retry = param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the object in the form of the API that a path belongs to."""
        if not path.startswith(MESSAGES):
            return self.body
        kind = _TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def closing(self, path: str = "") -> tuple[dict[str, str], bytes]:
        """Return headers and body of an answer after which the connection closes."""
        body = json.dumps(self.body_for(path)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **self.headers,
        }
        return headers, body

    @property
    def headers(self) -> dict[str, str]:
        """Headers for retries; the openai package reads both."""
        if self.retry is None:
            return {}
        if self.retry:
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"x-should-retry": "false"}


def invalid(message: str, param: str | None = None, **more: Any) -> ApiError:
    """Return the error of a request that is wrong."""
    return ApiError(400, message, param=param, **more)


def unavailable(message: str, *, retry: bool | None = True) -> ApiError:
    """Return the error of a server that cannot answer now."""
    return ApiError(503, message, code="unavailable", retry=retry)


def late(seconds: float, *, began: bool) -> ApiError:
    """Return the error of a request whose time is over."""
    if began:
        return ApiError(
            504,
            f"The answer took more than {seconds:g} seconds. Ask for fewer tokens.",
            code="timeout",
            retry=False,
        )
    return ApiError(
        503,
        f"The request has waited for {seconds:g} seconds. Try again later.",
        code="queue_timeout",
        retry=True,
    )


def as_api_error(error: BaseException) -> ApiError:
    """Return what a client learns of an exception.

    Of what is not the request's fault it learns the kind alone: messages of other
    libraries may hold paths of this machine.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError | ConstraintError | MissingLibraryError):
        return invalid(str(error))
    return ApiError(
        500, f"The server failed ({type(error).__name__}); its log has the details."
    )
