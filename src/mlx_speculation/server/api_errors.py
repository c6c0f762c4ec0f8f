"""Errors: a status and a JSON object, in the form of OpenAI or of the Messages API."""

import json
import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

from mlx_speculation.errors import (
    ConstraintError,
    InvalidRequestError,
    MissingLibraryError,
)

LOG = logging.getLogger("mlx_speculation.server")
INVALID = "invalid_request_error"
MESSAGES = "/v1/messages"  # prefix of the Messages API's paths
_TYPES = {
    408: "timeout_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error."""

    status: int  # of HTTP
    message: str
    _: KW_ONLY
    param: str | None = None  # the request field at fault
    code: str | None = None  # a more specific type, for programs
    retry: bool | None = None  # whether the client should try again; None: not stated

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """The type in OpenAI's form."""
        usual = INVALID if self.status < 500 else "server_error"
        return usual if self.status == 413 else _TYPES.get(self.status, usual)

    def body_for(self, path: str = "") -> dict[str, Any]:
        """Return the object in the form of the API that a path belongs to."""
        named = {"message": self.message, "type": self.type}
        if path.startswith(MESSAGES):
            usual = INVALID if self.status < 500 else "api_error"
            named["type"] = _TYPES.get(self.status, usual)
            return {"type": "error", "error": named}
        return {"error": {**named, "param": self.param, "code": self.code}}

    def closing(self, path: str = "") -> tuple[dict[str, str], bytes]:
        """Return headers and body of an answer after which the connection closes."""
        body = json.dumps(self.body_for(path)).encode()
        length = {"content-length": str(len(body)), "connection": "close"}
        return {"content-type": "application/json", **length, **self.headers}, body

    @property
    def headers(self) -> dict[str, str]:
        """A header about retries, in a form that the openai package reads."""
        if self.retry is None:
            return {}
        return {"Retry-After": "1"} if self.retry else {"x-should-retry": "false"}


def invalid(message: str, param: str | None = None, **more: Any) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, **more)


def unavailable(message: str, *, retry: bool | None = True) -> ApiError:
    """Return the error for a request that cannot be answered now."""
    return ApiError(503, message, code="unavailable", retry=retry)


def as_api_error(error: BaseException) -> ApiError:
    """Return the error that a client gets for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError | ConstraintError | MissingLibraryError):
        return invalid(str(error))
    # Messages of other libraries may hold paths of this machine.
    LOG.error("a request failed", exc_info=error)
    kind = type(error).__name__
    return ApiError(500, f"The server failed ({kind}); its log has the details.")
